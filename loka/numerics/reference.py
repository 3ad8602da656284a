"""The GEMM every kernel is compared with."""

import torch
from torch import Tensor

from loka.core.errors import InvalidInput
from loka.numerics.scaling import Quantized, dequantize


def gemm(a: Quantized | Tensor, b: Quantized | Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """a·bᵀ of a (M×K) and b (N×K), dequantized exactly and multiplied in float64, then rounded once to ``dtype``."""
    a_MK, b_NK = _in_float64(a), _in_float64(b)
    if a_MK.ndim != 2 or b_NK.ndim != 2 or a_MK.shape[1] != b_NK.shape[1]:
        shapes = f"{tuple(a_MK.shape)} and {tuple(b_NK.shape)}"
        raise InvalidInput(f"a (M×K) and b (N×K) must both be 2-D with the contracted axis last and equal, got {shapes}")
    return (a_MK @ b_NK.t()).to(dtype)


def _in_float64(operand: Quantized | Tensor) -> Tensor:
    return dequantize(operand, torch.float64) if isinstance(operand, Quantized) else operand.to(torch.float64)
