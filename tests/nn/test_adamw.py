"""loka.AdamW steps as torch's does, and leaves casts that are of the weight as it is."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stepped import MAKERS, assert_current, block, is_current, layer, learn, twins
from torch import nn

import loka
from loka.core.recipe import Transform
from loka.nn import adamw
from loka.nn.linear import LokaLinear
from loka.nn.weight_casts import held

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy, of interpreted NaNs


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.0, "eps": 1e-3, "betas": (0.5, 0.9)}])
@pytest.mark.usefixtures("never_cast_apart")
def test_steps_are_torchs_and_casts_are_current(
    device: torch.device, make: Callable[[torch.device], nn.Module], options: dict[str, Any]
) -> None:
    planned, plain = twins(make, device)
    ours = loka.AdamW(planned.parameters(), lr=0.01, **options)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True, **options)
    for step, lr in enumerate((0.01, 0.01, 0.003)):
        version = planned.weight._version
        for module, optimizer in ((planned, ours), (plain, theirs)):
            optimizer.param_groups[0]["lr"] = lr
            learn(module, step)
            optimizer.step()
        for parameter, other in zip(planned.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter, other, rtol=1e-6, atol=5e-7)  # what torch's own is off by on a GPU
            for name, state in ours.state[parameter].items():
                torch.testing.assert_close(state, theirs.state[other][name], rtol=1e-5, atol=1e-7)
        assert planned.weight._version > version
        assert_current(planned)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.usefixtures("never_cast_apart")
def test_a_learning_rate_on_the_device(device: torch.device, make: Callable[[torch.device], nn.Module]) -> None:
    planned, plain = twins(make, device)
    lr = torch.tensor(0.01, device=device)
    ours, theirs = loka.AdamW(planned.parameters(), lr=lr), torch.optim.AdamW(plain.parameters(), lr=lr, fused=True)
    for step in range(2):
        lr.fill_(0.01 * (step + 1))
        for module, optimizer in ((planned, ours), (plain, theirs)):
            learn(module, step)
            optimizer.step()
    torch.testing.assert_close(planned.weight, plain.weight, rtol=1e-6, atol=5e-7)  # what torch's own is off by on a GPU
    assert_current(planned)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_number_behind_a_learning_rate_of_any_shape(device: torch.device, shape: tuple[int, ...]) -> None:
    planned, plain = twins(layer, device)
    lr = torch.full(shape, 0.01, device=device)
    ours, theirs = loka.AdamW(planned.parameters(), lr=lr), torch.optim.AdamW(plain.parameters(), lr=lr, fused=True)
    for step, now in enumerate((lr, 0.0, lr, 0.003)):
        for module, optimizer in ((planned, ours), (plain, theirs)):
            optimizer.param_groups[0]["lr"] = now
            learn(module, step)
            optimizer.step()
        torch.testing.assert_close(planned.weight, plain.weight, rtol=1e-6, atol=5e-7)
    assert_current(planned)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_settings_are_fp32_whatever_the_default_is(device: torch.device, default: torch.dtype) -> None:
    """In bf16 a β of 0.999 is 1."""
    planned, plain = twins(layer, device)
    ours, theirs = (
        loka.AdamW(planned.parameters(), lr=0.01),
        torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True),
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        for module, optimizer in ((planned, ours), (plain, theirs)):
            learn(module, 0)
            optimizer.step()
    finally:
        torch.set_default_dtype(before)
    assert {known.tensor.dtype for known in ours._settings_of_groups.values()} == {torch.float32}  # type: ignore[attr-defined]
    torch.testing.assert_close(planned.weight, plain.weight, rtol=1e-6, atol=5e-7)
    assert_current(planned)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.usefixtures("never_cast_apart")
def test_an_infinity_found_holds_everything(device: torch.device, make: Callable[[torch.device], nn.Module]) -> None:
    planned, _ = twins(make, device)
    optimizer = loka.AdamW(planned.parameters(), lr=0.01)
    learn(planned, 0)
    optimizer.step()
    before = planned.weight.detach().clone(), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.found_inf = torch.ones((), device=device)  # type: ignore[attr-defined]
    planned.weight.grad.fill_(float("inf"))  # type: ignore[union-attr]
    optimizer.step()
    assert torch.equal(planned.weight, before[0])
    for index, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(tensor, before[1][index][name]) for name, tensor in state.items())
    assert_current(planned)
    optimizer.found_inf = torch.zeros((), device=device)  # type: ignore[attr-defined]
    learn(planned, 1)
    optimizer.step()
    assert not torch.equal(planned.weight, before[0])
    assert_current(planned)


def _amsgrad(module: nn.Module) -> loka.AdamW:
    return loka.AdamW(module.parameters(), lr=0.01, amsgrad=True)


def _maximize(module: nn.Module) -> loka.AdamW:
    return loka.AdamW(module.parameters(), lr=0.01, maximize=True)


def _steps_on_the_host(module: nn.Module) -> loka.AdamW:
    return loka.AdamW(module.parameters(), lr=0.01, fused=False)


def _scaled(module: nn.Module) -> loka.AdamW:
    optimizer = loka.AdamW(module.parameters(), lr=0.01)
    weight = next(module.parameters())
    optimizer.grad_scale = torch.full((), 2.0, device=weight.device)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.zeros((), device=weight.device)  # type: ignore[attr-defined]
    return optimizer


def _of_few_values(module: nn.Module) -> loka.AdamW:
    adamw.WORTH_IT = module.weight.numel() + 1  # type: ignore[operator]
    return loka.AdamW(module.parameters(), lr=0.01)


def _columns_first(module: nn.Module) -> loka.AdamW:
    module.weight = nn.Parameter(module.weight.detach().t().contiguous().t())  # type: ignore[operator,union-attr]
    if type(module) is not nn.Module:
        module.refresh_weight_casts()  # type: ignore[operator]
    return loka.AdamW(module.parameters(), lr=0.01)


OTHERS = [_amsgrad, _maximize, _steps_on_the_host, _scaled, _of_few_values, _columns_first]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("others", OTHERS, ids=lambda made: made.__name__)
@pytest.mark.usefixtures("never_ours")
def test_what_our_kernels_cannot_do_torch_does(
    device: torch.device, make: Callable[[torch.device], nn.Module], others: Callable[[nn.Module], loka.AdamW]
) -> None:
    if device.type == "cpu" and others is _steps_on_the_host:
        pytest.skip("the device is the host")
    planned, plain = twins(make, device)
    optimizer, expected = others(planned), others(plain)
    expected.__class__ = torch.optim.AdamW
    for module, its in ((planned, optimizer), (plain, expected)):
        learn(module, 0)
        its.step()
    assert torch.equal(planned.weight, plain.weight)
    assert_current(planned)


def test_arguments_are_torchs() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    for options in ({"foreach": True}, {"foreach": False}, {"differentiable": True}, {"fused": None}, {"fused": False}):
        group = loka.AdamW([weight], **options).param_groups[0]
        assert {name: group[name] for name in options} == options
    assert loka.AdamW([weight]).param_groups[0]["fused"]
    assert loka.AdamW([weight], 0.1, (0.5, 0.9)).param_groups[0]["fused"]
    with pytest.raises(RuntimeError, match="cannot be `True` together"):
        loka.AdamW([weight], fused=True, foreach=True)


@pytest.mark.usefixtures("never_ours")
def test_a_weight_of_two_layers_a_bf16_one_and_a_centered_one_are_torchs(device: torch.device) -> None:
    one, two, centered = layer(device), layer(device), layer(device, Transform.CENTER)
    two.weight = one.weight
    two.refresh_weight_casts()
    half = block(device).to(torch.bfloat16)
    modules = nn.ModuleList([one, two, centered, half])
    optimizer = loka.AdamW(modules.parameters(), lr=0.01)
    learn(modules, 0)
    optimizer.step()
    for module in modules:
        assert_current(module)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, loka.AdamW])
def test_what_a_centered_layer_adds_is_of_the_weight_behind_the_step(
    device: torch.device, kind: type[torch.optim.Optimizer]
) -> None:
    """It is no cast, and so not written with them."""
    centered = layer(device, Transform.CENTER)
    optimizer = kind(centered.parameters(), lr=0.01)  # type: ignore[call-arg]
    learn(centered, 0)
    optimizer.step()
    mean_K = torch.full((64,), 2.0, dtype=torch.float64, device=device)
    torch.testing.assert_close(held(centered)["weight_shift"].double(), centered.weight.double() @ mean_K, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("never_cast_apart")
def test_layers_without_a_plan_and_without_gradients_beside_it(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    planned, plain = nn.ModuleList([layer(device), block(device), layer(device)]), nn.Linear(8, 8, device=device)
    optimizer = loka.AdamW([*planned.parameters(), *plain.parameters()], lr=0.01)
    learn(planned, 0)
    learn(plain, 0)
    planned[2].weight.grad = None
    before = [parameter.detach().clone() for parameter in (planned[0].weight, planned[2].weight, plain.weight)]
    with (
        monkeypatch.context() as patch
    ):  # that of a weight that did not move is cast as ever: somebody may have written its data
        cast: list[nn.Module] = []
        patch.setattr(LokaLinear, "recast_after_step", lambda self: cast.append(self))
        optimizer.step()
    assert cast == [planned[2]]
    moved = [
        not torch.equal(old, new) for old, new in zip(before, (planned[0].weight, planned[2].weight, plain.weight), strict=True)
    ]
    assert moved == [True, False, True]
    assert_current(planned[0])
    assert_current(planned[1])


def test_a_weight_written_behind_its_step_is_cast_again(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the optimizer has cast counts for the weight that it left, and for the end of this step alone."""
    module = layer(device)
    optimizer = loka.AdamW(module.parameters(), lr=0.01)

    def double(*args: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(2)

    learn(module, 0)
    with monkeypatch.context() as patch:
        step = module.step_and_recast
        patch.setattr(module, "step_and_recast", lambda adam: (step(adam), double()))
        optimizer.step()
    assert_current(module)

    optimizer.zero_grad()  # the next step moves nothing, and data that was written since is cast
    module.weight.data.mul_(3)
    assert not is_current(module)
    optimizer.step()
    assert_current(module)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, loka.AdamW])
