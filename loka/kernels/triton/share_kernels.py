"""Replacing the many scales of codes by few, which products can take out of their sums: a pass over the codes alone, a byte a
value.

Axes:  M rows,  N columns,  B runs of columns (norm blocks),  Q quads of rows.

Scales are powers of two, so that a code can change its scale without being rounded again (except below e4m3's smallest normal
number). They travel as the bits of FP32 numbers.
"""

import triton
import triton.language as tl

from loka.kernels.triton.block_kernels import columns_of
from loka.kernels.triton.codes import largest_of, power_over, to_e4m3, to_e4m3_words, wait_for_kernels_before


@triton.jit
def _row_scales(scale_ptr, row_Q, m, blocks, BLOCKS: tl.constexpr):
    """The largest scale of each row's blocks: then no code of the row leaves the format."""
    block_B = tl.arange(0, BLOCKS)
    inside = (block_B < blocks)[:, None] & (row_Q < m)[None, :]
    return tl.max(tl.load(scale_ptr + block_B[:, None] * m + row_Q[None, :], mask=inside, other=0), axis=0)


@triton.jit(do_not_specialize=["largests"])
def share_scales_kernel(
    codes_ptr, trans_words_ptr, scale_ptr, largest_ptr, row_scale_ptr, trans_scale_ptr,
    m, n, codes_stride, trans_stride, scale_step, one_step, blocks, largests, factor,
    NORM: tl.constexpr, WIDTH: tl.constexpr, WIDER: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
    BLOCKS: tl.constexpr, AT_ONCE: tl.constexpr, PLAIN: tl.constexpr, TRANS: tl.constexpr,
):  # fmt: skip
    """Codes with a scale for each row and block (``scale_step`` from block to block; 0: one a row), for ROWS rows of one of
    PARTS parts of a block.

    PLAIN: codes are rewritten where their scale is not their row's largest, which is the row's scale now. TRANS: codes are
    written transposed, all with the largest scale. It is noted times ``factor``, and ``one_step`` behind it, if that is not 0,
    a 1. As in ``cast_kernel`` four codes of a column meet in one word.
    """
    wait_for_kernels_before()
    tile_m, rest = tl.program_id(0) // (blocks * PARTS), tl.program_id(0) % (blocks * PARTS)
    block, part = rest // PARTS, rest % PARTS
    _, index_N, inside_N, _ = columns_of(block, n, part * COLS + tl.arange(0, COLS), NORM, WIDTH, WIDER)
    quad = tile_m * (ROWS // 4) + tl.arange(0, ROWS // 4)
    place_QN = codes_ptr + (4 * quad).to(tl.int64)[:, None] * codes_stride + index_N[None, :]
    codes0 = tl.load(place_QN, mask=(4 * quad < m)[:, None] & inside_N[None, :], other=0.0)
    codes1 = tl.load(place_QN + codes_stride, mask=(4 * quad + 1 < m)[:, None] & inside_N[None, :], other=0.0)
    codes2 = tl.load(place_QN + 2 * codes_stride, mask=(4 * quad + 2 < m)[:, None] & inside_N[None, :], other=0.0)
    codes3 = tl.load(place_QN + 3 * codes_stride, mask=(4 * quad + 3 < m)[:, None] & inside_N[None, :], other=0.0)
    scales = scale_ptr + block * scale_step + 4 * quad
    scale0, scale1 = tl.load(scales, mask=4 * quad < m, other=0), tl.load(scales + 1, mask=4 * quad + 1 < m, other=0)
    scale2, scale3 = tl.load(scales + 2, mask=4 * quad + 2 < m, other=0), tl.load(scales + 3, mask=4 * quad + 3 < m, other=0)
    if TRANS:
        largest = largest_of(largest_ptr, largests, AT_ONCE)
        words_QN = to_e4m3_words(
            codes0.to(tl.float32) * power_over(scale0, largest)[:, None],
            codes1.to(tl.float32) * power_over(scale1, largest)[:, None],
            codes2.to(tl.float32) * power_over(scale2, largest)[:, None],
            codes3.to(tl.float32) * power_over(scale3, largest)[:, None],
        )
        words = tl.multiple_of(trans_stride // 4, 4)
        stored = inside_N[:, None] & (quad < words)[None, :]
        tl.store(trans_words_ptr + index_N.to(tl.int64)[:, None] * words + quad[None, :], tl.trans(words_QN), mask=stored)
        if tl.program_id(0) == 0:
            tl.store(trans_scale_ptr, largest.to(tl.float32, bitcast=True) * factor)
            if one_step > 0:
                tl.store(trans_scale_ptr + one_step, 1.0)
    if PLAIN:
        for j in tl.static_range(4):
            row = 4 * quad + j
            shared = _row_scales(scale_ptr, row, m, blocks, BLOCKS)
            tl.store(row_scale_ptr + row, shared.to(tl.float32, bitcast=True), mask=(row < m) & (rest == 0))
            if BLOCKS > 1:
                codes_QN = codes0 if j == 0 else codes1 if j == 1 else codes2 if j == 2 else codes3
                scale_Q = scale0 if j == 0 else scale1 if j == 1 else scale2 if j == 2 else scale3
                rewritten = ((row < m) & (scale_Q != shared))[:, None] & inside_N[None, :]
                rescaled_QN = to_e4m3(codes_QN.to(tl.float32) * power_over(scale_Q, shared)[:, None])
                tl.store(place_QN + j * codes_stride, rescaled_QN, mask=rewritten)
