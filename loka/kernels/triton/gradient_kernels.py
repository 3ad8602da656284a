"""The gradient of norm and activation as codes: dz from dy in one pass.

Axes:  M rows of the batch,  N features,  B norm blocks.

    g = dy·activation′(u)        dz = rstd·(g − u·mean(g·u))  over the block,  dz = g without a norm

A program sees one block of a row and no more. So it scales each row of each block by itself, by a power of two. The next pass
(``share_kernels``) then gives the codes scales that products can take out of their sums.
"""

import triton
import triton.language as tl

from loka.kernels.triton.block_kernels import columns_of
from loka.kernels.triton.codes import inverse_of_power, magnitude, power_scale_of, to_e4m3, wait_for_kernels_before


@triton.jit
def _slope(u, ACTIVATION: tl.constexpr):
    """The derivative of the activation; at a kink, torch's choice."""
    if ACTIVATION == "hard_swish":
        slope = tl.where(u < 3.0, u * (1.0 / 3.0) + 0.5, 1.0)
        return tl.where(u <= -3.0, 0.0, slope)
    elif ACTIVATION == "relu":
        return tl.where(u > 0.0, 1.0, 0.0)
    else:
        tl.static_assert(ACTIVATION == "none")
        return tl.full(u.shape, 1.0, tl.float32)


@triton.jit
def _load_dz(
    dy_ptr, u_ptr, rstd_ptr, index_M, index_N, inside_N, size, block, m, dy_stride, u_stride, unit,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, EIGHTS: tl.constexpr,
):  # fmt: skip
    loaded = (index_M < m)[:, None] & inside_N[None, :]
    row = index_M.to(tl.int64)[:, None]
    dy_MN = tl.load(dy_ptr + row * dy_stride + index_N[None, :], mask=loaded, other=0.0).to(tl.float32)
    if not NORM and ACTIVATION == "none":
        return dy_MN
    # Eight codes at a time, though alignment would allow sixteen: so loads and stores agree on which thread holds what.
    place = u_ptr + row * (u_stride // 8 * 8 if EIGHTS else u_stride) + index_N[None, :]
    u_MN = tl.load(place, mask=loaded, other=0.0).to(tl.float32) * unit
    g_MN = dy_MN * _slope(u_MN, ACTIVATION)
    if NORM:
        rstd_M = tl.load(rstd_ptr + block * m + index_M, mask=index_M < m, other=0.0)
        mean_M = tl.sum(g_MN * u_MN, axis=1) / size
        return rstd_M[:, None] * (g_MN - u_MN * mean_M[:, None])
    else:
        return g_MN


@triton.jit
def _store_codes(value_MN, index_M, index_N, inside_N, block, m, codes_ptr, codes_stride, scale_ptr):
    """Write codes of the rows of one block with a scale each, and return the scales. Eight at a time, as they were loaded."""
    scale_M = power_scale_of(tl.max(magnitude(value_MN), axis=1))
    codes_MN = to_e4m3(value_MN * inverse_of_power(scale_M)[:, None])
    place = codes_ptr + index_M.to(tl.int64)[:, None] * (codes_stride // 8 * 8) + index_N[None, :]
    tl.store(place, codes_MN, mask=(index_M < m)[:, None] & inside_N[None, :])
    tl.store(scale_ptr + block * m + index_M, scale_M, mask=index_M < m)
    return scale_M


@triton.jit(do_not_specialize_on_alignment=["u_stride", "codes_stride"])
def gradient_kernel(
    dy_ptr, u_ptr, rstd_ptr, dz_ptr, codes_ptr, scale_ptr, largest_ptr, bias_sums_ptr,
    m, n, dy_stride, u_stride, codes_stride, blocks, unit,
    NORM: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, WIDER: tl.constexpr,
    ACTIVATION: tl.constexpr, HIGH: tl.constexpr, BIAS: tl.constexpr, EIGHTS: tl.constexpr,
):  # fmt: skip
    """dz of one block for ROWS·STEPS rows, from dy and what forward saved: with HIGH in dy's precision, otherwise as codes with
    a scale for each row (blocks × M); each program notes its largest scale.

    BIAS: sums of dz over the rows are written too. u is stored in units of ``unit``; EIGHTS: in rows of a multiple of eight.
    """
    wait_for_kernels_before()
    group, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    _, index_N, inside_N, size = columns_of(block, n, tl.arange(0, COLS), NORM, WIDTH, WIDER)
    largest_M = tl.zeros((ROWS,), tl.int32)
    col_sum_MN = tl.zeros((ROWS, COLS), tl.float32)
    for step in range(STEPS):
        index_M = (group * STEPS + step) * ROWS + tl.arange(0, ROWS)
        dz_MN = _load_dz(
            dy_ptr, u_ptr, rstd_ptr, index_M, index_N, inside_N, size, block, m, dy_stride, u_stride, unit,
            NORM, ACTIVATION, EIGHTS,
        )  # fmt: skip
        if HIGH:
            place = dz_ptr + index_M.to(tl.int64)[:, None] * n + index_N[None, :]
            tl.store(place, dz_MN.to(dz_ptr.dtype.element_ty), mask=(index_M < m)[:, None] & inside_N[None, :])
        else:
            scale_M = _store_codes(dz_MN, index_M, index_N, inside_N, block, m, codes_ptr, codes_stride, scale_ptr)
            largest_M = tl.maximum(largest_M, scale_M)
        if BIAS:
            col_sum_MN += dz_MN
    if not HIGH:
        tl.store(largest_ptr + tl.program_id(0), tl.max(largest_M, axis=0))
    if BIAS:
        tl.store(bias_sums_ptr + group * n + index_N, tl.sum(col_sum_MN, axis=0), mask=inside_N)
