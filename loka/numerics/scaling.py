"""Scales that bring a tensor into an 8-bit format's range: one for all of it, a row, a column, or a block.

Axes:  R rows (the operand's outer axis),  C columns (its contracted axis).  A scale multiplies on the way back,
value = code · scale. It is FP32 and always has two axes, with one entry for each block of ``Scaling.block``; the last block of
an axis may be partly filled.

A value that is not finite makes its scale NaN, and so every value that shares the scale: one rule for all formats, int8
included, that every GPU cast can follow.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from loka.core.errors import InvalidInput
from loka.core.recipe import Format, Scaling
from loka.numerics.formats import decode, encode, info, require_encodable

STATIC_SCALE = 16 / 448  # what follows a BlockNorm of 256 features is at most √256 = 16

_TRANSPOSED: dict[str, Scaling] = {  # by ``scaling.value``, see formats.py
    Scaling.TENSORWISE: Scaling.TENSORWISE,
    Scaling.STATIC: Scaling.STATIC,
    Scaling.ROWWISE: Scaling.COLWISE,
    Scaling.COLWISE: Scaling.ROWWISE,
    Scaling.BLOCK_128X128: Scaling.BLOCK_128X128,
}


class Quantized(NamedTuple):
    """A 2-D tensor in 8 bits: value = code · scale, the scale expanded over its block."""

    codes: Tensor
    scale: Tensor  # FP32, (⌈R/block rows⌉, ⌈C/block columns⌉)
    format: Format
    scaling: Scaling


def amax(x: Tensor, scaling: Scaling) -> Tensor:
    """The largest magnitude that each scale must cover, FP32: 0 for a block without values, NaN or inf if a value is."""
    _require_2d(x)
    (grid_rows, block_rows), (grid_cols, block_cols) = _grid(x.shape, scaling)
    missing_rows = grid_rows * block_rows - x.shape[0]
    missing_cols = grid_cols * block_cols - x.shape[1]
    magnitude = x.abs()
    if missing_rows or missing_cols:
        magnitude = F.pad(magnitude, (0, missing_cols, 0, missing_rows))
    return magnitude.reshape(grid_rows, block_rows, grid_cols, block_cols).amax(dim=(1, 3)).float()


def scale_from_amax(amax: Tensor, format: Format) -> Tensor:
    """The scale that maps ``amax`` onto the format's maximum: 1 for an amax of 0, NaN for one that is not finite."""
    largest = torch.full_like(amax, info(format).max)  # a tensor: to divide by a number torch on a GPU multiplies by 1/number
    # A subnormal scale loses bits, or is flushed to zero. Torch is asked for the limit, as in ``FormatInfo.max``.
    scale = (amax / largest).clamp(min=torch.finfo(torch.float32).smallest_normal)
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where(amax.isfinite(), scale, math.nan)


def power_from_amax(amax: Tensor, format: Format) -> Tensor:
    """The smallest power of two that brings ``amax`` within the format: FP32's smallest normal number for an amax of 0, NaN for
    one that is not finite. It is put together from its bits, since on a GPU a computed power need not be exact."""
    mantissa, exponent = torch.frexp(amax)
    of_largest, exponent_of_largest = math.frexp(info(format).max)
    power = exponent - exponent_of_largest + (mantissa > of_largest)
    scale = ((torch.where(amax == 0, -126, power).clamp(min=-126) + 127) << 23).to(torch.int32).view(torch.float32)
    return torch.where(amax.isfinite(), scale, math.nan)