def test_data_written_by_a_hook_behind_the_step_is_cast(
    device: torch.device, make: Callable[[torch.device], nn.Module], kind: type[torch.optim.AdamW]
) -> None:
    """As constraints on weights are kept."""
    module = make(device)
    optimizer = kind(module.parameters(), lr=0.01)
    optimizer.register_step_post_hook(lambda *args: module.weight.data.mul_(3))  # type: ignore[union-attr]
    for step in range(2):
        learn(module, step)
        optimizer.step()
        assert_current(module)


def test_what_a_failed_step_has_cast_counts_no_longer(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = nn.ModuleList([layer(device), nn.Linear(4, 4, device=device)])
    optimizer = loka.AdamW(modules.parameters(), lr=0.01)
    learn(modules, 0)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_fused_adamw_", lambda *args, **named: pytest.fail("torch's own did"))
        with pytest.raises(pytest.fail.Exception):
            optimizer.step()
    assert_current(modules[0])
    optimizer.zero_grad()
    modules[0].weight.data.mul_(3)
    optimizer.step()
    assert_current(modules[0])


@pytest.mark.parametrize("make", MAKERS)
def test_a_backward_pass_that_saved_the_casts_before_is_refused(
    device: torch.device, make: Callable[[torch.device], nn.Module]
) -> None:
    module = make(device)
    optimizer = loka.AdamW(module.parameters(), lr=0.01)
    for _ in range(2):  # the second time by launches made again
        x = torch.randn(4, module.weight.shape[1], device=device, requires_grad=True)  # type: ignore[union-attr]
        loss = module(x).float().square().sum()
        learn(module, 0)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("make", MAKERS)
def test_autograd_sees_steps_of_another_weight_in_the_same_place(
    device: torch.device, make: Callable[[torch.device], nn.Module]
) -> None:
    """A parameter made anew of the old one's data lies where it lay, but counts its versions by itself."""
    module: Any = make(device)
    optimizer = loka.AdamW(module.parameters(), lr=0.01)
    for step in range(2):
        learn(module, step)
        optimizer.step()
    old, module.weight = module.weight, nn.Parameter(module.weight.data)
    module.weight.grad = old.grad
    module.refresh_weight_casts()
    (group,) = optimizer.param_groups
    group["params"] = list(module.parameters())
    optimizer.state[module.weight] = optimizer.state.pop(old)
    loss = module.weight.square().sum()
    optimizer.step()
    assert_current(module)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
