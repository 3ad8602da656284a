"""The oracle as kernels, one a recipe, on every device: slow, and exactly what the recipe says."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from loka.core.gemm import SOURCES, Device, GemmProblem, Role, TensorName
from loka.core.recipe import Accumulation, Format, Recipe, Scaling
from loka.kernels.contract import add_kernel
from loka.kernels.operand import NO_STATIC_DGRAD, Operand, OperandSpec, recipe_of
from loka.numerics.reference import gemm
from loka.numerics.scaling import STATIC_SCALE, Quantized


@dataclass(frozen=True)
class Reference:
    """Dequantizes both operands and multiplies in float64."""

    is_oracle: ClassVar[bool] = True

    variant: str
    format: Format
    a_scaling: Scaling
    b_scaling: Scaling
    grad_format: Format

    @property
    def name(self) -> str:
        return f"reference.{self.variant}"

    def operands(self, role: Role) -> tuple[OperandSpec, OperandSpec]:
        a_source, b_source = SOURCES[role]
        return self._spec(a_source.tensor, self.a_scaling), self._spec(b_source.tensor, self.b_scaling)

    def _spec(self, tensor: TensorName, scaling: Scaling) -> OperandSpec:
        format = self.grad_format if tensor is TensorName.DY else self.format
        if scaling is Scaling.STATIC and tensor is not TensorName.X:
            scaling = Scaling.TENSORWISE  # only what follows a norm has a bound known beforehand
        return OperandSpec(format, scaling, static_scale=STATIC_SCALE if scaling is Scaling.STATIC else None)

    def recipe(self, role: Role) -> Recipe:
        return recipe_of(self.operands(role), Accumulation.FULL)

    def missing(self, device: Device) -> str | None:
        return None

    def why_not(self, problem: GemmProblem) -> str | None:
        if problem.role is Role.FPROP and self.grad_format is not self.format:
            return f"{self.grad_format} is for gradients, and fprop reads none"
        if problem.role is Role.DGRAD and self.a_scaling is Scaling.STATIC:
            return NO_STATIC_DGRAD
        return None

    def multiply(self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        out = gemm(_quantized(a), _quantized(b))
        return (out if bias is None else out + bias.double()).to(out_dtype)


def _quantized(operand: Operand) -> Quantized:
    assert operand.scale is not None
    return Quantized(operand.codes, operand.scale, operand.spec.format, operand.spec.scaling)


_TENSORWISE, _ROWWISE = Scaling.TENSORWISE, Scaling.ROWWISE
for _variant, _format, _a, _b, _grad in (
    ("tensorwise", Format.E4M3, _TENSORWISE, _TENSORWISE, Format.E4M3),
    ("rowwise", Format.E4M3, _ROWWISE, _ROWWISE, Format.E4M3),
    ("blockwise", Format.E4M3, Scaling.BLOCK_1X128, Scaling.BLOCK_128X128, Format.E4M3),
    ("static", Format.E4M3, Scaling.STATIC, Scaling.STATIC, Format.E4M3),
    ("tensorwise_e5m2", Format.E4M3, _TENSORWISE, _TENSORWISE, Format.E5M2),
    ("rowwise_e5m2", Format.E4M3, _ROWWISE, _ROWWISE, Format.E5M2),
    ("int8_tensorwise", Format.INT8, _TENSORWISE, _TENSORWISE, Format.INT8),
    ("int8_rowwise", Format.INT8, _ROWWISE, _ROWWISE, Format.INT8),
):
    add_kernel(Reference(_variant, _format, _a, _b, _grad))
