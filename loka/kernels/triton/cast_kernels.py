"""Casting a matrix to e4m3: codes in its own order of axes ("plain"), transposed, or both.

Axes:  R rows,  C columns of the stored matrix.  Loads past its edge give 0, so padding is written as zeros and a scale of
padding alone is 1. Amaxes travel as the bits of ``fp8.magnitude``.
"""

import triton
import triton.language as tl

from loka.kernels.triton.fp8 import divide, magnitude, scale_of, to_e4m3


@triton.jit
def _load_tile(x_ptr, row, col, rows, cols, row_stride):
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    return tl.load(x_ptr + row.to(tl.int64)[:, None] * row_stride + col[None, :], mask=inside, other=0.0)


@triton.jit
def amax_kernel(
    x_ptr, row_amax_ptr, col_amax_ptr, all_amax_ptr,
    rows, cols, row_stride, tiles_down,
    ROWS: tl.constexpr, COLS: tl.constexpr, OF_ROWS: tl.constexpr, OF_COLS: tl.constexpr, OF_ALL: tl.constexpr,
):  # fmt: skip
    """Raises the amaxes of rows, of columns and of all (from 0) to those of one strip of ``tiles_down`` tiles.

    A maximum is the same in whatever order programs get to it.
    """
    row_strip, col_strip = tl.program_id(0) // tl.cdiv(cols, COLS), tl.program_id(0) % tl.cdiv(cols, COLS)
    col = col_strip * COLS + tl.arange(0, COLS)
    col_amax = tl.zeros((COLS,), tl.int32)
    for tile in range(tiles_down):
        row = (row_strip * tiles_down + tile) * ROWS + tl.arange(0, ROWS)
        bits = magnitude(_load_tile(x_ptr, row, col, rows, cols, row_stride))
        if OF_ROWS:
            tl.atomic_max(row_amax_ptr + row, tl.max(bits, axis=1), mask=row < rows, sem="relaxed")
        col_amax = tl.maximum(col_amax, tl.max(bits, axis=0))
    if OF_COLS:
        tl.atomic_max(col_amax_ptr + col, col_amax, mask=col < cols, sem="relaxed")
    if OF_ALL:
        tl.atomic_max(all_amax_ptr, tl.max(col_amax, axis=0), sem="relaxed")


@triton.jit
def _scales(
    bits_AB, index_A, size_A, amax_A_ptr, all_amax_ptr, static_scale, A: tl.constexpr, SCALING: tl.constexpr
):  # fmt: skip
    """The scale of each entry of axis A of a tile, axis B being contracted."""
    if SCALING == "static":
        return tl.zeros((A,), tl.float32) + static_scale
    elif SCALING == "tensorwise":
        return scale_of(tl.zeros((A,), tl.int32) + tl.load(all_amax_ptr))
    elif SCALING == "rowwise":
        return scale_of(tl.load(amax_A_ptr + index_A, mask=index_A < size_A, other=0))
    elif SCALING == "1x128":
        return scale_of(tl.max(bits_AB, axis=1))
    else:
        tl.static_assert(SCALING == "128x128")
        return scale_of(tl.zeros((A,), tl.int32) + tl.max(tl.max(bits_AB, axis=1), axis=0))


@triton.jit
def _store_codes(
    x_AB, scale_A, index_A, index_B, tile_A, tile_B, codes_ptr, scale_ptr, size_A, size_B, SCALING: tl.constexpr
):  # fmt: skip
    """Codes of a tile (A outer, B contracted; sizes with padding), and its scales, each written by one program."""
    value_AB = x_AB.to(tl.float32)
    scaled_AB = divide(value_AB, scale_A[:, None], tl.div_rn(1.0, scale_A)[:, None])
    if SCALING == "static":  # a scale from an amax has made NaN of everything beside an infinity; this one has not
        scaled_AB = tl.where(tl.abs(value_AB) == float("inf"), float("nan"), scaled_AB)
    inside = (index_A < size_A)[:, None] & (index_B < size_B)[None, :]
    tl.store(codes_ptr + index_A.to(tl.int64)[:, None] * size_B + index_B[None, :], to_e4m3(scaled_AB), mask=inside)
    if SCALING == "rowwise":
        tl.store(scale_ptr + index_A, scale_A, mask=(index_A < size_A) & (tile_B == 0))
    elif SCALING == "1x128":  # the outer axis contiguous, as cuBLAS reads them
        tl.store(scale_ptr + tile_B.to(tl.int64) * size_A + index_A, scale_A, mask=(index_A < size_A) & (tile_B * 128 < size_B))
    else:  # all of scale_A is one number, and its first lane writes it
        first_lane = tl.arange(0, scale_A.shape[0]) == 0
        if SCALING == "128x128":
            blocks_B = tl.cdiv(size_B, 128)
            within = (tile_A * 128 < size_A) & (tile_B < blocks_B)
            tl.store(scale_ptr + tile_A * blocks_B + tile_B + 0 * index_A, scale_A, mask=first_lane & within)
        else:
            tl.store(scale_ptr + 0 * index_A, scale_A, mask=first_lane & (tile_A == 0) & (tile_B == 0))


@triton.jit
def cast_kernel(
    x_ptr, plain_ptr, plain_scale_ptr, trans_ptr, trans_scale_ptr, row_amax_ptr, col_amax_ptr, all_amax_ptr,
    rows, cols, row_stride, plain_rows, plain_cols, trans_rows, trans_cols,
    plain_static, trans_static, tiles_across,
    ROWS: tl.constexpr, COLS: tl.constexpr, PLAIN: tl.constexpr, TRANS: tl.constexpr,
):  # fmt: skip
    """One tile, read once, written as codes of the scalings PLAIN and TRANS ("none": not written)."""
    tile_R, tile_C = tl.program_id(0) // tiles_across, tl.program_id(0) % tiles_across
    row = tile_R * ROWS + tl.arange(0, ROWS)
    col = tile_C * COLS + tl.arange(0, COLS)
    x_RC = _load_tile(x_ptr, row, col, rows, cols, row_stride)
    bits_RC = magnitude(x_RC)
    if PLAIN != "none":
        scale_R = _scales(bits_RC, row, rows, row_amax_ptr, all_amax_ptr, plain_static, ROWS, PLAIN)
        _store_codes(x_RC, scale_R, row, col, tile_R, tile_C, plain_ptr, plain_scale_ptr, plain_rows, plain_cols, PLAIN)
    if TRANS != "none":
        bits_CR, x_CR = tl.trans(bits_RC), tl.trans(x_RC)
        scale_C = _scales(bits_CR, col, cols, col_amax_ptr, all_amax_ptr, trans_static, COLS, TRANS)
        _store_codes(x_CR, scale_C, col, row, tile_C, tile_R, trans_ptr, trans_scale_ptr, trans_rows, trans_cols, TRANS)


@triton.jit
def rowwise_kernel(
    x_ptr, codes_ptr, scale_ptr, rows, cols, row_stride, padded_rows, padded_cols, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Row scales and codes of whole rows, in one read."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    x_RC = _load_tile(x_ptr, row, col, rows, cols, row_stride)
    scale_R = scale_of(tl.max(magnitude(x_RC), axis=1))
    _store_codes(x_RC, scale_R, row, col, 0, 0, codes_ptr, scale_ptr, padded_rows, padded_cols, "rowwise")
