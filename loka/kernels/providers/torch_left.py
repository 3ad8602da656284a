"""A layer over another axis of x than the last, multiplied from the left: W·x instead of (xᵀ·Wᵀ)ᵀ, on a CPU.

Behind ``x.mT`` each feature's values lie side by side. torch's own layer multiplies such an x by the transposed weight, which
reads it against the way it lies; W·x reads it as it lies. The sums are the same, in another order. The output is turned to lie
row by row, as the layer's does, since a model may ``view`` it; torch.compile turns it where it is read.

Axes:  B matrices,  R rows of one,  K in_features,  N out_features.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.core.gemm import Device, GemmProblem, Role
from loka.core.recipe import Accumulation, Format, Recipe
from loka.kernels.contract import add_kernel
from loka.kernels.operand import Operand, OperandSpec, recipe_of

LEFT = "torch.fp32_left"


def lies_across(x: Tensor) -> bool:
    """Whether rows of x lie side by side in every feature, as behind ``x.mT``."""
    if x.ndim < 2 or x.layout is not torch.strided or x.is_nested:
        return False
    return x.stride(-2) == 1 and x.shape[-1] > 1 and x.shape[-2] > 1  # in this order: sizes may be unknown to torch.export


def from_the_left(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """What ``F.linear`` gives."""
    x_BKR = x.mT.reshape(-1, x.shape[-1], x.shape[-2])
    y_BNR = torch.bmm(weight_NK.expand(x_BKR.shape[0], *weight_NK.shape), x_BKR)
    if bias_N is not None:
        y_BNR = y_BNR + bias_N.to(y_BNR.dtype)[:, None]
    return y_BNR.mT.contiguous().reshape(*x.shape[:-1], weight_NK.shape[0])


@dataclass(frozen=True)
class TorchFromTheLeft:
    name: str = LEFT

    def operands(self, role: Role) -> tuple[OperandSpec, OperandSpec]:
        return OperandSpec(Format.FP32), OperandSpec(Format.FP32)

    def recipe(self, role: Role) -> Recipe:
        return recipe_of(self.operands(role), Accumulation.FULL)

    def missing(self, device: Device) -> str | None:
        return None if device.type == "cpu" else "multiplies on a CPU alone"

    def why_not(self, problem: GemmProblem) -> str | None:
        return None if problem.role is Role.FPROP else "is for fprop: torch's own layer makes the gradients"

    def multiply(self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        return from_the_left(a.codes, b.codes, bias).to(out_dtype)


add_kernel(TorchFromTheLeft())
