"""center and rescale: nothing changes in exact arithmetic, and planted sites that 8 bits ruin become healthy ones."""

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from int8_here import needs
from planted_sites import PlantedSite, cancelling_mean, compensated_range
from torch import Tensor, nn

import loka
from loka.core.errors import InvalidInput, UnknownName
from loka.core.gemm import Role, TensorName
from loka.core.recipe import Format, Scaling, Transform
from loka.kernels.contract import KERNELS
from loka.kernels.executor import SiteExecutor, SiteKernels
from loka.kernels.operand import Form, Layout, OperandSpec
from loka.kernels.transforms import TransformVectors, apply_to
from loka.nn.weight_casts import held
from loka.numerics.metrics import FLOOR_AXIS, mere_floored, relative_rms

ROWWISE, TENSORWISE = SiteKernels.same("reference.rowwise"), SiteKernels.same("reference.tensorwise")
PLANTED = [cancelling_mean(), compensated_range()]


def linear_of(site: PlantedSite, bias: bool = False) -> nn.Linear:
    linear = nn.Linear(site.weight_NK.shape[1], site.weight_NK.shape[0], bias=bias)
    linear.weight.data.copy_(site.weight_NK)
    return linear


def outputs(module: nn.Module, site: PlantedSite, dtype: torch.dtype = torch.float32) -> dict[Role, Tensor]:
    """y without bias, dx and dw."""
    module.zero_grad()
    x_MK = site.x_MK.to(dtype, copy=True).requires_grad_()
    y_MN = module(x_MK)
    y_MN.backward(site.dy_MN.to(y_MN.dtype))
    assert x_MK.grad is not None
    return {Role.FPROP: y_MN.detach(), Role.DGRAD: x_MK.grad, Role.WGRAD: module.weight.grad.clone()}  # type: ignore[union-attr]


def exact(site: PlantedSite) -> dict[Role, Tensor]:
    x_MK, dy_MN, weight_NK = site.x_MK.double(), site.dy_MN.double(), site.weight_NK.double()
    return {Role.FPROP: x_MK @ weight_NK.t(), Role.DGRAD: dy_MN @ weight_NK, Role.WGRAD: dy_MN.t() @ x_MK}


def errors(site: PlantedSite, kernels: SiteKernels, *transform: Any) -> dict[Role, tuple[float, float]]:
    """Relative RMS error and mere_floored of each role; wgrad's by column, as Adam normalizes it."""
    got = outputs(loka.LokaLinear.from_linear(linear_of(site), kernels, *transform), site)
    return {
        role: (
            relative_rms(got[role], reference).item(),
            mere_floored(got[role], reference, axis=FLOOR_AXIS[role]).item(),
        )
        for role, reference in exact(site).items()
    }


def assert_healthy(error: tuple[float, float]) -> None:
    assert error[0] < 0.045
    assert error[1] < 0.1


def test_center_rescues_a_cancelling_mean_forward_and_backward() -> None:
    site = cancelling_mean()
    plain, rescued = errors(site, ROWWISE), errors(site, ROWWISE, site.transform, site.vector_K)
    for role in (Role.FPROP, Role.WGRAD):
        assert plain[role][0] > 0.5
        assert_healthy(rescued[role])
    assert rescued[Role.DGRAD] == plain[Role.DGRAD]


def test_rescale_rescues_24_binades_forward_and_backward() -> None:
    """Row scales of wgrad's xᵀ are one a feature and need no help; one scale for all of x loses whole columns of dw."""
    site = compensated_range()
    assert errors(site, ROWWISE)[Role.FPROP][0] > 0.5
    assert errors(site, TENSORWISE)[Role.WGRAD][1] > 0.4
    for kernels in (ROWWISE, TENSORWISE):
        rescued = errors(site, kernels, site.transform, site.vector_K)
        assert_healthy(rescued[Role.FPROP])
        assert_healthy(rescued[Role.WGRAD])
        assert rescued[Role.DGRAD][0] < 0.045


@pytest.mark.parametrize("site", PLANTED, ids=lambda site: site.transform)
@pytest.mark.parametrize("bias", [False, True])
def test_in_exact_arithmetic_nothing_changes(site: PlantedSite, bias: bool) -> None:
    """With casts that keep every bit, outputs and all gradients are the plain ones to FP32's rounding of what was added."""
    kernel = ExactEightBits()
    KERNELS.add(kernel.name, kernel)
    try:
        linear = linear_of(site, bias)
        module = loka.LokaLinear.from_linear(linear, SiteKernels.same(kernel.name), site.transform, site.vector_K)
        got, reference = outputs(module, site), exact(site)
        if bias:
            got[Role.FPROP] -= linear.bias.detach()
            torch.testing.assert_close(linear.bias.grad.double(), site.dy_MN.double().sum(0), rtol=1e-4, atol=1e-6)  # type: ignore[union-attr]
        for role in Role:
            assert relative_rms(got[role], reference[role]) < 2e-5
    finally:
        KERNELS.remove(kernel.name)


