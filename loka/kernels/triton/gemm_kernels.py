"""FP8 products a (M×K) · b (N×K)ᵀ on Hopper's tensor cores, operands loaded by TMA, which gives 0 past an edge.

Axes:  M rows of the output,  N its columns,  K contracted.  A scale multiplies on the way back.
"""

import triton
import triton.language as tl

from loka.kernels.triton.fp8 import let_next_kernel_start, wait_for_kernels_before

TILE_ROWS_AT_ONCE = tl.constexpr(8)  # programs that run together share rows of a and columns of b in the cache


@triton.jit
def tile_of(program, tiles_m, tiles_n):
    """Which tile of the output a program computes: down a few rows of tiles, then to the next column."""
    in_group = TILE_ROWS_AT_ONCE * tiles_n
    first_m = (program // in_group) * TILE_ROWS_AT_ONCE
    height = tl.minimum(tiles_m - first_m, TILE_ROWS_AT_ONCE)
    return first_m + (program % in_group) % height, (program % in_group) // height


@triton.jit
def contract(
    a_desc, b_desc, row, col, first, last, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, PROMOTED: tl.constexpr
):  # fmt: skip
    """Products of codes summed over [first, last). PROMOTED adds each step's sum in FP32, outside the tensor core."""
    sum_MN = tl.zeros((ROWS, COLS), tl.float32)
    for k in range(first, last, DEPTH):
        a_MK = a_desc.load([row, k])
        b_NK = b_desc.load([col, k])
        sum_MN = tl.dot(a_MK, b_NK.T, sum_MN, max_num_imprecise_acc=DEPTH if PROMOTED else None)
    return sum_MN


@triton.jit
def scales_along(scale_ptr, index, size, PER_ENTRY: tl.constexpr):
    """The scale of each ``index`` of an axis, or the one scale of all."""
    if PER_ENTRY:
        return tl.load(scale_ptr + index, mask=index < size, other=0.0)
    else:
        return tl.load(scale_ptr)


@triton.jit
def dequantize(sum_MN, a_scale_ptr, b_scale_ptr, index_M, index_N, m, n, A_ROWWISE: tl.constexpr, B_ROWWISE: tl.constexpr):
    a_scale, b_scale = scales_along(a_scale_ptr, index_M, m, A_ROWWISE), scales_along(b_scale_ptr, index_N, n, B_ROWWISE)
    sum_MN = sum_MN * a_scale[:, None] if A_ROWWISE else sum_MN * a_scale
    return sum_MN * b_scale[None, :] if B_ROWWISE else sum_MN * b_scale


@triton.jit
def store(out_ptr, value_MN, index_M, index_N, m, n):
    place = out_ptr + index_M.to(tl.int64)[:, None] * n + index_N[None, :]
    tl.store(place, value_MN.to(out_ptr.dtype.element_ty), mask=(index_M < m)[:, None] & (index_N < n)[None, :])


@triton.jit
def gemm_kernel(
    a_desc, b_desc, a_scale_ptr, b_scale_ptr, bias_ptr, out_ptr, m, n, k, k_of_split,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
    A_ROWWISE: tl.constexpr, B_ROWWISE: tl.constexpr, HAS_BIAS: tl.constexpr, PROMOTED: tl.constexpr,
):  # fmt: skip
    """One tile of the product, or of one split's part of it; axis 1 of the grid is the split."""
    wait_for_kernels_before()
    split = tl.program_id(1)
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(m, ROWS), tl.cdiv(n, COLS))
    first = split * k_of_split
    last = tl.minimum(first + k_of_split, k)
    sum_MN = contract(a_desc, b_desc, tile_m * ROWS, tile_n * COLS, first, last, ROWS, COLS, DEPTH, PROMOTED)
    let_next_kernel_start()
    index_M, index_N = tile_m * ROWS + tl.arange(0, ROWS), tile_n * COLS + tl.arange(0, COLS)
    out_MN = dequantize(sum_MN, a_scale_ptr, b_scale_ptr, index_M, index_N, m, n, A_ROWWISE, B_ROWWISE)
    if HAS_BIAS:
        out_MN += tl.load(bias_ptr + index_N, mask=index_N < n, other=0.0).to(tl.float32)[None, :]
    store(out_ptr + split.to(tl.int64) * m * n, out_MN, index_M, index_N, m, n)


@triton.jit
def grouped_gemm_kernel(
    a_desc, b_desc, a_scale_ptr, b_scale_ptr, out_ptr, m, n, groups, groups_of_split, b_factor,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr, B_ROWWISE: tl.constexpr,
):  # fmt: skip
    """The contraction comes in groups of STEPS·DEPTH, and each row of a has a scale for each group (groups × M).

    b's scale is ``b_factor``, times one a row where B_ROWWISE.
    """
    wait_for_kernels_before()
    split = tl.program_id(1)
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(m, ROWS), tl.cdiv(n, COLS))
    index_M, index_N = tile_m * ROWS + tl.arange(0, ROWS), tile_n * COLS + tl.arange(0, COLS)
    sum_MN = tl.zeros((ROWS, COLS), tl.float32)
    first_step = split * groups_of_split * STEPS
    last_step = tl.minimum((split + 1) * groups_of_split, groups) * STEPS
    for step in range(first_step, last_step):
        group = step // STEPS
        a_MK = a_desc.load([tile_m * ROWS, step * DEPTH])
        b_NK = b_desc.load([tile_n * COLS, step * DEPTH])
        a_scale_M = tl.load(a_scale_ptr + group * m + index_M, mask=index_M < m, other=0.0)
        sum_MN += tl.dot(a_MK, b_NK.T) * a_scale_M[:, None]
    let_next_kernel_start()
    if B_ROWWISE:
        sum_MN *= scales_along(b_scale_ptr, index_N, n, True)[None, :]
    store(out_ptr + split.to(tl.int64) * m * n, sum_MN * b_factor, index_M, index_N, m, n)


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
