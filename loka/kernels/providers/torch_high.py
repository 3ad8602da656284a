"""High precision through torch: what every site runs on before LoKA, and what it returns to."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.core.gemm import Device, GemmProblem, Role
from loka.core.recipe import Accumulation, Format, Recipe
from loka.kernels.contract import add_kernel
from loka.kernels.operand import Operand, OperandSpec, recipe_of
from loka.kernels.ops import fake_of, op


@dataclass(frozen=True)
class TorchHighPrecision:
    """``torch.mm`` in fp32, tf32 or bf16. The operands are at most a change of dtype; transposes are views."""

    format: Format

    @property
    def name(self) -> str:
        return f"torch.{self.format}"

    def operands(self, role: Role) -> tuple[OperandSpec, OperandSpec]:
        return OperandSpec(self.format), OperandSpec(self.format)

    def recipe(self, role: Role) -> Recipe:
        return recipe_of(self.operands(role), Accumulation.FULL)

    def missing(self, device: Device) -> str | None:
        if self.format is Format.TF32 and (device.type != "cuda" or device.capability < (8, 0)):
            return "needs tf32 tensor cores (sm_80 or newer)"
        return None

    def why_not(self, problem: GemmProblem) -> str | None:
        return None

    def multiply(self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        if bias is not None and out_dtype is a.codes.dtype and self.format is not Format.TF32:
            return torch.addmm(bias.to(out_dtype), a.codes, b.codes.t())  # in the product's epilogue, as F.linear has it
        mm = torch.ops.loka.mm_tf32 if self.format is Format.TF32 else torch.mm
        out = mm(a.codes, b.codes.t()).to(out_dtype)
        return out if bias is None else out + bias.to(out_dtype)


@contextmanager
def _tf32() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


# An op of our own, since tf32 is a global switch of torch that a traced graph would forget.
@op("mm_tf32", "CUDA")
def mm_tf32(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    with _tf32():
        return torch.mm(a_MK, b_KN)


@fake_of("mm_tf32")
def _(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    return a_MK.new_empty(a_MK.shape[0], b_KN.shape[1])


for _format in (Format.FP32, Format.TF32, Format.BF16):
    add_kernel(TorchHighPrecision(_format))
