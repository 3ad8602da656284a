"""Codes with scales that products can take out of their sums, made from codes with more scales: one a row, and one for all of
the transpose.

A matrix that is cast by rows is read once, if its rows have powers of two (``has_powers``): its transpose is then made from the
codes, a byte a value.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from loka.core.recipe import Scaling
from loka.kernels.operand import padded_size
from loka.kernels.ops import fake_of, op
from loka.kernels.stepping import AdamStep
from loka.kernels.triton.adam import launch_adam_by_rows, pays_in_step
from loka.kernels.triton.casts import (
    AMAXES_AT_ONCE,
    WIDEST_ROW,
    Target,
    few_with_largest,
    launch_rowwise,
    write_codes,
)
from loka.kernels.triton.launch import launch, on_its_gpu
from loka.kernels.triton.recasts import repeating, rewriting, tell_autograd, written
from loka.kernels.triton.tiles import SHARED_TILE, Columns, ceil_div, power_of_two

# The shortest rows whose scale is a power of two. The scale of an amax makes that one value exact, which counts in a short row:
# at 64 values the error of a product is 1.2 times as large with powers of two.
POWERS_FROM = 512


class ScaledCodes(NamedTuple):
    """e4m3 codes with a multiple of 16 columns, and the bits of their scales, powers of two: for each row one in every run of
    columns (runs × rows), or just one (1 × rows). ``largest`` are some scales, the largest of all among them."""

    codes: Tensor
    scales: Tensor
    largest: Tensor


def share_scales(
    made: ScaledCodes,
    columns: Columns,
    tile_cols: int,
    shape: torch.Size,
    row_scale: Tensor,
    codes_t: Tensor,
    scale_t: Tensor,
    *,
    norm: bool = False,
    factor: float = 1.0,
) -> None:
    """Give codes as they lie one scale a row, if ``row_scale`` has room. Write them transposed with one scale for all, if
    ``codes_t`` has room: that scale times ``factor`` begins ``scale_t``, whose second row, if any, begins with 1."""
    from loka.kernels.triton import share_kernels as kernels

    rows, cols = shape
    tile_rows, part_cols = SHARED_TILE[0], min(SHARED_TILE[1], tile_cols)
    parts, plain, transposed = ceil_div(tile_cols, part_cols), row_scale.numel() > 0, codes_t.numel() > 0
    assert not plain or len(made.scales) == columns.count, "rows that have one scale each are as they shall be"
    largest = few_with_largest(made.largest) if transposed else made.largest
    launch(
        kernels.share_scales_kernel, (ceil_div(rows, tile_rows) * columns.count * parts, 1, 1),
        made.codes, codes_t.view(torch.int32) if transposed else codes_t, made.scales, largest, row_scale, scale_t,
        rows, cols, padded_size(cols, 16), padded_size(rows, 16),
        rows if len(made.scales) > 1 else 0, scale_t.stride(0) if len(scale_t) > 1 else 0,
        columns.count, largest.numel(), factor,
        NORM=norm, WIDTH=columns.width, WIDER=columns.wider, ROWS=tile_rows, COLS=part_cols, PARTS=parts,
        BLOCKS=power_of_two(columns.count) if plain else 1, AT_ONCE=AMAXES_AT_ONCE, PLAIN=plain, TRANS=transposed, num_warps=4,
    )  # fmt: skip


def cast_by_rows(x: Tensor, *, transposed: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes of ``x`` and their scales, one a row; then ``transposed`` codes with one scale for all, or empty tensors."""
    return torch.ops.loka.cast_by_rows(x, transposed)


@op("cast_by_rows")
def _cast_by_rows(x: Tensor, transposed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    codes = _empty_by_rows(x, transposed)
    _write_by_rows(x, codes)
    return codes


@fake_of("cast_by_rows")
def _empty_by_rows(x: Tensor, transposed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plain, trans = _targets(x, transposed)
    return *plain.empty(x), *trans.empty(x)


def rewriting_by_rows(
    x: Tensor, codes: tuple[Tensor, Tensor, Tensor, Tensor], adam: AdamStep | None = None
) -> Callable[[], None]:
    """A function that does ``cast_by_rows`` again each time it is called, into the same codes. With ``adam``, where rows have
    powers of two, x makes that step first."""
    if not has_powers(x.shape[1]):
        return rewriting(x, *_targets(x, transposed=True), codes)

    def write() -> None:
        if adam is None:
            _write_by_rows(x, codes)
        else:
            launch_adam_by_rows(x, codes, adam)
        tell_autograd(written(x, codes, adam))

    return repeating(write, x, written(x, codes, adam))


@on_its_gpu
def _write_by_rows(x: Tensor, codes: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    codes_RC, scale_R, codes_CR, scale = codes
    transposed = codes_CR.numel() > 0
    plain, trans = _targets(x, transposed)
    if not has_powers(x.shape[1]):
        write_codes(x, plain, trans, codes)
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    scale_bits = scale_R.view(torch.int32).reshape(1, -1)
    launch_rowwise(x, plain, codes_RC, scale_R, scale_bits[:, :0], power=True, more=transposed)
    if transposed:
        made = ScaledCodes(codes_RC, scale_bits, scale_bits[0])
        columns, nothing = Columns.of(x.shape[1], None, SHARED_TILE[1]), scale_R[:0]
        share_scales(made, columns, SHARED_TILE[1], x.shape, nothing, codes_CR, scale)


def has_powers(cols: int) -> bool:
    """Whether ``cast_by_rows`` scales rows of ``cols`` values by powers of two. Otherwise scales are those of ``cast_matrix``,
    which reads the matrix again for its transpose."""
    return POWERS_FROM <= cols <= WIDEST_ROW


def steps_by_rows(cols: int) -> bool:
    """Whether ``rewriting_by_rows`` can make a step of Adam on the way, and it pays."""
    return has_powers(cols) and pays_in_step(cols)


def _targets(x: Tensor, transposed: bool) -> tuple[Target, Target]:
    rows, cols = x.shape
    by_rows = Target(Scaling.ROWWISE.value, rows, padded_size(cols, 16), 1.0)
    if not transposed:
        return by_rows, Target.none()
    return by_rows, Target(Scaling.TENSORWISE.value, cols, padded_size(rows, 16), 1.0)
