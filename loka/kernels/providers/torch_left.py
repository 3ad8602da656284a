"""A layer over another axis of x than the last, multiplied from the left: W·x instead of (xᵀ·Wᵀ)ᵀ, on a CPU.

Behind ``x.mT`` each feature's values lie side by side. torch's own layer multiplies such an x by the transposed weight, which
reads it against the way it lies; W·x reads it as it lies. The sums are the same, in another order. The output is turned to lie
row by row, as the layer's does, since a model may ``view`` it. torch.compile turns it where it is read, which costs nothing in
operations that it compiles. A matmul, which it calls, would read it against the way it lies: 30×32 by 32×8, 1,024 times, took
0.75 ms so, and 0.31 otherwise (Xeon with VNNI, 2026-11-19). For one that reads the output, it is turned in memory.

Axes:  B matrices,  R rows of one,  K in_features,  N out_features.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.core.gemm import Device, GemmProblem, Role
from loka.core.recipe import Accumulation, Format, Recipe
from loka.kernels.contract import add_kernel
from loka.kernels.operand import Operand, OperandSpec, recipe_of
from loka.kernels.written import written

LEFT = "torch.fp32_left"


def matrices_across(x: Tensor) -> tuple[int, int] | None:
    """B and R where x is B matrices of R rows, and in each feature the R values lie side by side, as behind ``x.mT``. None
    where rows lie one by one, and where a tracer cannot tell."""
    if x.ndim < 2 or x.layout is not torch.strided or x.is_nested:
        return None
    axis, across = x.ndim - 1, 1  # R is the product of the axes from ``axis`` on
    while axis > 0 and _surely(x.stride(axis - 1) == across):
        axis -= 1
        across *= x.shape[axis]
    if not (_surely(across > 1) and _surely(x.stride(-1) > 1) and x.shape[-1] > 1):
        return None
    return math.prod(x.shape[:axis]), across


def _surely(condition: bool) -> bool:
    """False where that depends on a number of rows which only the data tell."""
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # it takes most of a second

    return guard_or_false(condition)


def from_the_left(x_BRK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, *, in_memory: bool = False) -> Tensor:
    """What ``F.linear`` gives. ``in_memory``: it lies as that one's does in compiled code too."""
    y_BNR = torch.bmm(weight_NK.expand(x_BRK.shape[0], *weight_NK.shape), x_BRK.mT)
    if bias_N is not None:
        y_BNR = y_BNR + bias_N[:, None]
    y_BRN = y_BNR.mT.contiguous()
    return written(y_BRN) if in_memory else y_BRN


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
        if problem.role is not Role.FPROP:
            return "is for fprop: torch's own layer makes the gradients"
        return None if problem.across else "multiplies from the left, and here x lies row by row"

    def multiply(self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        return from_the_left(a.codes[None], b.codes, bias)[0].to(out_dtype)


add_kernel(TorchFromTheLeft())
