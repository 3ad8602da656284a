"""Our kernels behind the contract: who may use them, and that they hold to it."""

import pytest
import torch
from contract_check import check_product
from torch._dynamo.testing import CompileCounterWithBackend

from loka.core.gemm import Device, GemmProblem, Role, SiteShape, TensorName
from loka.core.recipe import Format, Scaling, Transform
from loka.kernels.casting import CASTERS, CastProblem, Rewriter, cast, cast_and_sum, rewriter_of
from loka.kernels.contract import KERNELS
from loka.kernels.device import device_of
from loka.kernels.executor import SiteKernels
from loka.kernels.operand import Form, OperandSpec
from loka.kernels.providers import triton as provider
from loka.nn.linear import LokaLinear
from loka.nn.weight_casts import held
from loka.numerics.formats import decode
from loka.numerics.scaling import quantize

OURS = [name for name in KERNELS.names() if name.startswith("triton.")]
SITES = [SiteShape(2048, 256, 768), SiteShape(300, 200, 100), SiteShape(1, 16, 1)]


@pytest.mark.parametrize("capability", [(8, 9), (10, 0)], ids=str)
def test_other_gpus_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(provider, "_not_installed", lambda: None)
    device = Device("cuda", "another GPU", capability)
    reason = f"written for Hopper's tensor cores (sm_90), this is sm_{device.sm}"
    assert {KERNELS.get(name).missing(device) for name in OURS} == {reason}
    form = Form(OperandSpec(Format.E4M3, Scaling.ROWWISE, contraction_multiple=16), False)
    assert CASTERS.get("triton").why_not(form, CastProblem(TensorName.X, 64, 64, Format.BF16, device)) == reason


@pytest.mark.gpu
@pytest.mark.parametrize("site", SITES, ids=str)
@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("name", OURS)
def test_products_are_the_oracles(gpu: torch.device, name: str, role: Role, site: SiteShape) -> None:
    kernel = KERNELS.get(name)
    problem = GemmProblem.of(role, site, Format.FP32, device_of(gpu))
    if reason := kernel.missing(problem.device) or kernel.why_not(problem):
        pytest.skip(reason)
    tensors = {
        TensorName.X: torch.randn(site.m, site.k, device=gpu).clamp(-16, 16),
        TensorName.DY: 1e-3 * torch.randn(site.m, site.n, device=gpu),
        TensorName.W: site.k**-0.5 * torch.randn(site.n, site.k, device=gpu),
    }
    check_product(kernel, role, tensors, torch.bfloat16)


