"""A plan in a model: the oracle's numbers, and everything a model lives through."""

import copy
import io
import pickle

import pytest
import torch
from int8_here import needs
from plans import MIXED, ROWWISE, Tower, batch, plan_for, tower
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import loka
from loka.core.errors import InvalidInput
from loka.core.gemm import SOURCES, Device, GemmProblem, Role, SiteShape, TensorName
from loka.core.plan import Goal
from loka.core.recipe import Format, Transform
from loka.dispatch.planned import PlannedLinear
from loka.dispatch.rows import row_limits
from loka.dispatch.swap import AppliedPlan
from loka.kernels.contract import KERNELS, Kernel, why_not
from loka.kernels.device import device_of
from loka.kernels.executor import SiteExecutor, SiteKernels
from loka.kernels.operand import padding_refusal
from loka.kernels.providers import onednn
from loka.kernels.providers.onednn import LONGEST_CONTRACTION
from loka.kernels.providers.torch_left import LEFT
from loka.nn.weight_casts import held
from loka.numerics.reference import gemm
from loka.numerics.scaling import quantize

CPU = device_of(torch.device("cpu"))
ONEDNN = SiteKernels.same("onednn.int8")
SITE = SiteShape(40, 24, 32)  # of Tower.bottom at batch()
ON_CPU = [name for name, kernel in KERNELS.items() if kernel.missing(CPU) is None]


def oracle(kernel: str, role: Role, tensors: dict[TensorName, Tensor]) -> Tensor:
    """The role's output from the definition: orient both tensors, quantize as the recipe says, multiply at float64."""
    recipe = KERNELS.get(kernel).recipe(role)
    specs = KERNELS.get(kernel).operands(role)
    formats = ((recipe.a_format, recipe.a_scaling), (recipe.b_format, recipe.b_scaling))
    operands = []
    for source, spec, (format, scaling) in zip(SOURCES[role], specs, formats, strict=True):
        oriented = tensors[source.tensor].t() if source.transposed else tensors[source.tensor]
        operands.append(quantize(oriented, format, scaling, static_scale=spec.static_scale) if format.is_8bit else oriented)
    return gemm(*operands)


