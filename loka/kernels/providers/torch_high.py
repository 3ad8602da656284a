"""High precision through torch: what every site runs on before LoKA, and what it returns to."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from loka.core.gemm import Device, GemmProblem, Role
from loka.core.recipe import Accumulation, Format, Recipe
from loka.kernels.contract import add_kernel
from loka.kernels.operand import Operand, OperandSpec, recipe_of
from loka.kernels.ops import fake_of, op

# The most multiplications that a bf16 GEMM may have where oneDNN has no code for it: they take 17 ms (Neoverse-N1, torch 2.13).
# 2048×1024×1024 took 17 s there, where fp32 took 0.07, and a measurement makes dozens of them.
MOST_SLOW_PRODUCTS = 128**3


@cache
def _has_fast_bf16() -> bool:
    """Whether oneDNN has bf16 code for this CPU: x86 with AVX-512, Arm with bf16 units."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


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
        """Refuses bf16 where it is slow, unless the model is in bf16 anyway: one in fp32 need not wait for it."""
        if self.format is not Format.BF16 or problem.out is Format.BF16 or problem.device.type != "cpu" or _has_fast_bf16():
            return None
        if problem.m * problem.n * problem.k > MOST_SLOW_PRODUCTS:
            return "oneDNN has no bf16 code for this CPU: on a Neoverse-N1 2048×1024×1024 took 250 times as long as in fp32"
        return None

    def multiply(self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        if bias is not None and out_dtype is a.codes.dtype and self.format is not Format.TF32:
            return torch.addmm(bias.to(out_dtype), a.codes, b.codes.t())  # in the product's epilogue, as F.linear has it
        out = self._product(a.codes, b.codes.t(), out_dtype)
        return out if bias is None else out + bias.to(out_dtype)

    def _product(self, a_MK: Tensor, b_KN: Tensor, out_dtype: torch.dtype) -> Tensor:
        if self.format is Format.BF16 and out_dtype is torch.float32 and a_MK.is_cuda:
            # The GEMM writes its FP32 sums itself: 98 µs for a weight gradient of 4096×4096 over 2048 rows on an H200. Rounding
            # to bf16 and widening again takes 141 in eager and 116 compiled.
            return torch.mm(a_MK, b_KN, out_dtype=out_dtype)
        mm = torch.ops.loka.mm_tf32 if self.format is Format.TF32 else torch.mm
        return mm(a_MK, b_KN).to(out_dtype)


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
