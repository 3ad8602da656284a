"""Launching steps of Adam that cast the weight as they write it."""

from typing import NamedTuple

import torch
from torch import Tensor

from loka.kernels.stepping import AdamStep
from loka.kernels.triton.casts import NOT_WRITTEN, Codes, Target, Tile
from loka.kernels.triton.launch import Borrowed, launch
from loka.kernels.triton.tiles import power_of_two

ADAM_TILE = Tile(64, 64, warps=8)
ADAM_VALUES = 2048  # of a row, or of several, that a program has in its registers, four numbers each


class RowTile(NamedTuple):
    rows: int
    cols: int


def adam_row_tile(cols: int) -> RowTile:
    at_once = min(ADAM_VALUES, power_of_two(cols))
    return RowTile(ADAM_VALUES // at_once, at_once)


def launch_adam_cast(x: Tensor, plain: Target, trans: Target, codes: Codes, amax: Tensor, seen: Tensor, adam: AdamStep) -> None:
    """``x`` stepped and written with one scale for all, of the largest of ``amax``; ``seen`` are raised to its own."""
    from loka.kernels.triton import adam_kernels as kernels

    (rows, cols), (plain_codes, plain_scale, trans_codes, trans_scale) = x.shape, codes
    words = trans_codes if trans.scaling == NOT_WRITTEN else trans_codes.view(torch.int32)
    tile = ADAM_TILE
    tiles_across = -(-max(plain.contraction, trans.outer) // tile.cols)
    tiles = tiles_across * -(-max(plain.outer, trans.contraction) // tile.rows)
    launch(
        kernels.adam_cast_kernel, (tiles, 1, 1),
        *_arguments(x, adam), plain_codes, plain_scale, words, trans_scale, amax, amax.numel(), seen,
        rows, cols, plain.outer, plain.contraction, trans.outer, trans.contraction, tiles_across,
        ROWS=tile.rows, COLS=tile.cols, PLAIN=plain.scaling, TRANS=trans.scaling, SAME=plain.has_scales_of(trans),
        ALL_AT_ONCE=power_of_two(amax.numel()), ALIGNED=trans.contraction % 16 == 0, SEEN=seen.numel(),
        FOUND_INF=adam.found_inf is not None, num_warps=tile.warps,
    )  # fmt: skip


def launch_adam_rowwise(x: Tensor, plain: Target, codes: Tensor, scale: Tensor, adam: AdamStep) -> None:
    """``x`` stepped, and each row written by the smallest power of two that keeps it in the format."""
    from loka.kernels.triton import adam_kernels as kernels

    (rows, cols), tile = x.shape, adam_row_tile(x.shape[1])
    launch(
        kernels.adam_rowwise_kernel, (-(-plain.outer // tile.rows), 1, 1),
        *_arguments(x, adam), codes, scale, rows, cols, plain.outer, plain.contraction,
        ROWS=tile.rows, COLS=tile.cols, FOUND_INF=adam.found_inf is not None, num_warps=8,
    )  # fmt: skip


def _arguments(x: Tensor, adam: AdamStep) -> tuple[Tensor | Borrowed, ...]:
    """Gradients are gone after the step, and averages with their optimizer: no launch to be made again keeps them."""
    found_inf = adam.step if adam.found_inf is None else adam.found_inf
    return x, *map(Borrowed, (adam.gradient, adam.average, adam.square, adam.step, adam.settings, found_inf))