def loss_and_gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_run(one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]], **tolerance: float) -> None:
    torch.testing.assert_close(one[0], other[0], **(tolerance or {"rtol": 0, "atol": 0}))
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        torch.testing.assert_close(gradient, other[1][name], **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("kernel", [kernel for kernel in ON_CPU if kernel != LEFT])  # which makes no gradients
def test_every_role_of_every_kernel_gives_the_oracles_gradients(kernel: str) -> None:
    able = {role: why_not(KERNELS.get(kernel), GemmProblem.of(role, SITE, Format.FP32, CPU)) is None for role in Role}
    assert any(able.values())
    kernels = SiteKernels(*(kernel if able[role] else "torch.fp32" for role in Role))
    model = nn.Sequential(nn.Linear(24, 32))
    loka.apply_plan(model, plan_for(model, {"0": kernels}))
    x, dy = batch().requires_grad_(), 1e-3 * torch.randn(40, 32)
    y = model(x)
    y.backward(dy)
    weight, bias = model[0].weight, model[0].bias
    tensors = {TensorName.X: x.detach(), TensorName.DY: dy, TensorName.W: weight.detach()}
    assert x.grad is not None
    assert weight.grad is not None
    # int8_dynamic casts its input to unsigned codes with a zero point, which is not the oracle's symmetric grid.
    tolerance = 0.02 if kernel == "onednn.int8_dynamic" else 5e-3 if kernel == "torch.bf16" else 1e-5
    for role, actual in ((Role.FPROP, y - bias), (Role.DGRAD, x.grad), (Role.WGRAD, weight.grad)):
        expected = oracle(kernels.of(role), role, tensors)
        assert (actual.double() - expected).norm() < tolerance * expected.norm(), role


def test_a_plan_that_mixes_kernels_runs_each_at_its_own_site() -> None:
    """The reference is the same model with every layer written out by hand from loka.LokaLinear."""
    model, by_hand = tower(), tower()
    applied = loka.apply_plan(model, plan_for(model, MIXED))
    for name, kernels in MIXED.items():
        parent, _, child = name.rpartition(".")
        by_hand.get_submodule(parent)._modules[child] = loka.LokaLinear.from_linear(by_hand.get_submodule(name), kernels)
    assert_same_run(loss_and_gradients(model, batch()), loss_and_gradients(by_hand, batch()))
    used = {kernel for kernels in MIXED.values() for kernel in (kernels.fprop, kernels.dgrad, kernels.wgrad)}
    assert len(used - {"torch.fp32"}) >= 4
    assert applied.sites == ("bottom", "top.0", "top.2")
    assert type(model.head) is nn.Linear
    assert str(applied) == "3 of 4 sites in low precision"


@pytest.mark.parametrize("transform", [Transform.CENTER, Transform.RESCALE])
def test_a_transform_travels_with_the_plan(transform: Transform) -> None:
    """A mean that the weights ignore, or scales that they undo: without the transform the error is many times as large."""
    errors = {}
    for use in (False, True):
        model = nn.Sequential(nn.Linear(24, 32))
        generator = torch.Generator().manual_seed(0)
        if transform is Transform.CENTER:
            vector = torch.full((24,), 50.0)
            x = vector + torch.randn(64, 24, generator=generator)
            with torch.no_grad():
                model[0].weight -= model[0].weight.mean(1, keepdim=True)
        else:
            vector = torch.exp2(torch.arange(24.0) - 12)
            x = vector * torch.randn(64, 24, generator=generator)
            with torch.no_grad():
                model[0].weight /= vector
        expected = model(x).detach()
        loka.apply_plan(model, plan_for(model, {"0": ROWWISE}, vectors={f"0/{transform}": vector} if use else {}))
        errors[use] = ((model(x) - expected).norm() / expected.norm()).item()
    assert errors[True] < 0.05
    assert errors[False] > 4 * errors[True]


class TestOneModel:
    """Parameters, state_dict and optimizer are those of before."""

    def test_parameters_and_checkpoints_stay_plain(self) -> None:
        model, plain = tower(), tower(seed=5)
        before = {name: id(p) for name, p in model.named_parameters()}
        keys = list(model.state_dict())
        loka.apply_plan(model, plan_for(model, MIXED))
        assert {name: id(p) for name, p in model.named_parameters()} == before
        assert list(model.state_dict()) == keys
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        plain.load_state_dict(torch.load(buffer, weights_only=True))  # a new checkpoint without LoKA
        torch.testing.assert_close(plain.bottom.weight, model.bottom.weight)

    def test_an_old_checkpoint_loads_and_its_weights_run(self) -> None:
        model, other = tower(), tower(seed=5)
        loka.apply_plan(model, plan_for(model, MIXED))
        loka.apply_plan(other, plan_for(other, MIXED))
        model.load_state_dict(tower(seed=5).state_dict())
        assert torch.equal(model(batch()), other(batch()))

    @pytest.mark.parametrize("fused", [False, True])
    def test_training_goes_on_with_the_same_optimizer_and_restore_keeps_the_weights(self, fused: bool) -> None:
        model = tower()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        target = batch()[:, :1]
        losses = []
        for step in range(30):
            if step == 10:
                loka.apply_plan(model, plan_for(model, MIXED))
            optimizer.zero_grad()
            loss = (model(batch()) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[9]
        trained = copy.deepcopy(model.state_dict())
        loka.restore(model)
        assert [type(module) for module in model.modules()] == [type(module) for module in tower().modules()]
        assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
        plain = tower(seed=9)
        plain.load_state_dict(trained)
        assert torch.equal(model(batch()), plain(batch()))
        optimizer.zero_grad()
        model(batch()).sum().backward()
        before = model.bottom.weight.clone()
        optimizer.step()
        assert not torch.equal(model.bottom.weight, before)

    def test_restore_follows_weights_that_were_replaced(self) -> None:
        model = tower()
        loka.apply_plan(model, plan_for(model, MIXED))
        model.load_state_dict(tower(seed=5).state_dict(), assign=True)
        model.eval()
        loka.restore(model)
        assert torch.equal(model(batch()), tower(seed=5)(batch()))
        assert not model.bottom.training

    def test_applied_and_restored_once(self) -> None:
        model = tower()
        with pytest.raises(InvalidInput, match="no plan is applied to this model"):
            loka.restore(model)
        loka.apply_plan(model, plan_for(model, MIXED))
        with pytest.raises(InvalidInput, match=r"applied to this model already: loka.restore\(model\) first"):
            loka.apply_plan(model, plan_for(tower(), MIXED))
        loka.restore(model)
        loka.apply_plan(model, plan_for(model, {"bottom": ROWWISE}))

    def test_a_module_under_two_names_and_a_shared_weight(self) -> None:
        model = nn.ModuleDict({"a": nn.Linear(24, 24), "c": nn.Linear(24, 24)})
        model["b"] = model["a"]
        model["c"].weight = model["a"].weight
        loka.apply_plan(model, plan_for(model, {"a": ROWWISE, "c": SiteKernels.same("reference.tensorwise")}))
        assert model["a"] is model["b"]
        assert isinstance(model["b"], PlannedLinear)
        assert model["c"].weight is model["a"].weight
        x = batch()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (model["a"](x) + model["b"](x) + model["c"](x)).sum().backward()
        optimizer.step()
        fresh = nn.Linear(24, 24)
        fresh.load_state_dict(model["c"].state_dict())
        expected = loka.LokaLinear.from_linear(fresh, SiteKernels.same("reference.tensorwise"))(x)
        assert torch.equal(model["c"](x), expected)
        loka.restore(model)
        assert model["a"] is model["b"]

    @pytest.mark.parametrize("copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    def test_copies_are_models_of_their_own(self, copier) -> None:  # type: ignore[no-untyped-def]
        model = tower()
        loka.apply_plan(model, plan_for(model, MIXED))
        other = copier(model)
        assert torch.equal(other(batch()), model(batch()))
        with torch.no_grad():
            other.bottom.weight.mul_(2)
        loka.restore(other)
        assert type(other.bottom) is nn.Linear
        assert isinstance(model.bottom, PlannedLinear)
        assert torch.equal(other.bottom.weight, 2 * model.bottom.weight)


class TestHowModelsRun:
    def test_autocast(self) -> None:
        model = tower()
        loka.apply_plan(model, plan_for(model, MIXED))
        expected = model(batch()).detach()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(batch())
        assert y.dtype is torch.bfloat16
        assert (y.float() - expected).norm() < 0.1 * expected.norm()

    @pytest.mark.usefixtures("fresh_compiler")
    def test_fullgraph(self) -> None:
        model, eager = tower(), tower()
        plan = plan_for(model, {"top.0": SiteKernels("onednn.int8", "torch.fp32", "reference.tensorwise_e5m2")})
        loka.apply_plan(eager, plan)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        loka.apply_plan(compiled, plan)
        assert_same_run(
            loss_and_gradients(compiled, batch()), _renamed(loss_and_gradients(eager, batch())), rtol=1e-4, atol=1e-6
        )

    @pytest.mark.usefixtures("fresh_compiler")
    @pytest.mark.parametrize(
        "kernels",
        [
            *(SiteKernels.same(name) for name in ("onednn.int8_tensorwise", "reference.rowwise", "reference.blockwise")),
            SiteKernels("reference.static", "reference.rowwise_e5m2", "reference.static"),
        ],
        ids=lambda kernels: kernels.fprop,
    )
    def test_trained_with_dynamic_shapes(self, kernels: SiteKernels) -> None:
        """Several sites: numbers that they share must not become inputs of a graph."""
        model, eager = tower(), tower()
        for one in (model, eager):
            loka.apply_plan(one, plan_for(one, dict.fromkeys(("bottom", "top.0", "top.2"), kernels)))
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
        for rows in (40, 48, 33):
            x = batch(rows)
            assert_same_run(loss_and_gradients(compiled, x), _renamed(loss_and_gradients(eager, x)), rtol=1e-4, atol=1e-6)

    @pytest.mark.usefixtures("fresh_compiler")
    @torch.no_grad()
    def test_a_compiled_model_is_compiled_again_when_a_plan_comes_or_goes(self) -> None:
        model = tower()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        plain = compiled(batch())
        loka.apply_plan(compiled, plan_for(model, {"bottom": ONEDNN}))
        assert not torch.equal(compiled(batch()), plain)
        torch.testing.assert_close(compiled(batch()), model(batch()))
        loka.restore(compiled)
        torch.testing.assert_close(compiled(batch()), plain)

    @pytest.mark.usefixtures("fresh_compiler")
    @torch.no_grad()
    def test_plans_may_come_and_go_oftener_than_torch_compiles_one_function_again(self) -> None:
        """As a Guard has it that gives back site after site."""
        model = tower()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        plan = plan_for(model, {"bottom": ONEDNN})
        with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=4):
            for _ in range(3):
                for change in (lambda: loka.apply_plan(model, plan), lambda: loka.restore(model)):
                    torch.testing.assert_close(compiled(batch()), model(batch()))
                    change()
            torch.testing.assert_close(compiled(batch()), model(batch()))

    def test_gradient_accumulation(self) -> None:
        model = tower()
        loka.apply_plan(model, plan_for(model, MIXED))
        parts = [loss_and_gradients(model, batch(seed=seed))[1] for seed in (1, 2)]
        model.zero_grad()
        for seed in (1, 2):
            model(batch(seed=seed)).square().mean().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, parts[0][name] + parts[1][name])

    def test_activation_checkpointing(self) -> None:
        model = tower()
        loka.apply_plan(model, plan_for(model, MIXED))
        plain = loss_and_gradients(model, batch())

        class Checkpointed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, x: Tensor) -> Tensor:
                return checkpoint(self.model, x, use_reentrant=False)

        again = loss_and_gradients(Checkpointed(), batch())
        assert_same_run(plain, (again[0], {name.removeprefix("model."): gradient for name, gradient in again[1].items()}))

    def test_no_grad_and_eval_are_the_same_forward(self) -> None:
        model = tower()
        loka.apply_plan(model, plan_for(model, MIXED))
        expected = model(batch()).detach()
        with torch.no_grad():
            assert torch.equal(model(batch()), expected)
        assert torch.equal(model.eval()(batch()), expected)
        assert not model.bottom.training


