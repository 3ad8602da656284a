"""A step of Adam that writes a weight's codes along with the weight, and so saves the read that a separate cast would need.

Axes:  R rows,  C columns of the weight. Weight, gradient and both averages are FP32 and lie alike, without gaps.
"""

import triton
import triton.language as tl

from loka.kernels.triton.cast_kernels import load_tile, store_plain, write_tile
from loka.kernels.triton.codes import (
    inverse_of_power,
    largest_of,
    let_next_kernel_start,
    magnitude,
    power_scale_of,
    to_e4m3,
    to_e4m3_words,
    wait_for_kernels_before,
)

# Where each of ``AdamStep.settings`` lies.
LR, DECAY, EPS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BETA1, REST1, LOG1 = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
BETA2, REST2, LOG2 = tl.constexpr(6), tl.constexpr(7), tl.constexpr(8)
TERMS = tl.constexpr(10)  # of a series that is cut off below FP32's last digit


@triton.jit
def _one_minus_power(log_beta, exponent):
    """1 − βᵗ, where that is small by the series of eˣ − 1: for β just below 1 the difference would lose most of its digits."""
    x = log_beta * exponent
    near = tl.maximum(x, -0.5)
    series = 1.0
    for term in tl.static_range(TERMS, 1, -1):
        series = 1.0 + series * near / term
    return tl.where(x > -0.5, -near * series, 1.0 - tl.exp(x))


@triton.jit
def _terms(step_ptr, settings_ptr):
    """What every value's step uses: the factor on the weight; the step size and ε, both with the averages' bias corrections in
    them; and for each average, how much of it stays and how much of the new value is added."""
    step, lr = tl.load(step_ptr), tl.load(settings_ptr + LR)
    kept = 1.0 - lr * tl.load(settings_ptr + DECAY)
    root = tl.sqrt(_one_minus_power(tl.load(settings_ptr + LOG2), step))
    size = lr * root / _one_minus_power(tl.load(settings_ptr + LOG1), step)
    eps = tl.load(settings_ptr + EPS) * root
    beta1, rest1 = tl.load(settings_ptr + BETA1), tl.load(settings_ptr + REST1)
    beta2, rest2 = tl.load(settings_ptr + BETA2), tl.load(settings_ptr + REST2)
    return kept, size, eps, beta1, rest1, beta2, rest2


@triton.jit
def _step_tile(
    weight_ptr, gradient_ptr, average_ptr, square_ptr, found_inf_ptr, terms, row, col, rows, cols, FOUND_INF: tl.constexpr
):  # fmt: skip
    """The weight after the step, 0 past its edge."""
    kept, size, eps, beta1, rest1, beta2, rest2 = terms
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    place = row.to(tl.int64)[:, None] * cols + col[None, :]
    gradient = tl.load(gradient_ptr + place, mask=inside, other=0.0)
    old_average = tl.load(average_ptr + place, mask=inside, other=0.0)
    old_square = tl.load(square_ptr + place, mask=inside, other=0.0)
    old_weight = tl.load(weight_ptr + place, mask=inside, other=0.0)
    average = beta1 * old_average + rest1 * gradient
    square = beta2 * old_square + rest2 * gradient * gradient
    weight = kept * old_weight - size * average / (tl.sqrt(square) + eps)
    if FOUND_INF:  # the old values are written again: under a mask that is unknown to the compiler it would not store by fours
        stays = tl.load(found_inf_ptr) != 0
        average, square = tl.where(stays, old_average, average), tl.where(stays, old_square, square)
        weight = tl.where(stays, old_weight, weight)
    tl.store(average_ptr + place, average, mask=inside)
    tl.store(square_ptr + place, square, mask=inside)
    tl.store(weight_ptr + place, weight, mask=inside)
    return tl.where(inside, weight, 0.0)  # outside it is 0/0 if ε is 0


