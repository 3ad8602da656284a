"""A weight's casts follow it. They are written again by what was prepared for the very memory they lie in, and that memory is
not kept for its sake."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from cuda_graphs import captured
from emulated_block import emulate
from int8_here import where_they_run
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.optim.swa_utils import AveragedModel

import loka
from loka.core.recipe import Transform
from loka.kernels.executor import SiteKernels
from loka.nn import fused_block
from loka.nn.block_norm import BlockNorm
from loka.nn.fused_block import FusedBlock
from loka.nn.linear import LokaLinear
from loka.nn.weight_casts import drop_casts, held, hold, rewrite_casts, store_casts

SAME = SiteKernels.same("reference.rowwise")


class Prepared:
    """Counts preparations, and holds the weight as a rewrite does."""

    def __init__(self) -> None:
        self.n = 0

    def of(self, weight: Tensor) -> Callable[[], Callable[[], None]]:
        def prepare() -> Callable[[], None]:
            self.n += 1
            return partial(setattr, self, "last", weight)

        return prepare


def test_prepared_anew_where_the_weight_or_a_cast_lies_elsewhere() -> None:
    module, prepared, weight = nn.Linear(4, 4), Prepared(), torch.randn(4, 4)
    store_casts(module, {"codes": torch.zeros(4, 4)})
    for expected, now in ((1, weight), (1, weight), (2, weight.t()), (3, weight.clone())):
        rewrite_casts(module, now, prepared.of(now))
        assert prepared.n == expected
    store_casts(module, {"codes": torch.ones(4, 4)})  # written where the old ones lie
    rewrite_casts(module, now, prepared.of(now))
    assert prepared.n == 3
    hold(module, "weight_codes", torch.ones(4, 4))
    rewrite_casts(module, now, prepared.of(now))
    assert prepared.n == 4


def test_in_shared_memory_they_are_written_even_if_they_come_out_as_they_were() -> None:
    """Another process may have written them with the weight, and not the versions by which kernels here pack them anew."""
    for module, moves in ((LokaLinear(64, 32, kernels=SAME), False), (LokaLinear(64, 32, kernels=SAME).share_memory(), True)):
        before = {name: tensor._version for name, tensor in held(module).items()}
        loka.refresh(module)
        assert [tensor._version > before[name] for name, tensor in held(module).items()] == [moves] * len(before)


@pytest.mark.parametrize("shape", [(256, 64), (300, 1), (129, 65)])
@pytest.mark.parametrize("kernel", ["reference.blockwise", "reference.rowwise", "reference.tensorwise"])
def test_casts_of_any_layout_are_compared(kernel: str, shape: tuple[int, int]) -> None:
    layer = LokaLinear(*shape, kernels=SiteKernels.same(kernel))
    before = {name: tensor._version for name, tensor in held(layer).items()}
    loka.refresh(layer)
    assert {name: tensor._version for name, tensor in held(layer).items()} == before


def test_casts_that_hold_nan_and_come_out_as_they_were_are_not_written() -> None:
    """A backward pass to come may read them: here another layer has made a step in between."""
    layer, other = LokaLinear(16, 8, kernels=SAME), nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight[0, 0] = torch.nan
    optimizer = torch.optim.SGD([*layer.parameters(), *other.parameters()], lr=0.1)
    y = layer(torch.randn(4, 16, requires_grad=True))
    other(torch.randn(2, 2)).sum().backward()
    optimizer.step()
    y.nansum().backward()


def test_a_weight_that_moved_on_is_let_go() -> None:
    for leave in (drop_casts, lambda module: store_casts(module, {"codes": torch.zeros(2, 2)})):
        module, weight = nn.Linear(4, 4), torch.randn(4, 4)
        store_casts(module, {"codes": torch.zeros(4, 4)})
        rewrite_casts(module, weight, Prepared().of(weight))
        old = weakref.ref(weight)
        del weight
        gc.collect()
        assert old() is not None
        leave(module)
        gc.collect()
        assert old() is None


def _foreach(module: nn.Module, weight: Tensor) -> None:
    with torch.no_grad():
        torch._foreach_copy_([module.weight], [weight])  # type: ignore[list-item]


def _in_place(module: nn.Module, weight: Tensor) -> None:
    nn.init.zeros_(module.weight)  # type: ignore[arg-type]
    with torch.no_grad():
        module.weight.lerp_(weight, 1.0)  # type: ignore[operator]


def _data(module: nn.Module, weight: Tensor) -> None:
    module.weight.data = weight.clone()  # type: ignore[union-attr]


def _parameter(module: nn.Module, weight: Tensor) -> None:
    module.weight = nn.Parameter(weight.clone())


WRITES = [_in_place, _foreach, _data, _parameter]


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_a_weight_that_somebody_else_has_written_is_cast_again(
    write: Callable[[nn.Module, Tensor], None], is_inference: bool
) -> None:
    """An average of weights, a first value given late, LBFGS within its step: no optimizer says so."""
    weight, x = torch.randn(48, 32), torch.randn(10, 32)
    layer = LokaLinear(32, 48, kernels=SiteKernels.same("reference.rowwise"))
    layer(x)
    write(layer, weight)
    fresh = LokaLinear(32, 48, kernels=SiteKernels.same("reference.rowwise"))
    fresh.load_state_dict(layer.state_dict())
    with torch.inference_mode(is_inference):
        assert torch.equal(layer(x), fresh(x))


@pytest.mark.parametrize("write", WRITES)
def test_so_is_that_of_a_block(write: Callable[[nn.Module, Tensor], None], monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    weight, x = torch.randn(48, 32, dtype=torch.bfloat16), torch.randn(10, 32, dtype=torch.bfloat16)
    first = torch.randn(48, 32, dtype=torch.bfloat16)
    block = FusedBlock(nn.Parameter(first), None, BlockNorm(48), None)
    assert block.why_reference is None
    block(x)
    write(block, weight)
    assert torch.equal(block(x), FusedBlock(nn.Parameter(weight), None, BlockNorm(48), None)(x))


def test_an_average_of_models_is_run_by_its_own_weights() -> None:
    model = nn.Sequential(LokaLinear(32, 48, kernels=SiteKernels.same("reference.rowwise")))
    averaged = AveragedModel(model)
    for _ in range(2):
        _in_place(model[0], torch.randn(48, 32))
        averaged.update_parameters(model)
    fresh = LokaLinear(32, 48, kernels=SiteKernels.same("reference.rowwise"))
    fresh.load_state_dict(averaged.module[0].state_dict())
    x = torch.randn(10, 32)
    assert torch.equal(averaged(x), fresh(x))
    assert not torch.equal(averaged(x), model(x))


def _layer(transform: Transform) -> LokaLinear:
    vector = None if transform is Transform.NONE else torch.full((32,), 2.0)
    return LokaLinear.from_linear(nn.Linear(32, 48, bias=False), SiteKernels.same("reference.rowwise"), transform, vector)


def _block(monkeypatch: pytest.MonkeyPatch) -> FusedBlock:
    emulate(monkeypatch)
    return FusedBlock(nn.Parameter(torch.randn(48, 32)), None, None, None)


@pytest.mark.parametrize("kind", [*Transform, "block"])
@pytest.mark.parametrize("as_parameters", [False, True])
def test_weights_of_functional_calls_are_those_that_run(
    kind: Transform | str, as_parameters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them, though the next may lie where the one before it lay; and backward has what forward had."""
    module = _layer(kind) if isinstance(kind, Transform) else _block(monkeypatch)
    make = nn.Parameter if as_parameters else torch.Tensor.clone
    x = torch.randn(10, 32)
    own = module(x)
    for weight in torch.randn(5, 48, 32):
        given = torch.func.functional_call(module, {"weight": make(weight)}, (x,))
        assert (given - x @ weight.t()).norm() < 0.1 * given.norm()
    assert torch.equal(module(x), own)

    first, second = (torch.randn(48, 32).requires_grad_() for _ in range(2))
    leaf = x.clone().requires_grad_()
    outputs = [torch.func.functional_call(module, {"weight": weight}, (leaf,)) for weight in (first, second)]
    own = module(leaf)
    with torch.no_grad():
        torch.func.functional_call(module, {"weight": make(first.detach())}, (x,))
    (sum(outputs) + own).sum().backward()
    expected = (first + second + module.weight).sum(0).expand(10, 32)
    assert leaf.grad is not None
    assert (leaf.grad - expected).norm() < 0.1 * expected.norm()
    for weight in (first, second, module.weight):
        assert (weight.grad - x.sum(0)).norm() < 0.15 * 48**0.5 * x.sum(0).norm()


