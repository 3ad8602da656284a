"""The gradient of norm and activation as ops of torch: dz as the codes that dgrad and wgrad read, or in high precision.

Axes:  M rows of the batch,  N features,  B norm blocks,  G groups of rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from loka.kernels.operand import padded_size
from loka.kernels.ops import fake_of, op
from loka.kernels.triton.block import CODES_DTYPE, norm_blocks
from loka.kernels.triton.launch import launch, on_its_gpu
from loka.kernels.triton.tiles import (
    GRADIENT_ROWS,
    SHARED_TILE,
    Columns,
    NormBlocks,
    ceil_div,
    gradient_cols,
    gradient_steps,
    power_of_two,
)

LARGEST_AT_ONCE = 1024


class GradientCodes(NamedTuple):
    """dz as e4m3 codes, stored with a multiple of 16 columns; what was not asked for has no elements.

    Rows as dgrad reads them have a scale each, a power of two. Transposed, as wgrad reads them, all have one, a power of two
    times the scale of x: it is the first of ``wgrad_scales``, and the second is 1, for the other operand.
    """

    codes_MN: Tensor
    scale_M: Tensor
    codes_NM: Tensor
    wgrad_scales: Tensor
    bias_N: Tensor


def block_gradient(
    dy_MN: Tensor, u_MN: Tensor, rstd_BM: Tensor, blocks: NormBlocks | None, activation: str,
    *, rows: bool, transposed: bool, bias: bool, x_factor: float,
) -> GradientCodes:  # fmt: skip
    """dz from dy and what forward saved, in the forms asked for, and the bias's gradient.

    Without a norm any u with the activation's slope will do, relu's y among them, and without an activation none is read.
    """
    block = None if blocks is None else blocks.block
    *codes, bias_sums_GN = torch.ops.loka.block_gradient(
        dy_MN, u_MN, rstd_BM, block, activation, rows, transposed, bias, x_factor
    )
    return GradientCodes(*codes, bias_sums_GN.sum(0))


@op("block_gradient")
@on_its_gpu
def _block_gradient(
    dy: Tensor,
    u: Tensor,
    rstd: Tensor,
    block: int | None,
    activation: str,
    rows: bool,
    transposed: bool,
    bias: bool,
    x_factor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from loka.kernels.triton import gradient_kernels as kernels

    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    (m, n), blocks = dy.shape, norm_blocks(dy.shape[1], block)
    cols, columns, _, groups = _grid(dy, blocks)
    out = codes, scale, codes_t, wgrad_scales, bias_sums = _outputs(dy, groups, rows, transposed, bias)
    scales = dy.new_empty((columns.count, m), dtype=torch.int32)
    largest = dy.new_empty(groups * columns.count, dtype=torch.int32)
    codes = codes if rows else codes.new_empty((m, padded_size(n, 16)))
    _launch_gradient(dy, u, rstd, dy.new_empty(0), codes, scales, largest, bias_sums, blocks, activation, bias)
    if not (rows or transposed):
        return out
    tile_rows, tile_cols = SHARED_TILE[0], min(SHARED_TILE[1], cols)
    parts = ceil_div(cols, tile_cols)
    launch(
        kernels.share_scales_kernel, (ceil_div(m, tile_rows) * columns.count * parts, 1, 1),
        codes, codes_t.view(torch.int32) if transposed else codes_t, scales, largest, scale, wgrad_scales,
        m, n, padded_size(n, 16), padded_size(m, 16), columns.count, largest.numel(), x_factor,
        NORM=blocks is not None, WIDTH=columns.width, WIDER=columns.wider, ROWS=tile_rows, COLS=tile_cols, PARTS=parts,
        BLOCKS=power_of_two(columns.count), AT_ONCE=LARGEST_AT_ONCE, PLAIN=rows, TRANS=transposed, num_warps=4,
    )  # fmt: skip
    return out


@fake_of("block_gradient")
def _(
    dy: Tensor,
    u: Tensor,
    rstd: Tensor,
    block: int | None,
    activation: str,
    rows: bool,
    transposed: bool,
    bias: bool,
    x_factor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _outputs(dy, _grid(dy, norm_blocks(dy.shape[1], block))[-1], rows, transposed, bias)


def norm_gradient(dy_MN: Tensor, u_MN: Tensor, rstd_BM: Tensor, blocks: NormBlocks) -> Tensor:
    """dz of a norm that stands alone, in dy's dtype."""
    return torch.ops.loka.norm_gradient(dy_MN, u_MN, rstd_BM, blocks.block)


@op("norm_gradient")
@on_its_gpu
def _norm_gradient(dy: Tensor, u: Tensor, rstd: Tensor, block: int) -> Tensor:
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    dz, nothing = _empty_gradient(dy, u, rstd, block), dy.new_empty(0, dtype=torch.int32)
    codes, bias_sums = dy.new_empty((0, 0), dtype=CODES_DTYPE), dy.new_empty(0, dtype=torch.float32)
    blocks = NormBlocks(dy.shape[1], block)
    _launch_gradient(dy, u, rstd, dz, codes, nothing, nothing, bias_sums, blocks, "none", bias=False)
    return dz


@fake_of("norm_gradient")
def _empty_gradient(dy: Tensor, u: Tensor, rstd: Tensor, block: int) -> Tensor:
    return dy.new_empty(dy.shape)


def _launch_gradient(
    dy: Tensor, u: Tensor, rstd: Tensor, dz: Tensor, codes: Tensor, scales: Tensor, largest: Tensor, bias_sums: Tensor,
    blocks: NormBlocks | None, activation: str, bias: bool,
) -> None:  # fmt: skip
    """Into ``dz`` if it has room, else as codes."""
    from loka.kernels.triton import gradient_kernels as kernels

    (m, n), (cols, columns, steps, groups) = dy.shape, _grid(dy, blocks)
    launch(
        kernels.gradient_kernel, (groups * columns.count, 1, 1),
        dy, u, rstd, dz, codes, scales, largest, bias_sums,
        m, n, dy.stride(0), u.stride(0), padded_size(n, 16), columns.count,
        blocks.code_scale if blocks and u.dtype is CODES_DTYPE else 1.0,
        NORM=blocks is not None, ROWS=GRADIENT_ROWS, STEPS=steps, COLS=cols, WIDTH=columns.width, WIDER=columns.wider,
        ACTIVATION=activation, HIGH=dz.numel() > 0, BIAS=bias, EIGHTS=u.stride(0) % 8 == 0, num_warps=4,
    )  # fmt: skip


def _grid(dy: Tensor, blocks: NormBlocks | None) -> tuple[int, Columns, int, int]:
    """The columns of a tile, how programs share out the features, the steps each goes down, and groups of such rows."""
    m, n = dy.shape
    cols = gradient_cols(n, blocks)
    columns = Columns.of(n, blocks, cols)
    steps = gradient_steps(m, columns)
    return cols, columns, steps, ceil_div(m, GRADIENT_ROWS * steps)


def _outputs(
    dy: Tensor, groups: int, rows: bool, transposed: bool, bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    m, n = dy.shape
    return (
        dy.new_empty((m, padded_size(n, 16)) if rows else (0,), dtype=CODES_DTYPE),
        dy.new_empty(m if rows else 0, dtype=torch.float32),
        dy.new_empty((n, padded_size(m, 16)) if transposed else (0,), dtype=CODES_DTYPE),
        dy.new_empty(2 if transposed else 0, dtype=torch.float32),
        dy.new_empty((groups, n) if bias else (0, 0), dtype=torch.float32),
    )
