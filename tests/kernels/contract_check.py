"""The contract every kernel must keep, as one check: its product is the oracle's on the very operands it was given."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from loka.core.gemm import SOURCES, Role, TensorName
from loka.core.recipe import Accumulation, Format
from loka.kernels.casting import cast_high_precision
from loka.kernels.contract import Kernel, multiply
from loka.kernels.operand import Form, Operand
from loka.kernels.providers.torch_casts import quantize_forms
from loka.numerics.scaling import Quantized, dequantize

# Error of the sum itself, relative to Σ|a||b|. Hopper's tensor cores align 32 FP8 products and the running sum to the largest
# and cut them to 13 bits; FAST goes on so, FULL adds up in FP32 what 128 products have come to. Emulated, the worst of
# m=256, k=129, n=64, seed=50220 is 40·2⁻¹⁴, and an H200 passed 32·2⁻¹⁴ in one value of it. A subnormal code is aligned as if
# it were the smallest normal one: of m=128, k=24, n=256, seed=399092, spread=2 an H200 passed 48·2⁻¹⁴ of Σ|a||b| in one
# value, and so does the emulation, by 59·2⁻¹⁴, in one.
FP8_SUM_ERROR = {Accumulation.FULL: 48 * 2.0**-14, Accumulation.FAST: 64 * 2.0**-14}
SUM_ERROR = {Format.FP32: 2.0**-18, Format.TF32: 2.0**-9, Format.BF16: 2.0**-14}
EXACT_SUM_ERROR = 2.0**-22  # float64 or int32 sums
OUT_ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7}
WRITES_BF16 = ("torch.bf16", "fbgemm.rowwise", "fbgemm.rowwise_fast")  # whatever is asked for, a sum is rounded to bf16


def operands_of(kernel: Kernel, role: Role, tensors: dict[TensorName, Tensor]) -> tuple[Operand, Operand]:
    """Cast by the oracle's arithmetic, uncompiled: the product is under test here, casts are in test_casting."""
    a, b = (
        _cast(tensors[source.tensor], Form(spec, source.transposed))
        for source, spec in zip(SOURCES[role], kernel.operands(role), strict=True)
    )
    return a, b


def _cast(tensor: Tensor, form: Form) -> Operand:
    if not form.spec.format.is_8bit:
        return cast_high_precision(tensor, form)
    ((codes, scale),) = quantize_forms(tensor, (form,))
    rows, cols = tensor.shape
    return Operand(codes, scale, *((cols, rows) if form.transposed else (rows, cols)), form.spec)


def values(operand: Operand) -> Tensor:
    """What an operand stands for, at float64, without its padding."""
    if operand.scale is None:
        return operand.codes.double()
    q = Quantized(operand.codes, operand.scale, operand.spec.format, operand.spec.scaling)
    return dequantize(q, torch.float64)[: operand.outer, : operand.contraction]


def _aligned_as(operand: Operand) -> Tensor:
    """Sizes of the values as a tensor core takes them when it aligns products: a subnormal for the smallest normal."""
    if operand.codes.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        return values(operand).abs()
    codes = operand.codes.float()
    raised = torch.where(codes == 0, 0.0, codes.abs().clamp(min=torch.finfo(operand.codes.dtype).smallest_normal))
    return values(operand._replace(codes=raised.to(operand.codes.dtype)))


def check_product(
    kernel: Kernel, role: Role, tensors: dict[TensorName, Tensor], dtype: torch.dtype, bias: Tensor | None = None
) -> None:
    a, b = operands_of(kernel, role, tensors)
    with _sums_in_fp32():
        out = multiply(kernel, role, a, b, dtype, bias)
    assert out.dtype == dtype
    assert out.shape == (a.outer, b.outer)
    a_values, b_values = values(a), values(b)
    product = a_values @ b_values.t()
    expected = product if bias is None else product + bias.double()
    magnitude = _aligned_as(a) @ _aligned_as(b).t()
    rounding = OUT_ROUNDING[torch.bfloat16 if kernel.name in WRITES_BF16 else dtype]
    allowed = _sum_error(kernel, role) * magnitude
    allowed += rounding * (product.abs() + expected.abs())  # rounded before and after the bias is added
    allowed += _cast_inside(kernel, role, a_values) * b_values.abs().sum(1)
    allowed += 1e-30
    error = (out.double() - expected).abs()
    wrong = ~(error <= allowed)
    if wrong.any():
        worst = divmod(int((error / allowed).nan_to_num(torch.inf).argmax()), out.shape[1])
        raise AssertionError(
            f"{kernel.name} {role}: {int(wrong.sum())} of {wrong.numel()} values are off, most of all {out[worst]} at {worst}, "
            f"where {expected[worst]} ± {allowed[worst]:.3g} is right, {product[worst]} of it the product's"
        )


@contextmanager
def _sums_in_fp32() -> Iterator[None]:
    """torch lets cuBLAS split a contraction of bf16 and add bias and parts rounded to bf16. With x of 129×34, w of 256×34 and a
    bias an H200 did, and was off by 1.6 steps of bf16; told not to, by no more than it rounds its output."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before


def _sum_error(kernel: Kernel, role: Role) -> float:
    recipe = kernel.recipe(role)
    if not recipe.a_format.is_8bit:
        return SUM_ERROR[recipe.a_format]
    return EXACT_SUM_ERROR if kernel.name.startswith(("reference.", "onednn.")) else FP8_SUM_ERROR[recipe.accumulation]


def _cast_inside(kernel: Kernel, role: Role, a_values: Tensor) -> Tensor | float:
    """A kernel that casts a by itself, to 255 steps between its extremes, may be off by a step in every value."""
    if kernel.operands(role)[0].format.is_8bit or not kernel.recipe(role).a_format.is_8bit:
        return 0.0
    if a_values.numel() == 0:
        return 0.0
    return (a_values.max().clamp(min=0) - a_values.min().clamp(max=0)) / 255
