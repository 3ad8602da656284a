"""Casts against the oracle: each caster, each form it takes, hostile values; and which caster is chosen."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loka.core.gemm import Device, Role, TensorName
from loka.core.recipe import Format, Scaling, Transform
from loka.kernels.casting import CASTERS, CastProblem, cast, cast_and_sum, choose_caster, rewriter_of
from loka.kernels.device import device_of
from loka.kernels.executor import SiteExecutor, SiteKernels
from loka.kernels.operand import Form, Layout, Operand, OperandSpec
from loka.numerics.formats import format_of, info
from loka.numerics.scaling import Quantized, dequantize, quantize

SCALINGS = [Scaling.TENSORWISE, Scaling.ROWWISE, Scaling.BLOCK_1X128, Scaling.BLOCK_128X128, Scaling.STATIC]
H200 = Device("cuda", "NVIDIA H200", (9, 0))


def spec_of(format: Format, scaling: Scaling, multiple: int = 1) -> OperandSpec:
    static = 0.05 if scaling is Scaling.STATIC else None
    return OperandSpec(format, scaling, outer_multiple=multiple, contraction_multiple=multiple, static_scale=static)


def assert_is_the_oracles(operand: Operand, x: Tensor, form: Form) -> None:
    """Equal scales, and equal codes but for ties: a compiled division may be an ulp off, which moves a tie by one code."""
    oriented = x.t() if form.transposed else x
    padded = torch.zeros(operand.codes.shape, dtype=x.dtype, device=x.device)
    padded[: oriented.shape[0], : oriented.shape[1]] = oriented
    expected = quantize(padded, form.spec.format, form.spec.scaling, static_scale=form.spec.static_scale)
    assert operand.scale is not None
    assert operand.codes.is_contiguous()
    assert (operand.outer, operand.contraction) == tuple(oriented.shape)
    torch.testing.assert_close(operand.scale, expected.scale, rtol=1e-6, atol=0, equal_nan=True)
    if torch.equal(operand.codes.view(torch.uint8), expected.codes.view(torch.uint8)):
        return
    got = Quantized(operand.codes, expected.scale, form.spec.format, form.spec.scaling)
    values, expected_values, exact = dequantize(got, torch.float64), dequantize(expected, torch.float64), padded.double()
    moved = values != expected_values
    assert moved.float().mean() < 0.01  # bf16 values are coarse, and ties among them common
    to_got, to_expected = (values - exact).abs()[moved], (expected_values - exact).abs()[moved]
    torch.testing.assert_close(to_got, to_expected, rtol=1e-4, atol=0)  # equally near: a tie


@given(
    rows=st.integers(1, 300),
    cols=st.integers(1, 300),
    scalings=st.lists(st.sampled_from(SCALINGS), min_size=1, max_size=3),
    format=st.sampled_from([Format.E4M3, Format.E5M2, Format.INT8]),
    multiple=st.sampled_from([1, 16, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**20),
)
def test_torch_casts_every_form_in_both_orders_at_once(
    rows: int, cols: int, scalings: list[Scaling], format: Format, multiple: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, cols, generator=generator) * torch.randn(rows, 1, generator=generator).exp()).to(dtype)
    forms = [Form(spec_of(format, s, m), t) for s in dict.fromkeys(scalings) for t in (False, True) for m in {1, multiple}]
    for operand, form in zip(CASTERS.get("torch").cast(x, forms), forms, strict=True):
        assert_is_the_oracles(operand, x, form)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype"), [((2050, 512), torch.bfloat16), ((300, 129), torch.float32), ((1, 64), torch.bfloat16)], ids=str
)
def test_compiled_casts_are_the_oracles(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (torch.randn(*shape, device="cuda") * torch.randn(shape[0], 1, device="cuda").exp()).to(dtype)
    for scaling in (Scaling.ROWWISE, Scaling.TENSORWISE, Scaling.BLOCK_1X128):
        forms = [Form(spec_of(Format.E4M3, scaling, 16), transposed) for transposed in (False, True)]
        for operand, form in zip(cast(TensorName.DY, x, forms), forms, strict=True):
            assert_is_the_oracles(operand, x, form)


@pytest.mark.gpu
def test_fbgemm_casts_what_it_takes() -> None:
    caster = CASTERS.get("fbgemm")
    form = Form(spec_of(Format.E4M3, Scaling.ROWWISE, 16), False)
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    problem = CastProblem(TensorName.X, 256, 512, Format.BF16, device_of(x.device))
    if reason := caster.why_not(form, problem):
        pytest.skip(reason)
    assert_is_the_oracles(caster.cast(x, [form])[0], x, form)


@given(
    rows=st.integers(1, 200),
    cols=st.integers(1, 200),
    rowwise=st.booleans(),
    transposed=st.booleans(),
    seed=st.integers(0, 999),
)
def test_onednn_casts_int8_exactly(rows: int, cols: int, rowwise: bool, transposed: bool, seed: int) -> None:
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 1e-3
    form = Form(spec_of(Format.INT8, Scaling.ROWWISE if rowwise else Scaling.TENSORWISE), transposed)
    assert_is_the_oracles(CASTERS.get("onednn").cast(x, [form])[0], x, form)


@pytest.mark.parametrize("scaling", [Scaling.ROWWISE, Scaling.TENSORWISE])
@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0)])
@pytest.mark.parametrize("caster", ["torch", "onednn"])
def test_empty_tensors_cast_to_empty_codes(caster: str, shape: tuple[int, int], scaling: Scaling) -> None:
    (operand,) = CASTERS.get(caster).cast(torch.empty(shape), [Form(spec_of(Format.INT8, scaling), False)])
    assert operand.codes.shape == shape
    assert operand.scale is not None
    assert operand.scale.eq(1).all()


def test_flushed_values_are_those_under_half_the_smallest_code() -> None:
    x = torch.tensor([[448.0, 2.0**-10, 2.0**-10 * 1.01, -(2.0**-9)]])
    (operand,) = cast(TensorName.X, x, [Form(spec_of(Format.E4M3, Scaling.ROWWISE), False)])
    smallest = info(Format.E4M3).smallest_subnormal
    assert operand.codes.float().tolist() == [[448.0, 0.0, smallest, -smallest]]


class TestChoice:
    rowwise = Form(OperandSpec(Format.E4M3, Scaling.ROWWISE, contraction_multiple=16), False)

    @pytest.fixture(autouse=True)
    def _fbgemm_alone_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("loka.kernels.providers.fbgemm._not_installed", lambda: None)
        monkeypatch.setattr("loka.kernels.providers.triton._not_installed", lambda: "not installed")

    def test_our_own_come_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("loka.kernels.providers.triton._not_installed", lambda: None)
        assert self.chosen(self.rowwise) == "triton"
        assert self.chosen(Form(OperandSpec(Format.E5M2, Scaling.ROWWISE), False)) == "torch"

    def chosen(self, form: Form) -> str:
        return choose_caster(form, CastProblem(TensorName.X, 64, 64, Format.BF16, H200))

    def test_fbgemm_takes_row_scales_of_bf16_activations(self) -> None:
        assert self.chosen(self.rowwise) == "fbgemm"

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"tensor": TensorName.DY}, "floors its scales"),
            ({"format": Format.FP32}, "reads bf16"),
            ({"cols": 72}, "needs some"),
            ({"cols": 32768}, "fails to launch"),
        ],
    )
    def test_fbgemm_is_passed_over_where_it_is_wrong(self, change: dict[str, object], reason: str) -> None:
        problem = {"tensor": TensorName.X, "rows": 64, "cols": 64, "format": Format.BF16, "device": H200, **change}
        assert reason in (CASTERS.get("fbgemm").why_not(self.rowwise, CastProblem(**problem)) or "")  # type: ignore[arg-type]
        assert choose_caster(self.rowwise, CastProblem(**problem)) == "torch"  # type: ignore[arg-type]

    def test_transposed_row_scales_go_to_torch(self) -> None:
        assert self.chosen(Form(self.rowwise.spec, True)) == "torch"

    def test_int8_on_the_cpu_goes_to_onednn(self) -> None:
        form = Form(OperandSpec(Format.INT8, Scaling.ROWWISE, layout=Layout.ONEDNN), False)
        cpu = device_of(torch.device("cpu"))
        assert choose_caster(form, CastProblem(TensorName.W, 8, 8, Format.FP32, cpu)) == "onednn"


class TestSharing:
    def test_a_symmetric_scaling_quantizes_once_for_both_orders(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = []

        def counted(*args: object, **kwargs: object) -> Quantized:
            calls.append(args)
            return quantize(*args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr("loka.kernels.providers.torch_casts.quantize", counted)
        executor = SiteExecutor(SiteKernels.same("reference.tensorwise"))
        casts = executor.cast(TensorName.X, torch.randn(8, 8), (Role.FPROP, Role.WGRAD))
        assert len(casts) == 2
        assert len(calls) == 1

    def test_roles_that_ask_for_the_same_form_share_it(self) -> None:
        executor = SiteExecutor(SiteKernels("reference.rowwise", "torch.fp32", "torch.fp32"))
        assert len(executor.forms[TensorName.DY]) == 2  # dy and its transpose: views in high precision
        mixed = SiteExecutor(SiteKernels("reference.rowwise", "reference.rowwise", "reference.rowwise_e5m2"))
        formats = [(form.spec.format, form.transposed) for form in mixed.forms[TensorName.DY]]
        assert formats == [(Format.E4M3, False), (Format.E5M2, True)]

    def test_torch_and_fbgemm_read_the_same_casts(self) -> None:
        one = SiteExecutor(SiteKernels("torch.rowwise", "torch.rowwise", "torch.rowwise"))
        other = SiteExecutor(SiteKernels("fbgemm.rowwise", "fbgemm.rowwise", "fbgemm.rowwise"))
        assert one.forms == other.forms


def test_high_precision_forms_are_views() -> None:
    x = torch.randn(4, 6)
    plain, transposed = cast(TensorName.X, x, [Form(OperandSpec(Format.FP32), False), Form(OperandSpec(Format.FP32), True)])
    assert plain.codes.data_ptr() == transposed.codes.data_ptr() == x.data_ptr()
    assert (transposed.outer, transposed.contraction) == (6, 4)
    assert format_of(plain.codes.dtype) is Format.FP32


def test_columns_are_summed_in_fp32() -> None:
    """In bf16 a sum of 4,096 ones forgets what is less than 16."""
    dy = torch.ones(4097, 3, dtype=torch.bfloat16)
    dy[-1] = 1 / 256
    form = Form(spec_of(Format.E4M3, Scaling.ROWWISE), transposed=False)
    (operand,), sum_C = cast_and_sum(TensorName.DY, dy, [form])
    assert sum_C.tolist() == [4096 + 1 / 256] * 3
    assert_is_the_oracles(operand, dy, form)


def test_only_what_one_caster_writes_as_it_lies_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rewriting:
        def why_not(self, form: Form, problem: CastProblem) -> str | None:
            return None if form.spec.scaling is Scaling.ROWWISE else "row scales alone"

        def cast(self, tensor: Tensor, forms: list[Form]) -> list[Operand]:
            raise AssertionError

        def remember(self, tensor: Tensor, forms: list[Form]) -> Tensor:
            raise AssertionError

        def rewriting(self, tensor: Tensor, operands: dict[Form, Operand], memory: Tensor) -> None:
            raise AssertionError

    class Other(Rewriting):
        def why_not(self, form: Form, problem: CastProblem) -> str | None:
            return None

    monkeypatch.setattr("loka.kernels.casting.PREFERENCE", ("first", "second"))
    monkeypatch.setitem(CASTERS._entries, "first", Rewriting())
    monkeypatch.setitem(CASTERS._entries, "second", Other())
    weight = torch.ones(4, 4)
    rows, tensor = (Form(spec_of(Format.E4M3, scaling), transposed=False) for scaling in (Scaling.ROWWISE, Scaling.TENSORWISE))
    rescaled = Form(rows.spec, transposed=False, transform=Transform.RESCALE)
    assert isinstance(rewriter_of(TensorName.W, weight, [rows]), Rewriting)
    assert rewriter_of(TensorName.W, weight, [rows, tensor]) is None
    assert rewriter_of(TensorName.W, weight, [rows, rescaled]) is None
