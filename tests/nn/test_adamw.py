"""loka.AdamW steps as torch's does, and leaves casts that are of the weight as it is."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_graphs import captured
from torch import Tensor, nn

import loka
from loka.core.recipe import Transform
from loka.kernels.casting import CASTERS
from loka.kernels.executor import SiteKernels
from loka.nn import adamw, linear
from loka.nn.block_norm import BlockNorm
from loka.nn.fused_block import FusedBlock
from loka.nn.linear import LokaLinear
from loka.nn.weight_casts import held

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy, of interpreted NaNs

WIDE = 512  # from which rows of a block's weight have powers of two


@pytest.fixture(autouse=True)
def small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "WORTH_IT", 0)


@pytest.fixture
def device(kernels_on: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where our kernels cast weights: on a CPU interpreted, if told to."""
    if kernels_on.type == "cpu":
        monkeypatch.setattr(linear, "rewriter_of", lambda *args: CASTERS.get("triton"))
    return kernels_on


def layer(device: torch.device, transform: Transform = Transform.NONE) -> LokaLinear:
    plain = nn.Linear(64, 40, device=device)
    name = "reference.tensorwise" if device.type == "cpu" else "triton.tensorwise"
    vector = None if transform is Transform.NONE else torch.full((64,), 2.0)
    return LokaLinear.from_linear(plain, SiteKernels.same(name), transform, vector)


def block(device: torch.device) -> FusedBlock:
    made = FusedBlock(nn.Parameter(0.02 * torch.randn(24, WIDE, device=device)), None, BlockNorm(24), None)
    assert made.why_reference is None
    return made


MAKERS: list[Callable[[torch.device], nn.Module]] = [layer, block]