class TestRowsAKernelCannotTake:
    """oneDNN's wgrad contracts over the batch, and on Arm wants 17 rows."""

    @pytest.fixture(autouse=True)
    def as_on_arm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("loka.kernels.providers.onednn.IS_ARM", True)

    def model(self) -> tuple[Tower, AppliedPlan]:
        model = tower()
        applied = loka.apply_plan(model, plan_for(model, {"bottom": ONEDNN}))
        return model, applied

    def test_they_run_in_high_precision_and_are_counted(self) -> None:
        model, applied = self.model()
        plain = tower()
        model(batch(40))
        assert applied.high_precision_calls() == {}
        assert torch.equal(model.bottom(batch(16)), plain.bottom(batch(16)))
        assert not torch.equal(model.bottom(batch(17)), plain.bottom(batch(17)))
        model(batch(3))
        assert applied.high_precision_calls() == {"bottom": 2}

    @pytest.mark.usefixtures("fresh_compiler")
    @torch.no_grad()
    def test_in_a_compiled_graph_with_changing_rows_too(self) -> None:
        model, applied = self.model()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for rows in (40, 41, 50, 16, 3, 60):
            torch.testing.assert_close(compiled(batch(rows)), model(batch(rows)))
        assert applied.high_precision_calls() == {"bottom": 4}  # two of each, compiled and eager

    def test_limits_are_the_kernels_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Against every answer of the contract's why_not, one M at a time."""
        monkeypatch.setattr(onednn, "_is_looped", lambda: False)  # which refuses so large a weight, whatever M is
        hopper = Device("cuda", "NVIDIA H200", (9, 0))
        for kernels, device in [
            (ONEDNN, CPU),
            (SiteKernels.same("torch.rowwise"), hopper),
            (SiteKernels("torch.blockwise", "torch.blockwise", "torch.blockwise"), hopper),
            (SiteKernels("torch.rowwise", "torch.rowwise", "torch.blockwise"), hopper),
        ]:
            limits = row_limits(SiteExecutor(kernels).kernels, 256, 512, Format.BF16, device)
            assert not isinstance(limits, str)
            for m in [*range(1, 300), 384, 385, 512, 700, LONGEST_CONTRACTION, LONGEST_CONTRACTION + 1, 200_000]:
                problems = [(role, GemmProblem.of(role, SiteShape(m, 256, 512), Format.BF16, device)) for role in Role]
                refusals = [_apart_from_hardware(KERNELS.get(kernels.of(role)), problem) for role, problem in problems]
                assert limits.take(m) == (not any(refusals)), (kernels, m, refusals)