def test_so_are_those_of_compiled_functional_calls() -> None:
    module = nn.Sequential(_layer(Transform.NONE))
    run = torch.compile(
        lambda weight, x: torch.func.functional_call(module, {"0.weight": weight}, (x,)), backend="aot_eager", fullgraph=True
    )
    x = torch.randn(10, 32)
    for weight in torch.randn(3, 48, 32):
        assert (run(weight, x) - x @ weight.t()).norm() < 0.1 * (x @ weight.t()).norm()


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # one model after another, as for many ops
@pytest.mark.parametrize("kernel", ["onednn.int8", "reference.rowwise"])
@torch.no_grad()
def test_an_ensemble_of_models_is_run_by_vmap(kernel: str) -> None:
    modules = [loka.LokaLinear(32, 24, kernels=SiteKernels.same(kernel)) for _ in range(3)]
    parameters, _ = torch.func.stack_module_state(modules)
    x = torch.randn(8, 32)
    found = torch.vmap(lambda own: torch.func.functional_call(modules[0], own, (x,)))(parameters)
    torch.testing.assert_close(found, torch.stack([module(x) for module in modules]))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("rows", "k", "n"), [(64, 33, 1), (64, 1, 33), (1, 33, 48), (1, 33, 1)])
@torch.no_grad()
def test_axes_of_one_are_right_where_inductor_lays_them(rows: int, k: int, n: int) -> None:
    module, x, weight = loka.LokaLinear(k, n, kernels=SiteKernels.same("onednn.int8")), torch.randn(rows, k), torch.randn(n, k)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(module, {"weight": 2 * weight}, (2 * x,))

    torch.testing.assert_close(torch.compile(run, fullgraph=True)(x, weight), run(x, weight))