def expand_scale(scale: Tensor, scaling: Scaling, shape: Sequence[int]) -> Tensor:
    """Each value's own scale, for a tensor of ``shape``."""
    (grid_rows, _), (grid_cols, _) = _grid(shape, scaling)
    expected = (grid_rows, grid_cols)
    if tuple(scale.shape) != expected:
        raise InvalidInput(f"{scaling} scales of a {tuple(shape)} tensor have shape {expected}, got {tuple(scale.shape)}")
    for axis, block in enumerate(scaling.block):
        if block is not None and block > 1:
            # Gathered: of expand().reshape()[:size] inductor (2.13, CPU) leaves out the partly filled last block.
            scale = scale.index_select(axis, torch.arange(shape[axis], device=scale.device) // block)
    return scale.expand(*shape)


def quantize(
    x: Tensor, format: Format, scaling: Scaling, *, static_scale: float | Tensor | None = None, powers: bool = False
) -> Quantized:
    """Cast ``x`` (R×C) to ``format``, with ``static_scale`` for STATIC, otherwise with scales from its own magnitudes: those
    that use the whole range, or ``powers`` of two.

    Finite values past the range of a static scale saturate; NaN and ±inf follow ``encode`` (int8 has no code for them, so there
    they make the scale NaN).
    """
    _require_2d(x)
    require_encodable(x, format)
    if (static_scale is not None) != (scaling is Scaling.STATIC):
        given = "without one" if static_scale is None else f"with {scaling} scaling"
        raise InvalidInput(f"static_scale belongs to static scaling and to no other, got a call {given}")
    if static_scale is None:
        scale = (power_from_amax if powers else scale_from_amax)(amax(x, scaling), format)
        return Quantized(encode(x.float() / expand_scale(scale, scaling, x.shape), format), scale, format, scaling)

    scale = _static_scale(static_scale, x.device)
    limit = info(format).max
    ratio = x.float() / scale
    # Divided by a small scale a finite value may overflow FP32; it is past the range, not infinite.
    codes = encode(torch.where(x.isfinite(), ratio.clamp(-limit, limit), ratio), format)
    if format is Format.INT8:
        scale = torch.where(x.isfinite().all(), scale, math.nan)
    return Quantized(codes, scale, format, scaling)


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values that ``q`` stands for: exact in float64, otherwise rounded once to FP32 (and then to ``dtype``)."""
    compute = torch.float64 if dtype is torch.float64 else torch.float32
    return (decode(q.codes, compute) * expand_scale(q.scale.to(compute), q.scaling, q.codes.shape)).to(dtype)


def slices_of_rows(q: Quantized, rows: int) -> Iterator[tuple[slice, Quantized]]:
    """``q`` in parts of about ``rows`` rows, with the place of each; no block is cut in two."""
    n_rows, block = q.codes.shape[0], q.scaling.block[0]
    step = rows if block is None else -(-rows // block) * block
    for start in range(0, n_rows, step):
        taken = slice(start, min(start + step, n_rows))
        scale = q.scale if block is None else q.scale[start // block : -(-taken.stop // block)]
        yield taken, Quantized(q.codes[taken], scale, q.format, q.scaling)


def transpose(q: Quantized) -> Quantized:
    """The transposed tensor, value for value, without casting again; row scales become column scales."""
    if q.scaling.value not in _TRANSPOSED:
        raise InvalidInput(
            f"{q.scaling} scales run along rows and have no transpose: quantize the transposed tensor, or use 128x128"
        )
    return Quantized(q.codes.t().contiguous(), q.scale.t().contiguous(), q.format, _TRANSPOSED[q.scaling.value])


def _grid(shape: Sequence[int], scaling: Scaling) -> tuple[tuple[int, int], tuple[int, int]]:
    """For each axis: how many blocks, and how long each is (at least 1, so that an empty axis still reduces)."""
    if scaling is Scaling.NONE:
        raise InvalidInput("scaling none has no scales: high-precision operands are used as they are")
    block_rows, block_cols = scaling.block
    return _split(shape[0], block_rows), _split(shape[1], block_cols)


def _split(size: int, block: int | None) -> tuple[int, int]:
    return (1, max(size, 1)) if block is None else (-(-size // block), block)


def _static_scale(scale: float | Tensor, device: torch.device) -> Tensor:
    fp32 = torch.finfo(torch.float32)
    if isinstance(scale, Tensor):
        if scale.numel() != 1:
            raise InvalidInput(f"static_scale is one value for the whole tensor, got shape {tuple(scale.shape)}")
        scale_11 = scale.to(device=device, dtype=torch.float32).reshape(1, 1)
        # Reading its value would wait for the device, so an unusable one makes everything NaN instead.
        return torch.where((scale_11 >= fp32.smallest_normal) & (scale_11 <= fp32.max), scale_11, math.nan)
    if not fp32.smallest_normal <= scale <= fp32.max:
        raise InvalidInput(f"static_scale must be a positive normal FP32 number, got {scale}")
    return torch.full((1, 1), scale, dtype=torch.float32, device=device)


def _require_2d(x: Tensor) -> None:
    if x.ndim != 2:
        raise InvalidInput(f"expected 2-D (rows × contracted columns), got shape {tuple(x.shape)}; flatten the leading axes")