def test_a_linear_layer_s_copies_are_rewritten_where_they_lie(where: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step both copies hold the moved weight, in the same buffers; a form too many for one read has one of its own."""
    monkeypatch.setattr(provider, "missing_triton", lambda device: None)
    caster = CASTERS.get("triton")
    assert isinstance(caster, Rewriter)
    specs = (OperandSpec(Format.E4M3, scaling, 16, 16) for scaling in (Scaling.ROWWISE, Scaling.TENSORWISE))
    forms = [Form(spec, transposed) for spec in specs for transposed in (False, True)][:3]
    weight_NK = torch.randn(40, 72, generator=torch.Generator().manual_seed(0)).to(where)
    assert rewriter_of(TensorName.W, weight_NK, forms) is caster
    operands = dict(zip(forms, caster.cast(weight_NK, forms), strict=True))
    rewrite = caster.rewriting(weight_NK, operands, caster.remember(weight_NK, forms))
    for step in (1.2, 0.9, 1.1):
        weight_NK.mul_(step).add_(0.05)
        rewrite()
        for form, operand in operands.items():
            weight = weight_NK.t() if form.transposed else weight_NK
            scale = operand.scale[: operand.outer] if form.spec.scaling is Scaling.ROWWISE else operand.scale  # type: ignore[index]
            value = decode(operand.codes)[: operand.outer, : operand.contraction] * scale
            assert ((value - weight).abs() <= weight.abs() / 15 + scale * 2.0**-9).all()


def test_rows_of_int8_go_beside_forms_of_e4m3(where: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As fprop in int8 and wgrad in e4m3 ask for: cast together, and rewritten together."""
    monkeypatch.setattr(provider, "missing_triton", lambda device: None)
    caster = CASTERS.get("triton")
    assert isinstance(caster, Rewriter)
    int8, trans = (Form(OperandSpec(format, Scaling.ROWWISE, 16, 16), transposed) for format, transposed in (
        (Format.INT8, False), (Format.E4M3, True),
    ))  # fmt: skip
    weight_NK = torch.randn(40, 72, generator=torch.Generator().manual_seed(0)).to(where)
    operands = dict(zip((trans, int8), caster.cast(weight_NK, [trans, int8]), strict=True))
    rewrite = caster.rewriting(weight_NK, operands, caster.remember(weight_NK, [trans, int8]))
    for step in (1.0, 1.2, 0.9):
        weight_NK.mul_(step)
        rewrite()
        expected = quantize(weight_NK, Format.INT8, Scaling.ROWWISE)
        assert torch.equal(operands[int8].codes[:40, :72], expected.codes)
        assert torch.equal(operands[int8].scale[:40], expected.scale)  # type: ignore[index]
        value = decode(operands[trans].codes)[:72, :40] * operands[trans].scale[:72]  # type: ignore[index]
        assert ((value - weight_NK.t()).abs() <= weight_NK.t().abs() / 15 + operands[trans].scale[:72] * 2.0**-9).all()  # type: ignore[index]


@pytest.mark.parametrize(
    ("form", "cols"),
    [
        (Form(OperandSpec(Format.INT8, Scaling.ROWWISE), True), 64),
        (Form(OperandSpec(Format.INT8, Scaling.TENSORWISE), False), 64),
        (Form(OperandSpec(Format.INT8, Scaling.ROWWISE), False), 16385),
    ],
    ids=str,
)
def test_other_int8_is_left_to_others(form: Form, cols: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "missing_triton", lambda device: None)
    problem = CastProblem(TensorName.X, 64, cols, Format.BF16, Device("cuda", "a GPU", (9, 0)))
    assert "rows of at most 16384" in str(CASTERS.get("triton").why_not(form, problem))


def test_int8_is_for_fprop_of_rows_that_fit() -> None:
    kernel, device = KERNELS.get("triton.int8_rowwise"), Device("cuda", "a GPU", (9, 0))
    problems = {role: GemmProblem.of(role, SiteShape(64, 512, 32), Format.BF16, device) for role in Role}
    assert {role for role, problem in problems.items() if kernel.why_not(problem) is None} == {Role.FPROP}
    wide = GemmProblem.of(Role.FPROP, SiteShape(64, 16385, 32), Format.BF16, device)
    assert "at most 16384" in str(kernel.why_not(wide))


def test_what_is_transformed_or_shared_out_is_not_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    weight_NK, rowwise = torch.ones(32, 32), OperandSpec(Format.E4M3, Scaling.ROWWISE, 16, 16)
    assert rewriter_of(TensorName.W, weight_NK, [Form(rowwise, False)]) is None  # on a CPU torch casts it
    monkeypatch.setattr(provider, "missing_triton", lambda device: None)
    rescaled = Form(rowwise, False, Transform.RESCALE)
    other = Form(OperandSpec(Format.E5M2, Scaling.ROWWISE, 16, 16), True)
    assert rewriter_of(TensorName.W, weight_NK, [rescaled]) is None
    assert rewriter_of(TensorName.W, weight_NK, [Form(rowwise, False), other]) is None


def test_a_centered_layer_s_shift_follows_the_weight(where: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Centering changes x alone, so that the weight's codes are rewritten; μ·wᵀ must not stay behind."""
    monkeypatch.setattr(provider, "missing_triton", lambda device: None)
    linear = torch.nn.Linear(32, 16, bias=False).to(where)
    mean_K = torch.full((32,), 8.0, device=where)
    layer = LokaLinear.from_linear(linear, SiteKernels.same("triton.rowwise"), Transform.CENTER, mean_K)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    torch.testing.assert_close(held(layer)["weight_shift"], layer.weight.detach() @ mean_K)


FORMS = {
    "both layouts": (("tensorwise", False), ("tensorwise", True)),
    "row scales alone": (("rowwise", False),),
    "two plain, one transposed, one in bf16": (("tensorwise", False), ("rowwise", False), ("tensorwise", True), ("none", True)),
}


@pytest.mark.parametrize("kinds", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "torch's"])
def test_sums_of_columns_come_with_the_casts(
    where: torch.device, monkeypatch: pytest.MonkeyPatch, kinds: tuple[tuple[str, bool], ...], is_ours: bool
) -> None:
    """In whatever forms: the gradient of a bias is Σdy, and dy is read for its casts."""
    monkeypatch.setattr(provider, "missing_triton", lambda device: None if is_ours else "not asked for")
    dy_MN = torch.randn(100, 48, generator=torch.Generator().manual_seed(0)).to(where)
    formats = {kind: Format.BF16 if kind == "none" else Format.E4M3 for kind, _ in kinds}
    forms = [Form(OperandSpec(formats[kind], Scaling(kind), 1, 16), transposed) for kind, transposed in kinds]
    operands, sum_N = cast_and_sum(TensorName.DY, dy_MN, forms)
    torch.testing.assert_close(sum_N.double(), dy_MN.double().sum(0), rtol=1e-6, atol=1e-5)
    for got, expected in zip(operands, cast(TensorName.DY, dy_MN, forms), strict=True):
        assert got.spec == expected.spec
        assert torch.equal(got.codes.float(), expected.codes.float())


def test_casts_of_changing_rows_are_compiled_no_more_than_twice(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for rows as they are, once for any: what a cast returns shall ask nothing of their number."""
    monkeypatch.setattr(provider, "missing_triton", lambda device: None)
    layer = LokaLinear(32, 16, kernels=SiteKernels.same("triton.tensorwise"))
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for rows in (64, 48, 80, 63, 130):
        compiled(torch.randn(rows, 32)).sum().backward()
    assert counter.frame_count <= 2
