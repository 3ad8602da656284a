"""8-bit products a (M×K) · b (N×K)ᵀ on Hopper's tensor cores, operands loaded by TMA, which gives 0 past an edge.

Axes:  M rows of the output,  N its columns,  K contracted.  A scale multiplies on the way back.
"""

import triton
import triton.language as tl

from loka.kernels.triton.codes import let_next_kernel_start, wait_for_kernels_before

TILE_ROWS_AT_ONCE = tl.constexpr(8)  # programs that run together share rows of a and of b in the cache


@triton.jit
def tile_of(program, tiles_m, tiles_n):
    """Which tile of the output a program computes: down a few rows of tiles, then to the next column."""
    in_group = TILE_ROWS_AT_ONCE * tiles_n
    first_m = (program // in_group) * TILE_ROWS_AT_ONCE
    height = tl.minimum(tiles_m - first_m, TILE_ROWS_AT_ONCE)
    return first_m + (program % in_group) % height, (program % in_group) // height


@triton.jit
def contract(
    a_desc, b_desc, row, col, first, last, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, PROMOTED: tl.constexpr,
    INT8: tl.constexpr,
):  # fmt: skip
    """Products of codes summed over [first, last), those of int8 exactly. PROMOTED adds each step's sum in FP32, outside the
    tensor core."""
    sum_MN = tl.zeros((ROWS, COLS), tl.int32 if INT8 else tl.float32)
    for k in range(first, last, DEPTH):
        a_MK = a_desc.load([row, k])
        b_NK = b_desc.load([col, k])
        if INT8:
            sum_MN = tl.dot(a_MK, b_NK.T, sum_MN, out_dtype=tl.int32)
        else:
            sum_MN = tl.dot(a_MK, b_NK.T, sum_MN, max_num_imprecise_acc=DEPTH if PROMOTED else None)
    return sum_MN.to(tl.float32)


@triton.jit
def _scales(scale_ptr, index, size, factor, SCALES: tl.constexpr):
    """For each ``index``, ``factor`` times its own scale, times one for all, or by itself."""
    if SCALES == "rows":
        return tl.load(scale_ptr + index, mask=index < size, other=0.0) * factor
    elif SCALES == "one":
        return tl.full(index.shape, factor, tl.float32) * tl.load(scale_ptr)
    else:
        return tl.full(index.shape, factor, tl.float32)


@triton.jit
def store(out_ptr, value_MN, index_M, index_N, m, n):
    place = out_ptr + index_M.to(tl.int64)[:, None] * n + index_N[None, :]
    tl.store(place, value_MN.to(out_ptr.dtype.element_ty), mask=(index_M < m)[:, None] & (index_N < n)[None, :])


@triton.jit
def _factors(
    first_m, first_n, a_scale_ptr, b_scale_ptr, b_factor, bias_ptr, m, n,
    ROWS: tl.constexpr, COLS: tl.constexpr, A_SCALES: tl.constexpr, B_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """What the sums of the tile at (first_m, first_n) are multiplied by, rows and columns, and what is added to them."""
    index_M, index_N = first_m + tl.arange(0, ROWS), first_n + tl.arange(0, COLS)
    a_scale_M = _scales(a_scale_ptr, index_M, m, 1.0, A_SCALES)
    b_scale_N = _scales(b_scale_ptr, index_N, n, b_factor, B_SCALES)
    bias_N = tl.load(bias_ptr + index_N, mask=index_N < n, other=0.0).to(tl.float32) if HAS_BIAS else tl.zeros_like(b_scale_N)
    return a_scale_M, b_scale_N, bias_N


@triton.jit
def _finish(sum_MN, first_m, first_n, a_scale_M, b_scale_N, bias_N, out_ptr, m, n, HAS_BIAS: tl.constexpr):
    """Write the sums at (first_m, first_n), times their scales and with the bias."""
    index_M, index_N = first_m + tl.arange(0, sum_MN.shape[0]), first_n + tl.arange(0, sum_MN.shape[1])
    out_MN = sum_MN * a_scale_M[:, None] * b_scale_N[None, :]
    if HAS_BIAS:
        out_MN += bias_N[None, :]
    store(out_ptr, out_MN, index_M, index_N, m, n)


@triton.jit
def _finish_late(
    sum_MN, first_m, first_n, a_scale_ptr, b_scale_ptr, b_factor, bias_ptr, out_ptr, m, n,
    A_SCALES: tl.constexpr, B_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The same, with scales and bias that are loaded only now."""
    ROWS: tl.constexpr = sum_MN.shape[0]
    COLS: tl.constexpr = sum_MN.shape[1]
    a_scale_M, b_scale_N, bias_N = _factors(
        first_m, first_n, a_scale_ptr, b_scale_ptr, b_factor, bias_ptr, m, n, ROWS, COLS, A_SCALES, B_SCALES, HAS_BIAS
    )
    _finish(sum_MN, first_m, first_n, a_scale_M, b_scale_N, bias_N, out_ptr, m, n, HAS_BIAS)


@triton.jit
def _goes_out_in_halves(COLS: tl.constexpr, out_ptr):
    """A wide tile of FP32 does, since it passes through the shared memory that the loads of the next tile, and of another
    program on the multiprocessor, leave free."""
    return COLS >= 128 and out_ptr.dtype.element_ty == tl.float32


@triton.jit
def _finish_tile(
    sum_MN, first_m, first_n, a_scale_ptr, b_scale_ptr, b_factor, bias_ptr, out_ptr, m, n,
    A_SCALES: tl.constexpr, B_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = sum_MN.shape[1] // 2
    if _goes_out_in_halves(sum_MN.shape[1], out_ptr):
        left_MN, right_MN = sum_MN.reshape(sum_MN.shape[0], 2, HALF).permute(0, 2, 1).split()
        _finish_late(
            left_MN, first_m, first_n, a_scale_ptr, b_scale_ptr, b_factor, bias_ptr, out_ptr, m, n,
            A_SCALES, B_SCALES, HAS_BIAS,
        )  # fmt: skip
        _finish_late(
            right_MN, first_m, first_n + HALF, a_scale_ptr, b_scale_ptr, b_factor, bias_ptr, out_ptr, m, n,
            A_SCALES, B_SCALES, HAS_BIAS,
        )  # fmt: skip
    else:
        _finish_late(
            sum_MN, first_m, first_n, a_scale_ptr, b_scale_ptr, b_factor, bias_ptr, out_ptr, m, n,
            A_SCALES, B_SCALES, HAS_BIAS,
        )  # fmt: skip


@triton.jit
def gemm_kernel(
    a_desc, b_desc, a_scale_ptr, b_scale_ptr, bias_ptr, out_ptr, m, n, k, k_of_split, b_factor,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
    A_SCALES: tl.constexpr, B_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, PROMOTED: tl.constexpr, INT8: tl.constexpr,
    PERSISTENT: tl.constexpr,
):  # fmt: skip
    """One tile of the product, or of one split's part of it; axis 1 of the grid is the split.

    PERSISTENT: a program takes one tile after another, in one loop with the contraction, so that the next tile's loads run
    during the epilogue of this one; there are no splits then. Otherwise it has one tile. Unless that goes out in halves, its
    scales are loaded before the contraction and arrive while it runs; among several tiles they would take the loop's registers.
    """
    wait_for_kernels_before()
    tiles_m, tiles_n = tl.cdiv(m, ROWS), tl.cdiv(n, COLS)
    if PERSISTENT:
        for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
            tile_m, tile_n = tile_of(tile, tiles_m, tiles_n)
            sum_MN = contract(a_desc, b_desc, tile_m * ROWS, tile_n * COLS, 0, k, ROWS, COLS, DEPTH, PROMOTED, INT8)
            _finish_tile(
                sum_MN, tile_m * ROWS, tile_n * COLS, a_scale_ptr, b_scale_ptr, b_factor, bias_ptr,
                out_ptr, m, n, A_SCALES, B_SCALES, HAS_BIAS,
            )  # fmt: skip
    else:
        split = tl.program_id(1)
        tile_m, tile_n = tile_of(tl.program_id(0), tiles_m, tiles_n)
        first_m, first_n, first = tile_m * ROWS, tile_n * COLS, split * k_of_split
        last = tl.minimum(first + k_of_split, k)
        a_scale_M, b_scale_N, bias_N = _factors(
            first_m, first_n, a_scale_ptr, b_scale_ptr, b_factor, bias_ptr, m, n, ROWS, COLS, A_SCALES, B_SCALES, HAS_BIAS
        )
        sum_MN = contract(a_desc, b_desc, first_m, first_n, first, last, ROWS, COLS, DEPTH, PROMOTED, INT8)
        let_next_kernel_start()
        out_ptr += split.to(tl.int64) * m * n
        if _goes_out_in_halves(COLS, out_ptr):
            _finish_tile(
                sum_MN, first_m, first_n, a_scale_ptr, b_scale_ptr, b_factor, bias_ptr, out_ptr, m, n,
                A_SCALES, B_SCALES, HAS_BIAS,
            )  # fmt: skip
        else:
            _finish(sum_MN, first_m, first_n, a_scale_M, b_scale_N, bias_N, out_ptr, m, n, HAS_BIAS)


@triton.jit
def add_splits_kernel(part_ptr, bias_ptr, out_ptr, size, n, splits, HAS_BIAS: tl.constexpr, LENGTH: tl.constexpr):
    """The sum of the splits' parts (splits × size), in their order: the same every time."""
    wait_for_kernels_before()
    index = tl.program_id(0).to(tl.int64) * LENGTH + tl.arange(0, LENGTH)
    total = tl.zeros((LENGTH,), tl.float32)
    for _ in range(splits):
        total += tl.load(part_ptr + index, mask=index < size, other=0.0)
        part_ptr += size
    if HAS_BIAS:
        total += tl.load(bias_ptr + index % n, mask=index < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), mask=index < size)