@torch.no_grad()
def test_biases_may_be_many_of_one_weight() -> None:
    module, x, biases = loka.LokaLinear(32, 24, kernels=SiteKernels.same("onednn.int8")), torch.randn(8, 32), torch.randn(3, 24)
    found = torch.vmap(lambda bias: torch.func.functional_call(module, {"bias": bias}, (x,)))(biases)
    torch.testing.assert_close(found - found[:1], (biases - biases[:1])[:, None].expand(3, 8, 24))


def test_a_weight_can_be_swapped() -> None:
    layer, x = _layer(Transform.NONE), torch.randn(10, 32)
    other = nn.Parameter(torch.randn(48, 32))
    expected = x @ other.t()
    layer(x)
    torch.utils.swap_tensors(layer.weight, other)
    assert (layer(x) - expected).norm() < 0.1 * expected.norm()


def _assigned(module: nn.Module, weight: Tensor, x: Tensor) -> Tensor:
    module.weight = nn.Parameter(weight)
    return module(x)


def _moved(module: nn.Module, weight: Tensor, x: Tensor) -> Tensor:
    module.weight.data = weight  # type: ignore[union-attr]
    return module(x)


def _called(module: nn.Module, weight: Tensor, x: Tensor) -> Tensor:
    return torch.func.functional_call(module, {"weight": weight}, (x,))


