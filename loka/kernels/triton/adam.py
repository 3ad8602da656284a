"""Launching steps of Adam that cast the weight as they write it."""

import torch
from torch import Tensor

from loka.kernels.stepping import AdamStep
from loka.kernels.triton.casts import AMAXES_AT_ONCE, NOT_WRITTEN, Codes, Target, Tile
from loka.kernels.triton.launch import Borrowed, launch
from loka.kernels.triton.tiles import power_of_two

ADAM_TILE = Tile(64, 64, warps=8)
RESCALED = Tile(32, 128, warps=4)  # rows that a program checks for another power of two, and columns that it writes at once
AMAXES_OF_ROW = 32  # that are read at once
RETRANSPOSED_BY = 264  # programs at most, two on each processor of an H200: mostly they find nothing to do


def pays_in_step(cols: int) -> bool:
    """Whether four values can be read at once, as every row begins at a multiple of four. Without that, on an H200, a step that
    cast a weight of 16384×691 took 35 µs more than torch's step alone, and torch's step with a cast behind it 26 µs more
    (2026-11-18)."""
    return cols % 4 == 0


def launch_adam_cast(x: Tensor, plain: Target, trans: Target, codes: Codes, amax: Tensor, seen: Tensor, adam: AdamStep) -> None:
    """Step ``x`` and write its codes with one scale for all, that of the largest ``amax``; raise ``seen`` to the new amaxes."""
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
        FOUND_INF=adam.found_inf is not None, FOURS=pays_in_step(cols), num_warps=tile.warps,
    )  # fmt: skip


def launch_adam_by_rows(x: Tensor, codes: Codes, adam: AdamStep) -> None:
    """Step ``x`` and write it as ``cast_by_rows`` does, by powers of two: a scale a row, and one for all of the transpose.
    Codes are first written by the scales from before the step; those whose scale should be another now are written once
    more."""
    from loka.kernels.triton import adam_kernels as kernels

    (rows, cols), (codes_RC, scale_R, codes_CR, one_scale) = x.shape, codes
    padded_cols, padded_rows, words = codes_RC.shape[1], codes_CR.shape[1], codes_CR.view(torch.int32)
    tile, (rescaled_rows, rescaled_cols, warps) = ADAM_TILE, RESCALED
    across, programs = -(-padded_cols // tile.cols), -(-rows // rescaled_rows)
    tiles = across * -(-padded_rows // tile.rows)
    amax = x.new_empty((across, rows), dtype=torch.int32)
    used, largest = amax.new_empty(1), amax.new_empty(programs)
    launch(
        kernels.adam_by_rows_kernel, (tiles, 1, 1),
        *_arguments(x, adam), codes_RC, scale_R, words, one_scale, amax, used, rows, cols, padded_rows, padded_cols, across,
        ROWS=tile.rows, COLS=tile.cols, FOUND_INF=adam.found_inf is not None, FOURS=pays_in_step(cols), num_warps=tile.warps,
    )  # fmt: skip
    launch(
        kernels.rescale_rows_kernel, (programs, 1, 1),
        x, codes_RC, scale_R, amax, largest, rows, cols, padded_cols, across,
        ROWS=rescaled_rows, COLS=rescaled_cols, PARTS=AMAXES_OF_ROW, num_warps=warps,
    )  # fmt: skip
    launch(
        kernels.retranspose_kernel, (min(tiles, RETRANSPOSED_BY), 1, 1),
        x, words, one_scale, used, largest, programs, rows, cols, padded_rows, tiles, across,
        ROWS=tile.rows, COLS=tile.cols, AT_ONCE=min(AMAXES_AT_ONCE, power_of_two(programs)), num_warps=tile.warps,
    )  # fmt: skip


def _arguments(x: Tensor, adam: AdamStep) -> tuple[Tensor | Borrowed, ...]:
    """All but x are borrowed: gradients are gone after the step, and averages with their optimizer, so a recorded launch must
    not keep them alive."""
    found_inf = adam.step if adam.found_inf is None else adam.found_inf
    return x, *map(Borrowed, (adam.gradient, adam.average, adam.square, adam.step, adam.settings, found_inf))