def learn(module: nn.Module, seed: int) -> None:
    """Gradients for all, drawn and not computed."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)  # which keeps the order of axes, as autograd does
        parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))


def casts(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in held(module).items() if name != "weight_memory"}


def assert_current(module: Any) -> None:
    """What is held, decoded, is the weight to the rounding of e4m3."""
    if isinstance(module, FusedBlock):
        codes = module._held_codes()
        pairs = [(codes.codes_NK, codes.scale_N, module.weight), (codes.codes_KN, codes.scale_KN, module.weight.t())]
    else:
        there, w = held(module), module.weight
        oriented = (w, w.t()) if there["weight_codes_0"].shape[1] >= w.shape[1] else (w.t(), w)
        pairs = [(there[f"weight_codes_{index}"], there[f"weight_scale_{index}"], oriented[index]) for index in (0, 1)]
    for codes_OC, scale, weight in pairs:
        rows, cols = weight.shape
        value = (codes_OC.float() * scale)[:rows, :cols]
        assert ((value - weight).abs() <= weight.abs() / 16 + weight.abs().max() * 2.0**-16).all()


@pytest.fixture
def never_cast_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (LokaLinear, FusedBlock):
        monkeypatch.setattr(kind, "recast_after_step", lambda self: pytest.fail("the weight was read once more"))


@pytest.fixture
def never_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (LokaLinear, FusedBlock):
        monkeypatch.setattr(kind, "step_and_recast", lambda self, adam: pytest.fail("stepped by our kernels"))


def twins(make: Callable[[torch.device], nn.Module], device: torch.device) -> tuple[nn.Module, nn.Module]:
    """A planned module, and a plain one of the same parameters."""
    torch.manual_seed(0)
    planned = make(device)
    plain = nn.Module()
    for name, parameter in planned.named_parameters():
        plain.register_parameter(name, nn.Parameter(parameter.detach().clone()))
    return planned, plain


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
    assert not _is_current(module)
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


def _is_current(module: nn.Module) -> bool:
    try:
        assert_current(module)
    except AssertionError:
        return False
    return True


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


@pytest.mark.parametrize("make", MAKERS)
def test_state_goes_from_torchs_to_ours_and_back(device: torch.device, make: Callable[[torch.device], nn.Module]) -> None:
    planned, plain = twins(make, device)
    optimizers: list[torch.optim.AdamW] = [
        loka.AdamW(planned.parameters(), lr=0.01),
        torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True),
    ]
    for step in range(2):
        for module, optimizer in zip((planned, plain), optimizers, strict=True):
            learn(module, step)
            optimizer.step()
        first, second = (copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers)
        optimizers[0].load_state_dict(second)
        optimizers[1].load_state_dict(first)
    torch.testing.assert_close(planned.weight, plain.weight, rtol=1e-6, atol=5e-7)  # what torch's own is off by on a GPU


@pytest.mark.parametrize("theirs", [{}, {"foreach": True}, {"fused": False}])
def test_state_of_loops_goes_on_fused(device: torch.device, theirs: dict[str, Any]) -> None:
    """Its number of steps lies on the host, where no kernel reads it; and a GradScaler has asked how steps are made before."""
    module = layer(device)
    before = torch.optim.AdamW(module.parameters(), lr=0.01, **theirs)
    learn(module, 0)
    before.step()
    optimizer = loka.AdamW(module.parameters(), lr=0.5)
    state = before.state_dict()
    optimizer.load_state_dict(state)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["fused"], group["foreach"]) == (0.01, True, None)
    assert state["param_groups"][0]["fused"] == theirs.get("fused")  # as it was
    assert optimizer.state[module.weight]["step"].device.type == device.type
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    scaler.scale(module.weight.square().sum()).backward()
    scaler.step(optimizer)
    assert optimizer.state[module.weight]["step"] == 2
    assert_current(module)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({**state, "param_groups": []})
    told = loka.AdamW(module.parameters(), fused=False)
    told.load_state_dict(optimizer.state_dict())
    assert told.param_groups[0]["fused"]  # with its number of steps on the device, as torch has it


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.usefixtures("never_ours")
def test_averages_of_another_shape_are_torchs_to_refuse(
    device: torch.device, make: Callable[[torch.device], nn.Module]
) -> None:
    """A ``load_state_dict`` takes them. On a CPU torch reads what lies behind them, too."""
    module = make(device)
    optimizer = loka.AdamW(module.parameters(), lr=0.01)
    for parameter in module.parameters():
        averages = {name: torch.zeros(3, 3, device=device) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.ones((), device=device), **averages}
    learn(module, 0)
    gathered: list[list[Tensor]] = [[] for _ in range(6)]
    optimizer._init_group(optimizer.param_groups[0], *gathered)
    assert len(gathered[0]) == len(list(module.parameters()))


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["deepcopy", "pickle"])
def test_a_copy_of_model_and_optimizer_goes_on(
    device: torch.device, copier: Callable[[tuple[nn.Module, torch.optim.Optimizer]], Any]
) -> None:
    module = layer(device)
    optimizer = loka.AdamW(module.parameters(), lr=0.01)
    learn(module, 0)
    optimizer.step()
    other, other_optimizer = copier((module, optimizer))
    for model, its in ((module, optimizer), (other, other_optimizer)):
        learn(model, 1)
        its.step()
    assert torch.equal(module.weight, other.weight)
    assert_current(other)


@pytest.mark.usefixtures("never_ours")
def test_a_compiled_step_is_torchs(device: torch.device) -> None:
    """Tracing runs the gathering once: what were stepped there would never be stepped again."""
    torch.compiler.reset()
    planned, plain = twins(layer, device)
    optimizers = [
        loka.AdamW(module.parameters(), lr=0.01, fused=False, capturable=device.type == "cuda") for module in (planned, plain)
    ]
    step = torch.compile(lambda: optimizers[0].step(), backend="eager")
    for seed in range(3):
        for module in (planned, plain):
            learn(module, seed)
        step()
        optimizers[1].step()
    torch.testing.assert_close(planned.weight, plain.weight)
    assert_current(planned)


@pytest.mark.gpu
@pytest.mark.parametrize("warm_lr", [0.01, 0.02], ids=["the rate of the steps before", "another"])
def test_a_captured_step_keeps_its_rate_and_eager_ones_theirs(device: torch.device, warm_lr: float) -> None:
    if device.type == "cpu":
        pytest.skip("nothing is captured on a CPU")
    planned, plain = twins(layer, device)
    pairs = [
        (planned, loka.AdamW(planned.parameters(), lr=warm_lr, capturable=True)),
        (plain, torch.optim.AdamW(plain.parameters(), lr=warm_lr, capturable=True, fused=True)),
    ]
    for module, optimizer in pairs:
        learn(module, 0)
        captured(optimizer.step)  # which steps three times; the graph is let go
        optimizer.param_groups[0]["lr"] = 0.01
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        for lr in (0.03, 0.005):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            graph.replay()
        optimizer.step()
    torch.testing.assert_close(planned.weight, plain.weight, rtol=1e-6, atol=1e-6)
    assert_current(planned)


@pytest.mark.gpu
@pytest.mark.parametrize("make", MAKERS)
def test_neither_gradients_nor_averages_are_kept(device: torch.device, make: Callable[[torch.device], nn.Module]) -> None:
    if device.type == "cpu":
        pytest.skip("an interpreted launch keeps its arguments")
    module = make(device)
    optimizer = loka.AdamW(module.parameters(), lr=0.01)
    for step in range(3):
        learn(module, step)
        gradient = weakref.ref(module.weight.grad)  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
        assert gradient() is None
    average = weakref.ref(optimizer.state[module.weight]["exp_avg"])  # type: ignore[index]
    del optimizer
    gc.collect()
    assert average() is None
    assert_current(module)


@pytest.mark.gpu
@pytest.mark.usefixtures("never_cast_apart")
def test_captured_steps_are_those_of_eager(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("nothing is captured on a CPU")
    models, optimizers = [], []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.ModuleList([layer(device), block(device)]))
        learn(models[-1], 0)
        optimizers.append(loka.AdamW(models[-1].parameters(), lr=0.01, capturable=True))
    graph, _ = captured(optimizers[0].step)  # after three steps
    for _ in range(3):
        optimizers[1].step()
    for seed in range(3):
        for model in models:
            learn(model, seed)
        graph.replay()
        optimizers[1].step()
    for one, other in zip(*models, strict=True):
        assert torch.equal(one.weight, other.weight)
        for name, cast in casts(one).items():
            assert torch.equal(cast.view(torch.uint8), casts(other)[name].view(torch.uint8))
        assert_current(one)