class ExactEightBits:
    """Says that it runs in 8 bits, so that transforms apply, and rounds nothing."""

    name = "exact.claims_8bit"

    def recipe(self, role: Role):  # type: ignore[no-untyped-def]
        return KERNELS.get("reference.rowwise").recipe(role)

    def operands(self, role: Role) -> tuple[OperandSpec, OperandSpec]:
        return OperandSpec(Format.FP32), OperandSpec(Format.FP32)

    def missing(self, device: object) -> None:
        return None

    def why_not(self, problem: object) -> None:
        return None

    def multiply(self, a, b, out_dtype, bias):  # type: ignore[no-untyped-def]
        out = a.codes.double() @ b.codes.double().t()
        return (out if bias is None else out + bias.double()).to(out_dtype)


def test_a_kernel_never_sees_the_transform() -> None:
    for transform in Transform:
        executor = SiteExecutor(ROWWISE, transform)
        for role in Role:
            specs = tuple(form.spec for form in executor.operand_forms(role))
            assert specs == executor.kernels[role].operands(role)


def test_roles_in_high_precision_read_their_tensors_as_they_are() -> None:
    executor = SiteExecutor(SiteKernels("reference.rowwise", "torch.fp32", "torch.fp32"), Transform.RESCALE)
    changed = {role: [form.transform for form in executor.operand_forms(role)] for role in Role}
    plain = [Transform.NONE, Transform.NONE]
    assert changed == {Role.FPROP: [Transform.RESCALE, Transform.RESCALE], Role.DGRAD: plain, Role.WGRAD: plain}
    site = compensated_range()
    module = loka.LokaLinear.from_linear(
        linear_of(site), SiteKernels("reference.rowwise", "torch.fp32", "torch.fp32"), site.transform, site.vector_K
    )
    for role, reference in exact(site).items():
        assert relative_rms(outputs(module, site)[role], reference) < (0.045 if role is Role.FPROP else 1e-6)


@needs("onednn.int8_dynamic")
def test_a_kernel_that_casts_inside_gets_the_transformed_tensor() -> None:
    site = compensated_range()
    kernels = SiteKernels("onednn.int8_dynamic", "torch.fp32", "torch.fp32")
    module = loka.LokaLinear.from_linear(linear_of(site), kernels, site.transform, site.vector_K)
    assert relative_rms(module(site.x_MK).detach(), exact(site)[Role.FPROP]) < 0.02


@pytest.mark.usefixtures("fresh_compiler")
def test_each_compiles_into_one_graph_of_its_own() -> None:
    """The modules share one code object, and differ by their transform alone."""
    plain = loka.LokaLinear.from_linear(linear_of(PLANTED[0]), ROWWISE), PLANTED[0]
    transformed = [(loka.LokaLinear.from_linear(linear_of(s), ROWWISE, s.transform, s.vector_K), s) for s in PLANTED]
    for module, site in (plain, *transformed):
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        eager = outputs(module, site)
        for role, got in outputs(compiled, site).items():
            torch.testing.assert_close(got, eager[role], rtol=1e-4, atol=1e-4 * eager[role].abs().max().item())


@pytest.mark.parametrize("site", PLANTED, ids=lambda site: site.transform)
def test_rescues_a_model_in_bf16(site: PlantedSite) -> None:
    module = loka.LokaLinear.from_linear(linear_of(site).bfloat16(), ROWWISE, site.transform, site.vector_K)
    rounded = PlantedSite(site.x_MK.bfloat16(), site.dy_MN.bfloat16(), module.weight.detach(), site.transform, site.vector_K)
    got, reference = outputs(module, rounded, torch.bfloat16), exact(rounded)
    for role in Role:
        assert got[role].dtype is torch.bfloat16
        assert relative_rms(got[role], reference[role]) < 0.045


