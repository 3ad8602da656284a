"""What loka.AdamW keeps from step to step: its state, in checkpoints and copies, and what captured and compiled steps hold."""

import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_graphs import captured
from stepped import MAKERS, assert_current, block, casts, layer, learn, twins
from torch import Tensor, nn

import loka
from loka.nn import fused_block, weight_casts
from loka.nn.adamw import is_cast_in_step
from loka.nn.weight_casts import held

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy, of interpreted NaNs


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


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, loka.AdamW])
@pytest.mark.parametrize("whole", [False, True], ids=["data", "parameter"])
def test_a_weight_of_another_shape_is_not_cast_into_what_is_there(
    device: torch.device, make: Callable[[torch.device], nn.Module], kind: type[torch.optim.AdamW], whole: bool
) -> None:
    """Of a larger one codes would lie behind their memory."""
    module = make(device)
    fewer = module.weight.detach()[:16].clone()
    if whole:
        module.weight = nn.Parameter(fewer)
    else:
        module.weight.data = fewer
    optimizer = kind([module.weight], lr=0.01)
    for step in range(2):
        learn(module, step)
        optimizer.step()
        assert {codes.shape[0] for name, codes in held(module).items() if "codes" in name} == {16, fewer.shape[1]}
        assert_current(module)


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


@pytest.mark.parametrize("kind", [torch.optim.AdamW, loka.AdamW])
def test_launches_that_a_graph_captures_are_not_those_of_eager_steps(
    device: torch.device, kind: type[torch.optim.AdamW], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those have memory that is let go when a gradient lies elsewhere; the graph would go on writing there."""
    module = block(device)
    optimizer, ran, numbers, make = kind(module.parameters(), lr=0.01), [], itertools.count(), fused_block.recasting_weight

    def numbered(*given: Any) -> Callable[[], None]:
        run, number = make(*given), next(numbers)
        return lambda: (ran.append(number), run())[1]

    monkeypatch.setattr(fused_block, "recasting_weight", numbered)
    for step, capturing in enumerate([False, False, True, True, False]):
        monkeypatch.setattr(weight_casts, "is_capturing", lambda device, now=capturing: now)
        learn(module, step)
        optimizer.step()
        assert_current(module)
    assert ran == [0, 0, 1, 2, 0]


@pytest.mark.gpu
def test_replays_write_nowhere_else_when_eager_steps_have_gone_on(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("nothing is captured on a CPU")
    module = block(device)
    optimizer = loka.AdamW(module.parameters(), lr=0.01, capturable=True)
    learn(module, 0)
    gradient = module.weight.grad
    assert gradient is not None
    optimizer.step()
    graph, _ = captured(optimizer.step)
    module.weight.grad = gradient.clone()
    optimizer.step()  # by other launches: the memory of those before is anybody's
    others = [torch.zeros(128 * (1 + index % 4), device=device) for index in range(256)]
    graph.replay()
    assert not any(other.any() for other in others)
    assert_current(module)


def test_it_is_known_whose_weights_are_cast_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loka.nn.adamw.WORTH_IT", 24 * 32)
    model = {name: nn.Linear(32, 24) for name in ("large", "of_torch", "frozen", "lonely", "amsgrad")}
    model |= {"small": nn.Linear(32, 23), "bf16": nn.Linear(32, 24, dtype=torch.bfloat16)}
    weights = {name: layer.weight for name, layer in model.items()}
    weights["frozen"].requires_grad_(False)
    ours = [weights[name] for name in ("large", "frozen", "small", "bf16")]
    optimizer = loka.AdamW([{"params": ours}, {"params": [weights["amsgrad"]], "amsgrad": True}], lr=0.1)
    others = torch.optim.AdamW([weights["of_torch"]], lr=0.1)
    assert [name for name, weight in weights.items() if is_cast_in_step(weight)] == ["large"]
    assert not is_cast_in_step(weights["large"].detach())
    again, copied = copy.deepcopy((weights["large"], optimizer))
    assert is_cast_in_step(again)
    copied.register_step_post_hook(lambda *_: None)
    assert not is_cast_in_step(again)  # a hook may write what was cast
    del optimizer, copied
    gc.collect()
    assert not any(map(is_cast_in_step, (again, *weights.values())))
    assert others.param_groups


@pytest.mark.parametrize(
    ("options", "is_ours"),
    [({}, True), ({"fused": False}, False), ({"foreach": True}, False), ({"foreach": True, "capturable": True}, True)],
)
def test_steps_that_are_counted_on_the_cpu_cast_no_weight_of_another_device(options: dict[str, Any], is_ours: bool) -> None:
    weight = nn.Parameter(torch.empty(1024, 1024, device="meta"))
    optimizer = loka.AdamW([weight], lr=0.1, **options)
    assert is_cast_in_step(weight) == is_ours
    on_cpu = nn.Parameter(torch.empty(1024, 1024))
    others = loka.AdamW([on_cpu], lr=0.1, **options)
    assert is_cast_in_step(on_cpu)
    del others
    if not optimizer.param_groups[0]["fused"]:  # torch makes no fused step on the meta device
        weight.grad = torch.empty_like(weight)
        optimizer._init_group(optimizer.param_groups[0], [], [], [], [], [], [])
        assert (optimizer.state[weight]["step"].device == weight.device) == is_ours