@pytest.mark.parametrize("give", [_assigned, _moved, _called])
def test_a_block_whose_weight_its_kernels_cannot_take_runs_in_high_precision(
    give: Callable[[nn.Module, Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    block = _block(monkeypatch)
    block(torch.randn(10, 32))
    monkeypatch.setattr(fused_block, "why_not_here", lambda device, dtype: "no" if dtype is torch.float64 else None)
    weight, x = torch.randn(48, 32, dtype=torch.float64), torch.randn(10, 32, dtype=torch.float64)
    torch.testing.assert_close(give(block, weight, x), x @ weight.t())


class TestTheyFollowTheWeight:
    """The 8-bit copies must follow the weight however it moves, or training runs on stale values in silence."""

    def is_current(self, module: loka.LokaLinear, tolerance: float = 0.0) -> bool:
        fresh = loka.LokaLinear.from_linear(module, module.kernels)
        x = torch.randn(8, module.in_features, dtype=module.weight.dtype, device=module.weight.device)
        expected = fresh(x)
        return bool((module(x) - expected).norm() <= tolerance * expected.norm())

    def step(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        weight = next(module.parameters())
        module(torch.randn(8, weight.shape[1], device=weight.device)).square().sum().backward()
        optimizer.step()

    @pytest.mark.parametrize("kernels", [SAME, SiteKernels.same("onednn.int8")], ids=str)
    @pytest.mark.parametrize("fused", [False, True])
    def test_adamw_fused_or_not(self, kernels: SiteKernels, fused: bool) -> None:
        module = loka.LokaLinear(32, 24, kernels=kernels)
        self.step(module, torch.optim.AdamW(module.parameters(), lr=0.1, fused=fused))
        assert self.is_current(module)

    @pytest.mark.parametrize("kernel", where_they_run("onednn.int8", "onednn.int8_tensorwise", "onednn.int8_dynamic"))
    def test_where_gradients_are_cleared_within_the_step(self, kernel: str) -> None:
        """By which nothing can be told of whether it moved the weight; nor by its version, which fused steps leave alone."""
        kernels = SiteKernels(fprop=kernel, dgrad="onednn.int8", wgrad="onednn.int8")
        module = loka.LokaLinear(32, 24, kernels=kernels)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, fused=True)
        optimizer.register_step_post_hook(lambda optimizer, args, kwargs: optimizer.zero_grad())
        for _ in range(3):
            self.step(module, optimizer)
            assert self.is_current(module)

    @pytest.mark.parametrize("kernel", where_they_run("onednn.int8", "onednn.int8_dynamic"))
    def test_a_weight_that_grew_as_a_whole(self, kernel: str) -> None:
        """Its codes are what they were, and their scales are not, which kernels may have packed with them."""
        module = loka.LokaLinear(32, 24, kernels=SiteKernels(fprop=kernel, dgrad="onednn.int8", wgrad="onednn.int8"))
        module(torch.randn(8, 32))
        module.weight.data.mul_(4)
        loka.refresh(module)
        assert self.is_current(module)

    def test_an_optimizer_of_other_weights_costs_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module, other = loka.LokaLinear(32, 24, kernels=SAME), nn.Linear(32, 24)
        monkeypatch.setattr(module, "recast_after_step", lambda: pytest.fail("refreshed for another's step"))
        self.step(other, torch.optim.SGD(other.parameters(), lr=0.1))

    def test_a_backward_pass_may_follow_a_step_that_did_not_move_the_weight(self) -> None:
        one, two = (loka.LokaLinear(32, 24, kernels=SAME) for _ in range(2))
        optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
        first, second = (module(torch.randn(8, 32, requires_grad=True)).square().sum() for module in (one, two))
        for loss in (first, second):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert self.is_current(one)
        assert self.is_current(two)

    def test_an_optimizer_that_holds_the_gradients_itself_and_writes_data(self) -> None:
        class Own(torch.optim.SGD):
            def step(self, closure: None = None) -> None:
                for parameter in self.param_groups[0]["params"]:
                    parameter.data.mul_(3)

        module = loka.LokaLinear(32, 24, kernels=SAME)
        Own(module.parameters(), lr=0.1).step()
        assert self.is_current(module)

    def test_without_the_hook_they_would_be_stale(self) -> None:
        module = loka.LokaLinear(32, 24, kernels=SAME)
        with torch.no_grad():
            module.weight.data.mul_(3)
        assert not self.is_current(module)
        loka.refresh(nn.Sequential(module))
        assert self.is_current(module)

    def test_refresh_keeps_the_buffers(self) -> None:
        module = loka.LokaLinear(32, 24, kernels=SAME)
        before = {name: tensor.data_ptr() for name, tensor in held(module).items()}
        self.step(module, torch.optim.SGD(module.parameters(), lr=0.1))
        assert before == {name: tensor.data_ptr() for name, tensor in held(module).items()}
        assert len(before) == 4  # codes and scale, plain for fprop and transposed for dgrad

    @pytest.mark.parametrize("assign", [False, True])
    def test_load_state_dict(self, assign: bool) -> None:
        module, source = loka.LokaLinear(32, 24, kernels=SAME), nn.Linear(32, 24)
        module.load_state_dict(source.state_dict(), assign=assign)
        assert torch.equal(module.weight, source.weight)
        assert self.is_current(module)

    @pytest.mark.parametrize("copier", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
    def test_copies_follow_their_own_weight(self, copier) -> None:  # type: ignore[no-untyped-def]
        module = loka.LokaLinear(32, 24, kernels=SAME)
        other = copier(module)
        self.step(other, torch.optim.SGD(other.parameters(), lr=0.1))
        assert self.is_current(other)
        assert self.is_current(module)
        assert not torch.equal(module.weight, other.weight)

    def test_change_of_dtype_keeps_the_codes_8bit(self) -> None:
        module = loka.LokaLinear(32, 24, kernels=SAME).to(torch.bfloat16)
        assert {tensor.dtype for tensor in held(module).values()} == {torch.float8_e4m3fn, torch.float32}
        assert module(torch.randn(4, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16
        assert self.is_current(module)

    def test_two_modules_that_share_a_weight(self) -> None:
        one = loka.LokaLinear(24, 24, kernels=SAME)
        two = loka.LokaLinear.from_linear(one, SiteKernels.same("reference.tensorwise"))
        assert two.weight is one.weight
        model = nn.Sequential(one, two)
        self.step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert self.is_current(one)
        assert self.is_current(two)

    @pytest.mark.usefixtures("fresh_compiler")
    def test_compiled_module_sees_the_new_weight_without_recompiling(self) -> None:
        module = loka.LokaLinear(32, 24, kernels=SAME)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        x = torch.randn(8, 32)
        compiled(x)
        with torch.compiler.set_stance("fail_on_recompile"):
            self.step(module, optimizer)
            module.eval()
            expected = loka.LokaLinear.from_linear(module, SAME)(x).detach()
            torch.testing.assert_close(compiled(x).detach(), expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.usefixtures("fresh_compiler")
    def test_a_compiled_step_is_one_graph_and_they_follow_it(self) -> None:
        model = nn.Sequential(*(loka.LokaLinear(32, 32, kernels=SAME) for _ in range(3)))
        optimizer, counter = torch.optim.SGD(model.parameters(), lr=0.1), CompileCounter()
        optimizer.step = torch.compile(optimizer.step, backend=counter)
        for _ in range(2):
            self.step(model, optimizer)
        assert counter.frame_count == 1
        assert all(self.is_current(module) for module in model)

    @pytest.mark.gpu
    @pytest.mark.parametrize("name", ["torch.rowwise", "torch.tensorwise"])
    def test_graph_replay_of_a_whole_step(self, name: str) -> None:
        """Forward, backward, fused AdamW and the refresh in one CUDA graph: replays must train, not repeat."""
        module = loka.LokaLinear(256, 128, device="cuda", dtype=torch.bfloat16, kernels=SiteKernels.same(name))
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True, capturable=True)
        x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)

        def step() -> Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss = module(x).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss

        graph, loss = captured(step)
        losses = []
        for _ in range(20):
            graph.replay()
            losses.append(loss.item())
            assert self.is_current(module, tolerance=0.06)  # scales of the step before round otherwise; a step moves by more
        assert losses[-1] < 0.5 * losses[0]
