"""A step of Adam that writes a weight's codes with the weight: one read of it less than a cast of its own takes.

Axes:  R rows,  C columns of the weight. Weight, gradient and both averages are FP32 and lie alike, without gaps.
"""

import triton
import triton.language as tl

from loka.kernels.triton.cast_kernels import store_plain, write_tile
from loka.kernels.triton.codes import (
    inverse_of_power,
    magnitude,
    power_scale_of,
    wait_for_kernels_before,
)

# Where each of ``AdamStep.settings`` lies.
LR, DECAY, EPS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BETA1, REST1, LOG1 = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
BETA2, REST2, LOG2 = tl.constexpr(6), tl.constexpr(7), tl.constexpr(8)
TERMS = tl.constexpr(10)  # of a series that is cut off below FP32's last digit


@triton.jit
def _one_minus_power(log_beta, exponent):
    """1 − βᵗ for β just below 1, where a difference would lose most of its digits: by the series of eˣ − 1."""
    x = log_beta * exponent
    near = tl.maximum(x, -0.5)
    series = 1.0
    for term in tl.static_range(TERMS, 1, -1):
        series = 1.0 + series * near / term
    return tl.where(x > -0.5, -near * series, 1.0 - tl.exp(x))


@triton.jit
def _terms(step_ptr, settings_ptr):
    """Of every value's step: what the weight is multiplied by; the step's size, and ε, with the corrections of both averages in
    them; how much of each average stays, and how much comes to it."""
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
    if FOUND_INF:  # what was there is written again: a mask that the compiler does not know would be stored by fours no longer
        stays = tl.load(found_inf_ptr) != 0
        average, square = tl.where(stays, old_average, average), tl.where(stays, old_square, square)
        weight = tl.where(stays, old_weight, weight)
    tl.store(average_ptr + place, average, mask=inside)
    tl.store(square_ptr + place, square, mask=inside)
    tl.store(weight_ptr + place, weight, mask=inside)
    return weight


@triton.jit(do_not_specialize=["amaxes", "tiles_across"])
def adam_cast_kernel(
    weight_ptr, gradient_ptr, average_ptr, square_ptr, step_ptr, settings_ptr, found_inf_ptr,
    plain_ptr, plain_scale_ptr, trans_words_ptr, trans_scale_ptr, all_amax_ptr, amaxes, seen_all_ptr,
    rows, cols, plain_rows, plain_cols, trans_rows, trans_cols, tiles_across,
    ROWS: tl.constexpr, COLS: tl.constexpr, PLAIN: tl.constexpr, TRANS: tl.constexpr, SAME: tl.constexpr,
    ALL_AT_ONCE: tl.constexpr, ALIGNED: tl.constexpr, SEEN: tl.constexpr, FOUND_INF: tl.constexpr,
):  # fmt: skip
    """A tile a program, stepped, and written as ``cast_kernel`` with SEEN does it, by one scale for all."""
    wait_for_kernels_before()
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


@triton.jit
def adam_rowwise_kernel(
    weight_ptr, gradient_ptr, average_ptr, square_ptr, step_ptr, settings_ptr, found_inf_ptr,
    codes_ptr, scale_ptr, rows, cols, padded_rows, padded_cols,
    ROWS: tl.constexpr, COLS: tl.constexpr, FOUND_INF: tl.constexpr,
):  # fmt: skip
    """Rows, COLS at a time, stepped; then, while they are in the cache, written with a power of two for each row."""
    wait_for_kernels_before()
    terms = _terms(step_ptr, settings_ptr)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    amax_RC = tl.zeros((ROWS, COLS), tl.int32)
    for first in range(0, cols, COLS):
        x_RC = _step_tile(
            weight_ptr, gradient_ptr, average_ptr, square_ptr, found_inf_ptr, terms,
            row, first + tl.arange(0, COLS), rows, cols, FOUND_INF,
        )  # fmt: skip
        amax_RC = tl.maximum(amax_RC, magnitude(x_RC))
    scale_bits_R = power_scale_of(tl.max(amax_RC, axis=1))
    inverse_R = inverse_of_power(scale_bits_R)
    tl.debug_barrier()  # behind it, what other threads of the program have written is there
    for first in range(0, padded_cols, COLS):
        col = first + tl.arange(0, COLS)
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        x_RC = tl.load(weight_ptr + row.to(tl.int64)[:, None] * cols + col[None, :], mask=inside, other=0.0)
        store_plain(x_RC * inverse_R[:, None], row, col, codes_ptr, padded_rows, padded_cols)
    tl.store(scale_ptr + row, scale_bits_R.to(tl.float32, bitcast=True), mask=row < padded_rows)