class TestTheVectorAndTheWeight:
    site = cancelling_mean()

    def module(self) -> loka.LokaLinear:
        return loka.LokaLinear.from_linear(linear_of(self.site), ROWWISE, self.site.transform, self.site.vector_K)

    def is_current(self, module: loka.LokaLinear) -> bool:
        fresh = loka.LokaLinear.from_linear(module, module.kernels, module.transform, self.site.vector_K)
        return torch.equal(fresh(self.site.x_MK), module(self.site.x_MK))

    def test_is_no_part_of_the_checkpoint(self) -> None:
        assert list(self.module().state_dict()) == ["weight"]

    def test_a_shift_is_held_where_fprop_is_centered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[Tensor] = []
        monkeypatch.setattr(
            "loka.nn.linear.center_shift", lambda weight_NK, mean_K: made.append(weight_NK) or weight_NK @ mean_K
        )
        for fprop, n_made in (("reference.rowwise", 2), ("torch.fp32", 0)):
            kernels = SiteKernels(fprop, "reference.rowwise", "reference.rowwise")
            module = loka.LokaLinear.from_linear(linear_of(self.site), kernels, self.site.transform, self.site.vector_K)
            module.recast_after_step()
            assert len(made) == n_made
            made.clear()
            assert relative_rms(outputs(module, self.site)[Role.WGRAD], exact(self.site)[Role.WGRAD]) < 0.045

    def test_the_shift_follows_the_weight(self) -> None:
        module = self.module()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
        outputs(module, self.site)
        optimizer.step()
        assert self.is_current(module)
        module.load_state_dict({"weight": torch.randn_like(module.weight)})
        assert self.is_current(module)

    @pytest.mark.parametrize("copier", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
    def test_copies_carry_it(self, copier) -> None:  # type: ignore[no-untyped-def]
        module = self.module()
        assert torch.equal(copier(module)(self.site.x_MK), module(self.site.x_MK))

    def test_a_change_of_dtype_leaves_it_fp32(self) -> None:
        module = self.module().half()
        assert held(module)["transform_vector"].dtype is torch.float32
        assert module(self.site.x_MK.half()).dtype is torch.float16

    @pytest.mark.parametrize(
        ("transform", "vector", "message"),
        [
            (Transform.CENTER, None, "pass transform and vector together"),
            (Transform.NONE, torch.zeros(256), "pass transform and vector together"),
            (Transform.CENTER, torch.zeros(3), "a site with 256 features takes a vector of as many"),
            (Transform.CENTER, torch.full((256,), torch.nan), "takes finite values"),
            (Transform.RESCALE, torch.full((256,), 3.0), "positive powers of two"),
            (Transform.RESCALE, torch.full((256,), -2.0), "positive powers of two"),
        ],
    )
    def test_bad_vectors_are_refused(self, transform: Transform, vector: Tensor | None, message: str) -> None:
        with pytest.raises(InvalidInput, match=message):
            loka.LokaLinear.from_linear(nn.Linear(256, 4), ROWWISE, transform, vector)


def test_a_transform_given_as_text_is_the_same_and_a_wrong_one_is_refused() -> None:
    linear, mean_K, x_MK = nn.Linear(32, 8), torch.rand(32) + 1, torch.randn(4, 32)
    kernels = SiteKernels.same("reference.rowwise")
    by_text = loka.LokaLinear.from_linear(linear, kernels, "center", mean_K)
    assert torch.equal(by_text(x_MK), loka.LokaLinear.from_linear(linear, kernels, Transform.CENTER, mean_K)(x_MK))
    with pytest.raises(UnknownName, match="no transform is called 'centre'"):
        loka.LokaLinear.from_linear(linear, kernels, "centre", mean_K)


@pytest.mark.parametrize("power", [2.0**20, 2.0**-30])
def test_rescale_in_fp16_may_go_by_powers_that_fp16_does_not_hold(power: float) -> None:
    x_MK, vectors = torch.full((2, 3), power, dtype=torch.float32), TransformVectors(torch.full((3,), power))
    small_MK = torch.full((2, 3), 0.5, dtype=torch.float16)
    assert torch.equal(apply_to(TensorName.X, x_MK, Transform.RESCALE, vectors), torch.ones(2, 3))
    expected = torch.full((2, 3), 0.5 / power)
    assert torch.equal(apply_to(TensorName.X, small_MK, Transform.RESCALE, vectors), expected)


@pytest.mark.parametrize("other", [{"static_scale": 0.5}, {"outer_multiple": 16}, {"layout": Layout.ONEDNN}], ids=str)
def test_a_form_that_differs_in_one_thing_alone_has_another_key(other: dict[str, Any]) -> None:
    spec = OperandSpec(Format.E4M3, Scaling.STATIC, static_scale=0.25)
    assert Form(replace(spec, **other), False).key != Form(spec, False).key


def test_keys_tell_forms_apart() -> None:
    spec = OperandSpec(Format.E4M3, Scaling.ROWWISE, contraction_multiple=16)
    assert Form(spec, False).key == "e4m3 rowwise 1x16"
    assert Form(spec, True, Transform.CENTER).key == "e4m3 rowwise 1x16ᵀ center"
    forms = {
        form
        for name in KERNELS.names()
        for transform in Transform
        for role in Role
        for form in SiteExecutor(SiteKernels.same(name), transform).operand_forms(role)
    }
    assert len({form.key for form in forms}) == len(forms)