@triton.jit(do_not_specialize=["amaxes", "tiles_across"])
def adam_cast_kernel(
    weight_ptr, gradient_ptr, average_ptr, square_ptr, step_ptr, settings_ptr, found_inf_ptr,
    plain_ptr, plain_scale_ptr, trans_words_ptr, trans_scale_ptr, all_amax_ptr, amaxes, seen_all_ptr,
    rows, cols, plain_rows, plain_cols, trans_rows, trans_cols, tiles_across,
    ROWS: tl.constexpr, COLS: tl.constexpr, PLAIN: tl.constexpr, TRANS: tl.constexpr, SAME: tl.constexpr,
    ALL_AT_ONCE: tl.constexpr, ALIGNED: tl.constexpr, SEEN: tl.constexpr, FOUND_INF: tl.constexpr, FOURS: tl.constexpr,
):  # fmt: skip
    """Each program steps one tile and writes it as ``cast_kernel`` does with SEEN, by one scale for all. FOURS: rows begin at
    multiples of 16 bytes, which the compiler finds out by itself for multiples of 16 columns only."""
    wait_for_kernels_before()
    cols = cols // 4 * 4 if FOURS else cols
    terms = _terms(step_ptr, settings_ptr)
    tile = tl.program_id(0)
    row = tile // tiles_across * ROWS + 4 * tl.arange(0, ROWS // 4)
    col = tile % tiles_across * COLS + tl.arange(0, COLS)
    x0 = _step_tile(
        weight_ptr, gradient_ptr, average_ptr, square_ptr, found_inf_ptr, terms, row, col, rows, cols, FOUND_INF
    )  # fmt: skip
    x1 = _step_tile(
        weight_ptr, gradient_ptr, average_ptr, square_ptr, found_inf_ptr, terms, row + 1, col, rows, cols, FOUND_INF
    )  # fmt: skip
    x2 = _step_tile(
        weight_ptr, gradient_ptr, average_ptr, square_ptr, found_inf_ptr, terms, row + 2, col, rows, cols, FOUND_INF
    )  # fmt: skip
    x3 = _step_tile(
        weight_ptr, gradient_ptr, average_ptr, square_ptr, found_inf_ptr, terms, row + 3, col, rows, cols, FOUND_INF
    )  # fmt: skip
    write_tile(
        x0, x1, x2, x3, tile, plain_ptr, plain_scale_ptr, trans_words_ptr, trans_scale_ptr,
        all_amax_ptr, all_amax_ptr, all_amax_ptr, amaxes, all_amax_ptr, all_amax_ptr, seen_all_ptr, all_amax_ptr,
        rows, cols, plain_rows, plain_cols, trans_rows, trans_cols, 1.0, 1.0, tiles_across,
        ROWS, COLS, PLAIN, TRANS, SAME, ALL_AT_ONCE, ALIGNED, SEEN, 0, 4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tiles_across"])
def adam_by_rows_kernel(
    weight_ptr, gradient_ptr, average_ptr, square_ptr, step_ptr, settings_ptr, found_inf_ptr,
    codes_ptr, scale_ptr, words_ptr, one_scale_ptr, amax_ptr, used_ptr,
    rows, cols, padded_rows, padded_cols, tiles_across,
    ROWS: tl.constexpr, COLS: tl.constexpr, FOUND_INF: tl.constexpr, FOURS: tl.constexpr,
):  # fmt: skip
    """Each program steps one tile and writes it by the scales from before the step: as it lies by those of its rows, transposed
    by the one for all. That one is noted as the one used, and so are the amaxes of the tile's part of each row (tiles across ×
    rows). FOURS: as in ``adam_cast_kernel``."""
    wait_for_kernels_before()
    cols = cols // 4 * 4 if FOURS else cols
    terms = _terms(step_ptr, settings_ptr)
    tile_R, tile_C = tl.program_id(0) // tiles_across, tl.program_id(0) % tiles_across
    quad = tile_R * (ROWS // 4) + tl.arange(0, ROWS // 4)
    col = tile_C * COLS + tl.arange(0, COLS)
    x0 = _step_tile(
        weight_ptr, gradient_ptr, average_ptr, square_ptr, found_inf_ptr, terms, 4 * quad, col, rows, cols, FOUND_INF
    )  # fmt: skip
    x1 = _step_tile(
        weight_ptr, gradient_ptr, average_ptr, square_ptr, found_inf_ptr, terms, 4 * quad + 1, col, rows, cols, FOUND_INF
    )  # fmt: skip
    x2 = _step_tile(
        weight_ptr, gradient_ptr, average_ptr, square_ptr, found_inf_ptr, terms, 4 * quad + 2, col, rows, cols, FOUND_INF
    )  # fmt: skip
    x3 = _step_tile(
        weight_ptr, gradient_ptr, average_ptr, square_ptr, found_inf_ptr, terms, 4 * quad + 3, col, rows, cols, FOUND_INF
    )  # fmt: skip
    one_bits = tl.load(one_scale_ptr).to(tl.int32, bitcast=True)
    if tl.program_id(0) == 0:
        tl.store(used_ptr, one_bits)
    _store_transposed(x0, x1, x2, x3, one_bits, quad, col, words_ptr, cols, padded_rows)
    for j in tl.static_range(4):
        x_QC = x0 if j == 0 else x1 if j == 1 else x2 if j == 2 else x3
        row = 4 * quad + j
        bits_Q = tl.load(scale_ptr + row, mask=row < rows, other=0.0).to(tl.int32, bitcast=True)
        store_plain(x_QC * inverse_of_power(bits_Q)[:, None], row, col, codes_ptr, rows, padded_cols)
        tl.store(amax_ptr + tile_C.to(tl.int64) * rows + row, tl.max(magnitude(x_QC), axis=1), mask=row < rows)


@triton.jit
def _store_transposed(x0, x1, x2, x3, one_bits, quad, col, words_ptr, cols, padded_rows):
    """Four tiles of every fourth row each, transposed, by one power of two for all: four codes of a column are one word."""
    inverse = inverse_of_power(one_bits)
    words_QC = to_e4m3_words(x0 * inverse, x1 * inverse, x2 * inverse, x3 * inverse)
    words = tl.multiple_of(padded_rows // 4, 4)
    inside = (col < cols)[:, None] & (quad < words)[None, :]
    tl.store(words_ptr + col.to(tl.int64)[:, None] * words + quad[None, :], tl.trans(words_QC), mask=inside)


@triton.jit(do_not_specialize=["parts"])
def rescale_rows_kernel(
    weight_ptr, codes_ptr, scale_ptr, amax_ptr, largest_ptr, rows, cols, padded_cols, parts,
    ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write again the rows that need another power of two by their ``parts`` amaxes; note the largest power of each program."""
    let_next_kernel_start()
    wait_for_kernels_before()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    amax_PR = tl.zeros((PARTS, ROWS), tl.int32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        inside = (part < parts)[:, None] & (row < rows)[None, :]
        place = amax_ptr + part.to(tl.int64)[:, None] * rows + row[None, :]
        amax_PR = tl.maximum(amax_PR, tl.load(place, mask=inside, other=0))
    new_R = power_scale_of(tl.max(amax_PR, axis=0))
    old_R = tl.load(scale_ptr + row, mask=row < rows, other=0.0).to(tl.int32, bitcast=True)
    tl.store(largest_ptr + tl.program_id(0), tl.max(tl.where(row < rows, new_R, 0), axis=0))
    is_other_R = (row < rows) & (new_R != old_R)
    if tl.max(is_other_R.to(tl.int32), axis=0) > 0:
        for first in range(0, padded_cols, COLS):
            col = first + tl.arange(0, COLS)
            read = is_other_R[:, None] & (col < cols)[None, :]
            x_RC = tl.load(weight_ptr + row.to(tl.int64)[:, None] * cols + col[None, :], mask=read, other=0.0)
            place = codes_ptr + row.to(tl.int64)[:, None] * padded_cols + col[None, :]
            codes_RC = to_e4m3(x_RC * inverse_of_power(new_R)[:, None])
            tl.store(place, codes_RC, mask=is_other_R[:, None] & (col < padded_cols)[None, :])
        tl.store(scale_ptr + row, new_R.to(tl.float32, bitcast=True), mask=is_other_R)


@triton.jit(do_not_specialize=["largests", "tiles", "tiles_across"])
def retranspose_kernel(
    weight_ptr, words_ptr, one_scale_ptr, used_ptr, largest_ptr, largests, rows, cols, padded_rows, tiles, tiles_across,
    ROWS: tl.constexpr, COLS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Write the transpose again, if the largest power of all rows is not the one that was used. It mostly is, so few programs
    are launched."""
    wait_for_kernels_before()
    one_bits = largest_of(largest_ptr, largests, AT_ONCE)
    if one_bits == tl.load(used_ptr):
        return
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1):
        quad = tile // tiles_across * (ROWS // 4) + tl.arange(0, ROWS // 4)
        col = tile % tiles_across * COLS + tl.arange(0, COLS)
        x0 = load_tile(weight_ptr, 4 * quad, col, rows, cols, cols)
        x1 = load_tile(weight_ptr, 4 * quad + 1, col, rows, cols, cols)
        x2 = load_tile(weight_ptr, 4 * quad + 2, col, rows, cols, cols)
        x3 = load_tile(weight_ptr, 4 * quad + 3, col, rows, cols, cols)
        _store_transposed(x0, x1, x2, x3, one_bits, quad, col, words_ptr, cols, padded_rows)
    if tl.program_id(0) == 0:
        tl.store(one_scale_ptr, one_bits.to(tl.float32, bitcast=True))
