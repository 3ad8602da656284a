"""FP8 GEMMs of torch: cuBLASLt and CUTLASS behind ``torch._scaled_mm``."""

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.core.gemm import SOURCES, Device, GemmProblem, Role, TensorName
from loka.core.recipe import Accumulation, Format, Recipe, Scaling
from loka.kernels.contract import add_kernel
from loka.kernels.operand import NO_STATIC_DGRAD, Operand, OperandSpec, recipe_of
from loka.numerics.scaling import STATIC_SCALE


def missing_fp8(device: Device) -> str | None:
    if device.type != "cuda":
        return "needs an NVIDIA GPU"
    if device.capability < (8, 9):
        return f"needs FP8 tensor cores (sm_89 or newer), this is sm_{device.sm}"
    return None


@dataclass(frozen=True)
class TorchScaled:
    """One scale for a tensor or a row, through ``torch._scaled_mm``; ``grad_format`` is the format of dy.

    STATIC is x's constant scale behind a norm: no pass has to find it. The other operand has one scale for all, since casting a
    transpose with row scales, as wgrad would read it, costs more than they gain.
    """

    variant: str
    scaling: Scaling
    accumulation: Accumulation
    grad_format: Format = Format.E4M3

    @property
    def name(self) -> str:
        return f"torch.{self.variant}"

    def operands(self, role: Role) -> tuple[OperandSpec, OperandSpec]:
        a_source, b_source = SOURCES[role]
        return self._spec(a_source.tensor, outer_multiple=1), self._spec(b_source.tensor, outer_multiple=16)

    def _spec(self, tensor: TensorName, outer_multiple: int) -> OperandSpec:
        format, scaling = self.grad_format if tensor is TensorName.DY else Format.E4M3, self.scaling
        if scaling is Scaling.STATIC and tensor is not TensorName.X:
            scaling = Scaling.TENSORWISE
        static_scale = STATIC_SCALE if scaling is Scaling.STATIC else None
        return OperandSpec(format, scaling, outer_multiple, contraction_multiple=16, static_scale=static_scale)

    def recipe(self, role: Role) -> Recipe:
        return recipe_of(self.operands(role), self.accumulation)

    def missing(self, device: Device) -> str | None:
        return missing_fp8(device)

    def why_not(self, problem: GemmProblem) -> str | None:
        if problem.role is Role.FPROP and self.grad_format is not Format.E4M3:
            return f"{self.grad_format} is for gradients, and fprop reads none"
        if problem.role is Role.DGRAD and self.scaling is Scaling.STATIC:
            return NO_STATIC_DGRAD
        return None

    def multiply(self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        return scaled_mm(a, b, out_dtype, bias, fast=self.accumulation is Accumulation.FAST)


@dataclass(frozen=True)
class TorchBlockwise:
    """1×128 scales for a, 128×128 for b, through ``torch._scaled_mm``; partial sums are promoted every 128."""

    name: str = "torch.blockwise"

    def operands(self, role: Role) -> tuple[OperandSpec, OperandSpec]:
        # cuBLAS reads each row of 128×128 scales at a stride padded to 4, which torch 2.11 does not pass on: with 6
        # blocks it returns an error of 0.5 and no message. A contraction padded to 4 blocks is right in every version.
        a = OperandSpec(Format.E4M3, Scaling.BLOCK_1X128, outer_multiple=16, contraction_multiple=512)
        return a, OperandSpec(Format.E4M3, Scaling.BLOCK_128X128, outer_multiple=16, contraction_multiple=512)

    def recipe(self, role: Role) -> Recipe:
        return recipe_of(self.operands(role), Accumulation.FULL)

    def missing(self, device: Device) -> str | None:
        if reason := missing_fp8(device):
            return reason
        if device.capability[0] != 9:
            return f"cuBLAS has blockwise scales for Hopper (sm_90) alone, this is sm_{device.sm}"
        return None

    def why_not(self, problem: GemmProblem) -> str | None:
        return None

    def multiply(self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        return scaled_mm(a, b, out_dtype, bias, fast=False)


def scaled_mm(a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None, *, fast: bool) -> Tensor:
    """``torch._scaled_mm`` of two operands. It adds a bf16 bias to a bf16 output itself; others are added behind it."""
    assert a.scale is not None
    assert b.scale is not None
    padded = b.codes.shape[0] != b.outer
    bias = None if bias is None else bias.to(out_dtype)
    fused_bias = bias if out_dtype is torch.bfloat16 and not padded else None
    out = torch._scaled_mm(
        a.codes,
        b.codes.t(),
        scale_a=a.scale,
        scale_b=b.scale.t(),
        bias=fused_bias,
        out_dtype=out_dtype,
        use_fast_accum=fast,
    )
    if padded or a.codes.shape[0] != a.outer:
        out = out[: a.outer, : b.outer]
    return out if bias is None or fused_bias is not None else out + bias


for _scaling in (Scaling.TENSORWISE, Scaling.ROWWISE):
    add_kernel(TorchScaled(f"{_scaling}", _scaling, Accumulation.FULL))
    add_kernel(TorchScaled(f"{_scaling}_fast", _scaling, Accumulation.FAST))
    add_kernel(TorchScaled(f"{_scaling}_e5m2", _scaling, Accumulation.FULL, grad_format=Format.E5M2))
add_kernel(TorchScaled("static", Scaling.STATIC, Accumulation.FULL))
add_kernel(TorchScaled("static_fast", Scaling.STATIC, Accumulation.FAST))
add_kernel(TorchBlockwise())