def _apart_from_hardware(kernel: Kernel, problem: GemmProblem) -> str | None:
    a, b = kernel.operands(problem.role)
    multiple = max(a.contraction_multiple, b.contraction_multiple)
    of_rows = (
        padding_refusal("k", problem.k, multiple)
        if problem.role is Role.WGRAD
        else padding_refusal("m", problem.m, a.outer_multiple)
    )
    return kernel.why_not(problem) or of_rows


def _renamed(run: tuple[Tensor, dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    return run[0], {f"_orig_mod.{name}": gradient for name, gradient in run[1].items()}


@needs("onednn.int8_dynamic")
def test_serving_plans_run_fprop_alone() -> None:
    model = tower()
    loka.apply_plan(model, plan_for(model, {"bottom": SiteKernels.same("onednn.int8_dynamic")}, goal=Goal.SERVING))
    bottom = model.bottom
    assert isinstance(bottom, PlannedLinear)
    assert (bottom.kernels.fprop, bottom.kernels.dgrad, bottom.kernels.wgrad) == (
        "onednn.int8_dynamic",
        "torch.fp32",
        "torch.fp32",
    )
    assert bottom.rows.take(1)


def test_nested_and_sparse_tensors_run_in_high_precision_and_are_counted() -> None:
    model, plain = tower(), tower()
    applied = loka.apply_plan(model, plan_for(model, {"bottom": ROWWISE, "top.0": ROWWISE}))
    x = torch.nested.nested_tensor([torch.randn(3, 24), torch.randn(5, 24)], layout=torch.jagged)
    assert torch.equal(model(x).values(), plain(x).values())
    assert applied.high_precision_calls() == {"bottom": 1, "top.0": 1}
    sparse = torch.eye(24).to_sparse()
    assert torch.equal(model.bottom(sparse), plain.bottom(sparse))
    assert applied.high_precision_calls() == {"bottom": 2, "top.0": 1}
    loka.freeze(model, drop_high_precision=True)
    for one in (x, sparse):
        with pytest.raises(InvalidInput, match=r"no nested tensors, and no sparse ones.*x.to_dense\(\)"):
            model.bottom(one)


def test_what_was_restored_is_cast_no_more() -> None:
    model = tower()
    applied = loka.apply_plan(model, plan_for(model, {"bottom": ROWWISE}))
    stand_in = applied.module("bottom")
    loka.restore(model)
    before = [tensor.clone() for tensor in held(stand_in).values()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(batch()).sum().backward()
    optimizer.step()
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(before, held(stand_in).values(), strict=True))
