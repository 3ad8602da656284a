"""FBGEMM's FP8 row-wise GEMM and its cast kernel (the package fbgemm-gpu-genai)."""

import importlib
import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from loka.core.gemm import Device, GemmProblem, Role, TensorName
from loka.core.recipe import Accumulation, Format, Recipe, Scaling
from loka.kernels.casting import CASTERS, CastProblem
from loka.kernels.contract import add_kernel
from loka.kernels.device import constant_when_traced
from loka.kernels.operand import Form, Layout, Operand, OperandSpec, padded_size, recipe_of
from loka.kernels.providers.torch_fp8 import missing_fp8

WIDEST_ROW = 16384  # its cast keeps a row in shared memory: 32,768 values fail to launch on an H200


@constant_when_traced
def _not_installed() -> str | None:
    """Looks for the package without importing it: importing loads CUDA."""
    spec = importlib.util.find_spec("fbgemm_gpu")
    folders = spec.submodule_search_locations or [] if spec else []
    if any((Path(folder) / "experimental" / "gen_ai").is_dir() for folder in folders):
        return None
    return "needs the package fbgemm-gpu-genai, which is not installed"


@constant_when_traced
def _load() -> None:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it warns of torch versions newer than those it lists; the contract tests tell more
    try:
        importlib.import_module("fbgemm_gpu.experimental.gen_ai")
    finally:
        logging.disable(before)


def _missing(device: Device) -> str | None:
    if reason := missing_fp8(device) or _not_installed():
        return reason
    if device.capability[0] != 9:
        return f"tried on Hopper (sm_90) alone, this is sm_{device.sm}"
    return None


@dataclass(frozen=True)
class FbgemmRowwise:
    """One scale a row, FBGEMM's CUTLASS kernels; it writes bf16."""

    variant: str
    accumulation: Accumulation

    @property
    def name(self) -> str:
        return f"fbgemm.{self.variant}"

    def operands(self, role: Role) -> tuple[OperandSpec, OperandSpec]:
        a = OperandSpec(Format.E4M3, Scaling.ROWWISE, contraction_multiple=16)
        return a, OperandSpec(Format.E4M3, Scaling.ROWWISE, outer_multiple=16, contraction_multiple=16)

    def recipe(self, role: Role) -> Recipe:
        return recipe_of(self.operands(role), self.accumulation)

    def missing(self, device: Device) -> str | None:
        return _missing(device)

    def why_not(self, problem: GemmProblem) -> str | None:
        return None

    def multiply(self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        _load()
        assert a.scale is not None
        assert b.scale is not None
        fast = self.accumulation is Accumulation.FAST
        out = torch.ops.fbgemm.f8f8bf16_rowwise(a.codes, b.codes, a.scale.flatten(), b.scale.flatten(), use_fast_accum=fast)
        out = out[:, : b.outer].to(out_dtype)
        return out if bias is None else out + bias.to(out_dtype)


@CASTERS.register("fbgemm")
class FbgemmCaster:
    """``quantize_fp8_per_row``: one read and one launch, for the casts that it gets right."""

    def why_not(self, form: Form, problem: CastProblem) -> str | None:
        spec = form.spec
        if (spec.format, spec.scaling, spec.layout) != (Format.E4M3, Scaling.ROWWISE, Layout.PLAIN) or form.transposed:
            return "writes e4m3 with row scales in the tensor's own order of axes alone"
        if reason := _missing(problem.device):
            return reason
        if problem.format is not Format.BF16:
            return f"reads bf16; {problem.format} gave wrong values (tried with fp32, 1.6.0)"
        if problem.tensor is TensorName.DY:
            return "floors its scales at 4.4e-6, which coarsens gradients under 7e-8 and flushes those under 4e-9 to zero"
        if problem.cols % padded_size(spec.contraction_multiple, 8) or problem.rows % spec.outer_multiple:
            return f"writes no padding, and {problem.rows}×{problem.cols} needs some"
        if problem.cols > WIDEST_ROW:
            return f"fails to launch on rows wider than {WIDEST_ROW}, got {problem.cols}"
        return None

    def cast(self, tensor: Tensor, forms: Sequence[Form]) -> list[Operand]:
        _load()
        codes, scale = torch.ops.fbgemm.quantize_fp8_per_row(tensor.contiguous())
        rows, cols = tensor.shape
        return [Operand(codes, scale[:, None], rows, cols, form.spec) for form in forms]


add_kernel(FbgemmRowwise("rowwise", Accumulation.FULL))
add_kernel(FbgemmRowwise("rowwise_fast", Accumulation.FAST))
