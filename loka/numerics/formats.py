"""The 8-bit formats: their numbers, and rounding onto their grids without a scale."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.core.errors import InvalidInput
from loka.core.recipe import Format


@dataclass(frozen=True)
class FormatInfo:
    """The grid of an 8-bit format. int8's is uniform: its step is both smallest values, its 7 magnitude bits the mantissa."""

    format: Format
    dtype: torch.dtype
    smallest_normal: float
    smallest_subnormal: float
    mantissa_bits: int

    @property
    def max(self) -> float:
        """Asked of torch, not kept in a field: ``torch.compile(dynamic=True)`` takes torch's answer for a constant, but would
        turn a field into an input of the graph, and fail at the second site that reads it."""
        return torch.finfo(self.dtype).max if self.dtype.is_floating_point else float(torch.iinfo(self.dtype).max)


# Looked up by ``format.value``: torch.compile (2.13) sets no guard on an enum that is a dict's key, so it would go on using the
# graph of the first format it saw.
_INFOS: dict[str, FormatInfo] = {
    Format.E4M3: FormatInfo(Format.E4M3, torch.float8_e4m3fn, 2.0**-6, 2.0**-9, 3),
    Format.E5M2: FormatInfo(Format.E5M2, torch.float8_e5m2, 2.0**-14, 2.0**-16, 2),
    # Symmetric: −128 is never produced, so that negating a tensor negates its codes.
    Format.INT8: FormatInfo(Format.INT8, torch.int8, 1.0, 1.0, 7),
}

_DTYPES: dict[str, torch.dtype] = {
    **{name: grid.dtype for name, grid in _INFOS.items()},
    Format.BF16: torch.bfloat16,
    Format.FP16: torch.float16,
    Format.TF32: torch.float32,
    Format.FP32: torch.float32,
}

_FORMATS = {_DTYPES[format]: format for format in Format if format is not Format.TF32}

_ENCODABLE = (torch.bfloat16, torch.float16, torch.float32)

_E5M2_INF = 0x7C  # its bits; 0xFC is −inf


def info(format: Format) -> FormatInfo:
    """The numbers of an 8-bit ``format``; high-precision ones have no codes and are refused."""
    if format.value not in _INFOS:
        raise InvalidInput(f"{format} is not an 8-bit format: it needs no codes or scales. Use one of {', '.join(_INFOS)}")
    return _INFOS[format.value]


def torch_dtype(format: Format) -> torch.dtype:
    """The dtype that stores ``format``; TF32 is stored as float32."""
    return _DTYPES[format.value]


def is_format(dtype: torch.dtype) -> bool:
    return dtype in _FORMATS


def format_of(dtype: torch.dtype) -> Format:
    """The format a tensor of ``dtype`` is in."""
    if dtype not in _FORMATS:
        raise InvalidInput(f"{dtype} is none of LoKA's formats: models run in float32, bfloat16 or float16")
    return _FORMATS[dtype]


def require_encodable(x: Tensor, format: Format) -> None:
    """Refuse dtypes that FP32 may not hold exactly: their values would be rounded twice."""
    if x.dtype not in _ENCODABLE:
        raise InvalidInput(f"cannot encode {x.dtype} as {format}: cast to float32 first (bfloat16 and float16 are taken too)")


def encode(x: Tensor, format: Format) -> Tensor:
    """Round to the nearest value of ``format``, ties to even; finite values past its maximum saturate.

    NaN stays NaN. ±inf becomes NaN in e4m3, which has no infinity, and stays ±inf in e5m2. int8 has neither: there both
    become 0, and the caller marks their scale.
    """
    limit, dtype = info(format).max, info(format).dtype
    require_encodable(x, format)
    x = x.float()  # exact; with a narrower input a compiler might round by way of another format
    if format is Format.INT8:
        return torch.where(x.isfinite(), x, 0.0).round().clamp(-limit, limit).to(dtype)
    # Clamped explicitly: whether the cast itself saturates depends on torch's version and on who compiles it.
    saturated = x.clamp(-limit, limit)
    if format is Format.E4M3:
        return saturated.masked_fill(x.isinf(), math.nan).to(dtype)
    # Casting inf to e5m2 saturates in PTX (cvt.satfinite), so its bits are set by hand.
    bits = saturated.to(dtype).view(torch.uint8)
    inf_bits = torch.where(x > 0, _E5M2_INF, _E5M2_INF | 0x80).to(torch.uint8)
    return torch.where(x.isinf(), inf_bits, bits).view(dtype)


def decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values that 8-bit ``codes`` stand for, exactly, for any floating ``dtype`` that can hold them."""
    info(format_of(codes.dtype))
    return codes.to(dtype)
