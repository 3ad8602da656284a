"""Casting a matrix to e4m3: codes in its own order of axes ("plain"), transposed, or both; and its rows to int8.

Axes:  R rows,  C columns of the stored matrix.  Loads past its edge give 0, so padding is written as zeros and a scale of
padding alone is 1. Amaxes travel as the bits of ``codes.magnitude``.

Kernels of one cast read the same matrix, and only the first has to wait for it. MORE: another kernel of the same cast follows,
and may start once all programs of this one have. EARLY: a kernel of the same cast with MORE came before this one. So the matrix
is there, and is read before this one waits for the other's results, or for its end.
"""

import triton
import triton.language as tl

from loka.kernels.triton.codes import (
    E4M3_MAX,
    INFINITY_BITS,
    INT8_MAX,
    divide,
    inverse_of_power,
    largest_of,
    let_next_kernel_start,
    magnitude,
    power_scale_of,
    scale_of,
    to_e4m3,
    to_e4m3_words,
    to_int8,
    wait_for_kernels_before,
)

FLAGS_AT_ONCE = tl.constexpr(32)
LARGEST = tl.constexpr(1.5e38)  # an amax that can still be doubled


@triton.jit
def load_tile(x_ptr, row, col, rows, cols, row_stride):
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    return tl.load(x_ptr + row.to(tl.int64)[:, None] * row_stride + col[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["tiles_down"])
def amax_kernel(
    x_ptr, row_amax_ptr, col_amax_ptr, all_amax_ptr,
    rows, cols, row_stride, tiles_down,
    ROWS: tl.constexpr, COLS: tl.constexpr, OF_ROWS: tl.constexpr, OF_COLS: tl.constexpr, OF_ALL: tl.constexpr,
    ONE_TILE: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """The amaxes of rows (strips of columns × rows), of columns (strips of rows × columns) and of all of it (one a program)
    within a program's strip of ``tiles_down`` tiles. The tiles of the strips take turns down the matrix, so that all programs
    reach its end together.

    For amaxes of columns a tile is as wide as the program's warps, so that a column lies in one thread: if several warps shared
    it, they would combine theirs in shared memory, 32 lanes to a bank. Each amax has a place of its own, which need not be set
    to 0 first. ONE_TILE: a strip is one tile, so nothing is loaded ahead.
    """
    wait_for_kernels_before()
    if MORE:
        let_next_kernel_start()
    col_strips = tl.cdiv(cols, COLS)
    row_strip, col_strip = tl.program_id(0) // col_strips, tl.program_id(0) % col_strips
    row_strips = tl.num_programs(0) // col_strips
    col = col_strip * COLS + tl.arange(0, COLS)
    amax = tl.zeros((COLS,), tl.int32) if OF_COLS else tl.zeros((ROWS, COLS), tl.int32)
    for tile in tl.range(1 if ONE_TILE else tiles_down, num_stages=3):
        row = (tile * row_strips + row_strip) * ROWS + tl.arange(0, ROWS)
        bits_RC = magnitude(load_tile(x_ptr, row, col, rows, cols, row_stride))
        if OF_ROWS:
            tl.store(row_amax_ptr + col_strip.to(tl.int64) * rows + row, tl.max(bits_RC, axis=1), mask=row < rows)
        amax = tl.maximum(amax, tl.max(bits_RC, axis=0) if OF_COLS else bits_RC)
    if OF_COLS:
        tl.store(col_amax_ptr + row_strip.to(tl.int64) * cols + col, amax, mask=col < cols)
    if OF_ALL:
        tl.store(all_amax_ptr + tl.program_id(0), tl.max(amax))


@triton.jit
def _scales(
    tile_amax_A, index_A, size_A, amax_A_ptr, all_amax, static_scale, A: tl.constexpr, SCALING: tl.constexpr
):  # fmt: skip
    """The scale of each entry of a tile's outer axis A. ``tile_amax_A`` is the tile's amax, of each entry or of all at once."""
    if SCALING == "static":
        return tl.zeros((A,), tl.float32) + static_scale
    elif SCALING == "tensorwise":
        return scale_of(tl.zeros((A,), tl.int32) + all_amax)
    elif SCALING == "rowwise":
        return scale_of(tl.load(amax_A_ptr + index_A, mask=index_A < size_A, other=0))
    else:
        tl.static_assert(SCALING == "1x128" or SCALING == "128x128")
        return scale_of(tile_amax_A)


@triton.jit
def _scaled(x, scale, OWN: tl.constexpr):
    """x / scale; both have the tile's shape, or axes of length 1. OWN: the scale is of x's own amax."""
    value = x.to(tl.float32)
    scaled = divide(value, scale, tl.div_rn(1.0, scale))
    if not OWN:  # beside an infinity x's own scale is NaN, but another may be finite
        scaled = tl.where(tl.abs(value) == float("inf"), float("nan"), scaled)
    return scaled


@triton.jit
def store_plain(scaled_RC, row, col, codes_ptr, rows, cols):
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    place = codes_ptr + row.to(tl.int64)[:, None] * cols + col[None, :]
    if codes_ptr.dtype.element_ty == tl.int8:
        tl.store(place, to_int8(scaled_RC), mask=inside)
    else:
        tl.store(place, to_e4m3(scaled_RC), mask=inside)


@triton.jit
def _store_scales(scale_A, index_A, tile_A, tile_B, scale_ptr, size_A, size_B, SCALING: tl.constexpr):
    """The scales of a tile (A outer, B contracted; sizes with padding), each written by one program."""
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
def _cast_tile(
    tile, x_ptr, plain_ptr, plain_scale_ptr, trans_words_ptr, trans_scale_ptr, row_amax_ptr, col_amax_ptr, all_amax_ptr, amaxes,
    seen_rows_ptr, seen_cols_ptr, seen_all_ptr, sums_ptr,
    rows, cols, row_stride, plain_rows, plain_cols, trans_rows, trans_cols,
    plain_static, trans_static, tiles_across,
    ROWS: tl.constexpr, COLS: tl.constexpr, PLAIN: tl.constexpr, TRANS: tl.constexpr, SAME: tl.constexpr,
    ALL_AT_ONCE: tl.constexpr, ALIGNED: tl.constexpr, SEEN: tl.constexpr, SUMS: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """One tile, read once, as four tiles of every fourth row. WAIT: the tile is there already, amaxes only after waiting."""
    quad = tile // tiles_across * (ROWS // 4) + tl.arange(0, ROWS // 4)
    col = tile % tiles_across * COLS + tl.arange(0, COLS)
    x0 = load_tile(x_ptr, 4 * quad, col, rows, cols, row_stride)
    x1 = load_tile(x_ptr, 4 * quad + 1, col, rows, cols, row_stride)
    x2 = load_tile(x_ptr, 4 * quad + 2, col, rows, cols, row_stride)
    x3 = load_tile(x_ptr, 4 * quad + 3, col, rows, cols, row_stride)
    if WAIT:
        wait_for_kernels_before()
    write_tile(
        x0, x1, x2, x3, tile, plain_ptr, plain_scale_ptr, trans_words_ptr, trans_scale_ptr,
        row_amax_ptr, col_amax_ptr, all_amax_ptr, amaxes, seen_rows_ptr, seen_cols_ptr, seen_all_ptr, sums_ptr,
        rows, cols, plain_rows, plain_cols, trans_rows, trans_cols, plain_static, trans_static, tiles_across,
        ROWS, COLS, PLAIN, TRANS, SAME, ALL_AT_ONCE, ALIGNED, SEEN, SUMS,
        16 // (x_ptr.dtype.element_ty.primitive_bitwidth // 8),
    )  # fmt: skip


@triton.jit
def write_tile(
    x0, x1, x2, x3, tile, plain_ptr, plain_scale_ptr, trans_words_ptr, trans_scale_ptr,
    row_amax_ptr, col_amax_ptr, all_amax_ptr, amaxes, seen_rows_ptr, seen_cols_ptr, seen_all_ptr, sums_ptr,
    rows, cols, plain_rows, plain_cols, trans_rows, trans_cols, plain_static, trans_static, tiles_across,
    ROWS: tl.constexpr, COLS: tl.constexpr, PLAIN: tl.constexpr, TRANS: tl.constexpr, SAME: tl.constexpr,
    ALL_AT_ONCE: tl.constexpr, ALIGNED: tl.constexpr, SEEN: tl.constexpr, SUMS: tl.constexpr, OF_LOAD: tl.constexpr,
):  # fmt: skip
    """Write four tiles of every fourth row, as ``cast_kernel`` says. So four codes of one column meet in one thread, and are
    one word of the transpose. A thread has loaded OF_LOAD values of a row at once."""
    tile_R, tile_C = tile // tiles_across, tile % tiles_across
    QUADS: tl.constexpr = ROWS // 4
    quad = tile_R * QUADS + tl.arange(0, QUADS)
    col = tile_C * COLS + tl.arange(0, COLS)
    bits_QC = tl.maximum(tl.maximum(magnitude(x0), magnitude(x1)), tl.maximum(magnitude(x2), magnitude(x3)))
    if SEEN:
        if TRANS == "rowwise":
            tl.atomic_max(seen_cols_ptr + col, tl.max(bits_QC, axis=0), mask=col < cols, sem="relaxed")
        if PLAIN == "tensorwise" or TRANS == "tensorwise":
            tl.atomic_max(seen_all_ptr + tile % SEEN, tl.max(bits_QC), sem="relaxed")
    all_amax = 0
    if PLAIN == "tensorwise" or TRANS == "tensorwise":
        all_amax = largest_of(all_amax_ptr, amaxes, ALL_AT_ONCE)
    if SUMS:
        sum_QC = x0.to(tl.float32) + x1.to(tl.float32) + (x2.to(tl.float32) + x3.to(tl.float32))
        ROWS_OF_WARP: tl.constexpr = 32 * OF_LOAD // COLS
        sum_QC = tl.reshape(sum_QC, (QUADS // (SUMS * ROWS_OF_WARP), SUMS, ROWS_OF_WARP, COLS))
        strip = tile_R * SUMS + tl.arange(0, SUMS)
        place = sums_ptr + strip.to(tl.int64)[:, None] * cols + col[None, :]
        tl.store(place, tl.sum(tl.sum(sum_QC, axis=2), axis=0), mask=(col < cols)[None, :])
    square_amax = tl.max(bits_QC) if PLAIN == "128x128" or TRANS == "128x128" else 0
    if TRANS != "none":
        amax_C = tl.max(bits_QC, axis=0) if TRANS == "1x128" else tl.zeros((COLS,), tl.int32) + square_amax
        scale_C = _scales(amax_C, col, cols, col_amax_ptr, all_amax, trans_static, COLS, TRANS)
        _store_scales(scale_C, col, tile_C, tile_R, trans_scale_ptr, trans_rows, trans_cols, TRANS)
        OWN_C: tl.constexpr = (TRANS != "static") and not SEEN  # pyrefly: ignore[bad-assignment]
        scaled0, scaled1 = _scaled(x0, scale_C[None, :], OWN_C), _scaled(x1, scale_C[None, :], OWN_C)
        scaled2, scaled3 = _scaled(x2, scale_C[None, :], OWN_C), _scaled(x3, scale_C[None, :], OWN_C)
        words = tl.multiple_of(trans_cols // 4, 4) if ALIGNED else trans_cols // 4
        inside = (col < trans_rows)[:, None] & (quad < words)[None, :]
        place = trans_words_ptr + col.to(tl.int64)[:, None] * words + quad[None, :]
        tl.store(place, tl.trans(to_e4m3_words(scaled0, scaled1, scaled2, scaled3)), mask=inside)
    if PLAIN != "none":
        for j in tl.static_range(4):
            x_QC = x0 if j == 0 else x1 if j == 1 else x2 if j == 2 else x3
            row = 4 * quad + j
            if SEEN and PLAIN == "rowwise":
                tl.atomic_max(seen_rows_ptr + row, tl.max(magnitude(x_QC), axis=1), mask=row < rows, sem="relaxed")
            amax_Q = tl.max(magnitude(x_QC), axis=1) if PLAIN == "1x128" else tl.zeros((QUADS,), tl.int32) + square_amax
            scale_Q = _scales(amax_Q, row, rows, row_amax_ptr, all_amax, plain_static, QUADS, PLAIN)
            _store_scales(scale_Q, row, tile_R, tile_C, plain_scale_ptr, plain_rows, plain_cols, PLAIN)
            if SAME:
                scaled_QC = scaled0 if j == 0 else scaled1 if j == 1 else scaled2 if j == 2 else scaled3
            else:
                scaled_QC = _scaled(x_QC, scale_Q[:, None], PLAIN != "static" and not SEEN)
            store_plain(scaled_QC, row, col, plain_ptr, plain_rows, plain_cols)


@triton.jit(do_not_specialize=["amaxes", "flags", "tiles", "tiles_across"])
def cast_kernel(
    x_ptr, plain_ptr, plain_scale_ptr, trans_words_ptr, trans_scale_ptr, row_amax_ptr, col_amax_ptr, all_amax_ptr, amaxes,
    seen_rows_ptr, seen_cols_ptr, seen_all_ptr, sums_ptr, outgrown_ptr, flags,
    rows, cols, row_stride, plain_rows, plain_cols, trans_rows, trans_cols,
    plain_static, trans_static, tiles, tiles_across,
    ROWS: tl.constexpr, COLS: tl.constexpr, PLAIN: tl.constexpr, TRANS: tl.constexpr, SAME: tl.constexpr,
    ALL_AT_ONCE: tl.constexpr, ALIGNED: tl.constexpr, SEEN: tl.constexpr, SUMS: tl.constexpr, IF_OUTGROWN: tl.constexpr,
    EARLY: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """A tile a program (several with IF_OUTGROWN), written as codes of the scalings PLAIN and TRANS ("none": not written).

    One scale for all comes from the largest of ``amaxes`` values, ALL_AT_ONCE of which are read at once. SAME: both forms have
    the same scales, so one division serves them. ALIGNED: transposed rows begin at multiples of 16 bytes, which the compiler
    does not find out through a division. SEEN: the amaxes that the scalings are made from are raised (from 0) to the tile's
    own, that of all in SEEN places, lest all programs wait for one. SUMS: that many warps each sum the columns of their own
    rows, so that they need not meet. IF_OUTGROWN: only if one of ``flags`` values is raised there is anything to do; since
    mostly none is, programs are few. After a pass for amaxes tiles come in the opposite order: what that pass read last is
    still cached.
    """
    FROM_AMAXES: tl.constexpr = PLAIN == "tensorwise" or TRANS == "tensorwise" or PLAIN == "rowwise" or TRANS == "rowwise"
    tl.static_assert(not (EARLY and IF_OUTGROWN))
    if not EARLY:
        wait_for_kernels_before()
    if MORE:
        let_next_kernel_start()
    if IF_OUTGROWN:
        if largest_of(outgrown_ptr, flags, FLAGS_AT_ONCE) == 0:
            return
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1):
            _cast_tile(
                tile, x_ptr, plain_ptr, plain_scale_ptr, trans_words_ptr, trans_scale_ptr,
                row_amax_ptr, col_amax_ptr, all_amax_ptr, amaxes, seen_rows_ptr, seen_cols_ptr, seen_all_ptr, sums_ptr,
                rows, cols, row_stride, plain_rows, plain_cols, trans_rows, trans_cols,
                plain_static, trans_static, tiles_across,
                ROWS, COLS, PLAIN, TRANS, SAME, ALL_AT_ONCE, ALIGNED, SEEN, SUMS, False,
            )  # fmt: skip
    else:
        _cast_tile(
            tiles - 1 - tl.program_id(0) if FROM_AMAXES and not SEEN else tl.program_id(0),
            x_ptr, plain_ptr, plain_scale_ptr, trans_words_ptr, trans_scale_ptr,
            row_amax_ptr, col_amax_ptr, all_amax_ptr, amaxes, seen_rows_ptr, seen_cols_ptr, seen_all_ptr, sums_ptr,
            rows, cols, row_stride, plain_rows, plain_cols, trans_rows, trans_cols,
            plain_static, trans_static, tiles_across,
            ROWS, COLS, PLAIN, TRANS, SAME, ALL_AT_ONCE, ALIGNED, SEEN, SUMS, EARLY and FROM_AMAXES,
        )  # fmt: skip
    if EARLY and not FROM_AMAXES:
        wait_for_kernels_before()


@triton.jit
def rowwise_kernel(
    x_ptr, codes_ptr, scale_ptr, amax_ptr, rows, cols, row_stride, padded_rows, padded_cols,
    ROWS: tl.constexpr, COLS: tl.constexpr, NOTED: tl.constexpr, POWER: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """A scale for each of ROWS whole rows, and their codes in the format of ``codes_ptr``, in one read.

    NOTED: the program's largest amax is written too. POWER: scales are powers of two.
    """
    wait_for_kernels_before()
    if MORE:
        let_next_kernel_start()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    x_RC = load_tile(x_ptr, row, col, rows, cols, row_stride)
    LARGEST_CODE: tl.constexpr = INT8_MAX if codes_ptr.dtype.element_ty == tl.int8 else E4M3_MAX
    amax_R = tl.max(magnitude(x_RC), axis=1)
    if NOTED:
        tl.store(amax_ptr + tl.program_id(0), tl.max(amax_R, axis=0))
    if POWER:
        tl.static_assert(LARGEST_CODE == E4M3_MAX)
        scale_bits_R = power_scale_of(amax_R)
        scaled_RC = x_RC.to(tl.float32) * inverse_of_power(scale_bits_R)[:, None]
        scale_R = scale_bits_R.to(tl.float32, bitcast=True)
    else:
        scale_R = scale_of(amax_R, LARGEST_CODE)
        scaled_RC = _scaled(x_RC, scale_R[:, None], True)
    store_plain(scaled_RC, row, col, codes_ptr, padded_rows, padded_cols)
    tl.store(scale_ptr + row, scale_R, mask=row < padded_rows)


@triton.jit(do_not_specialize=["count"])
def largest_kernel(bits_ptr, largest_ptr, count, AT_ONCE: tl.constexpr):
    """The largest of ``count`` magnitudes, by one program."""
    let_next_kernel_start()
    wait_for_kernels_before()
    tl.store(largest_ptr, largest_of(bits_ptr, count, AT_ONCE))


@triton.jit(do_not_specialize=["strips"])
def over_strips_kernel(strips_ptr, result_ptr, strips, size, STRIPS: tl.constexpr, LENGTH: tl.constexpr, SUM: tl.constexpr):
    """The largest magnitude over all ``strips``, or with SUM their sum, for LENGTH of ``size`` rows or columns."""
    let_next_kernel_start()
    wait_for_kernels_before()
    index = tl.program_id(0) * LENGTH + tl.arange(0, LENGTH)
    result_SL = tl.zeros((STRIPS, LENGTH), strips_ptr.dtype.element_ty)
    for first in range(0, strips, STRIPS):
        strip = first + tl.arange(0, STRIPS)
        inside = (strip < strips)[:, None] & (index < size)[None, :]
        strip_SL = tl.load(strips_ptr + strip.to(tl.int64)[:, None] * size + index[None, :], mask=inside, other=0)
        result_SL = result_SL + strip_SL if SUM else tl.maximum(result_SL, strip_SL)
    result_L = tl.sum(result_SL, axis=0) if SUM else tl.max(result_SL, axis=0)
    tl.store(result_ptr + index, result_L, mask=index < size)


@triton.jit(do_not_specialize=["size"])
def remember_kernel(seen_ptr, last_ptr, outgrown_ptr, size, LENGTH: tl.constexpr, ONE: tl.constexpr):
    """The amaxes just seen, doubled, replace the last ones, and ``seen`` begins at 0 again. Each program raises its flag if one
    of its last amaxes did not fit what was seen: too small, more than 64 times as large (32 before it was doubled), or no
    number. ONE: all are of one amax, seen in several places."""
    wait_for_kernels_before()
    index = tl.program_id(0) * LENGTH + tl.arange(0, LENGTH)
    inside = index < size
    seen_bits, last_bits = tl.load(seen_ptr + index, mask=inside, other=0), tl.load(last_ptr + index, mask=inside, other=0)
    if ONE:
        seen_bits = tl.zeros_like(seen_bits) + tl.max(seen_bits, axis=0)
        last_bits = tl.zeros_like(last_bits) + tl.max(last_bits, axis=0)
    seen, last = seen_bits.to(tl.float32, bitcast=True), last_bits.to(tl.float32, bitcast=True)
    fits = (seen_bits <= last_bits) & (last_bits < INFINITY_BITS) & ((seen >= last / 64) | (seen == 0))
    tl.store(outgrown_ptr + tl.program_id(0), tl.max((~fits).to(tl.int32), axis=0))
    doubled = tl.where(seen_bits < INFINITY_BITS, 2 * tl.minimum(seen, LARGEST), seen)
    tl.store(last_ptr + index, doubled.to(tl.int32, bitcast=True), mask=inside)
    tl.store(seen_ptr + index, tl.zeros_like(seen_bits), mask=inside)
