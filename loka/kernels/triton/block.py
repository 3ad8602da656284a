"""The fused block's forward pass as ops of torch: product, norm and activation in one kernel.

Axes:  M rows of the batch,  N features out,  K features in,  B norm blocks.
Codes are e4m3. Behind the norm their scale is a constant, ``NormBlocks.code_scale``. Without a norm there is no such bound:
y leaves in high precision.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from loka.kernels.operand import padded_size
from loka.kernels.ops import fake_of, op
from loka.kernels.triton.gemm import descriptor
from loka.kernels.triton.launch import launch, on_its_gpu
from loka.kernels.triton.tiles import (
    NORM_ROWS,
    Columns,
    NormBlocks,
    ceil_div,
    choose_block_tiles,
    grid,
    is_promoted,
    multiprocessors,
)

CODES_DTYPE = torch.float8_e4m3fn


class Wanted(NamedTuple):
    """What a forward pass writes: y in a high-precision dtype, its codes, their transpose, u for backward.

    Codes need a norm. u is what the activation is applied to; its dtype may be that of codes.
    """

    high: torch.dtype | None = None
    codes: bool = False
    transposed: bool = False
    saved: torch.dtype | None = None

    @property
    def forms(self) -> int:
        return (self.high is not None) + self.codes + self.transposed + (self.saved is not None)

    @property
    def only_codes(self) -> bool:
        return self.high is None and self.saved in (None, CODES_DTYPE)


class BlockOutputs(NamedTuple):
    """What was not wanted has no elements. Codes and u are stored with a multiple of 16 columns, of which only the first N (M
    for the transpose) may be read."""

    y_MN: Tensor
    codes_MN: Tensor
    codes_NM: Tensor
    u_MN: Tensor  # before the activation: what the norm returned, or the product where there is none
    rstd_BM: Tensor


def block_forward(
    x_MK: Tensor, x_scale_M: Tensor | None, x_factor: float, w_NK: Tensor, w_scale_N: Tensor, bias_N: Tensor | None,
    m: int, k: int, blocks: NormBlocks | None, eps: float, activation: str, wanted: Wanted,
) -> BlockOutputs:  # fmt: skip
    """activation(norm(x·wᵀ + b)) for codes x and w. The scale of x is ``x_factor``, times one a row if ``x_scale_M`` is given;
    w has one a row. ``blocks`` are the norm's; None is for no norm.
    """
    block = None if blocks is None else blocks.block
    return BlockOutputs(
        *torch.ops.loka.block_forward(x_MK, x_scale_M, x_factor, w_NK, w_scale_N, bias_N, m, k, block, eps, activation, *wanted)
    )


@op("block_forward")
@on_its_gpu
def _block_forward(
    x: Tensor,
    x_scale: Tensor | None,
    x_factor: float,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    m: int,
    k: int,
    block: int | None,
    eps: float,
    activation: str,
    high: torch.dtype | None,
    codes: bool,
    transposed: bool,
    saved: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from loka.kernels.triton import block_kernels as kernels

    n, wanted = w.shape[0], Wanted(high, codes, transposed, saved)
    blocks, sms = norm_blocks(n, block), multiprocessors(x.device)
    tiles = choose_block_tiles(m, n, k, blocks, sms, forms=wanted.forms, only_codes=wanted.only_codes)
    columns = Columns.of(n, blocks, tiles.cols)
    out = _outputs(x, m, n, blocks, wanted)
    programs, persistent = grid(ceil_div(m, tiles.rows) * columns.count, tiles, sms)
    launch(
        kernels.block_forward_kernel, (programs, 1, 1),
        descriptor(x, m, k, tiles.rows, tiles.depth), descriptor(w, n, k, tiles.cols, tiles.depth),
        x_scale, w_scale, bias, *out,
        m, n, k, columns.count, eps, x_factor, 1.0 if blocks is None else 1 / blocks.code_scale,
        padded_size(n, 16), padded_size(m, 16),
        NORM=blocks is not None, ROWS=tiles.rows, COLS=tiles.cols, WIDTH=columns.width, WIDER=columns.wider,
        DEPTH=tiles.depth, PROMOTED=is_promoted(k),
        X_ROWWISE=x_scale is not None, HAS_BIAS=bias is not None, ACTIVATION=activation,
        HIGH=high is not None, CODES=codes, CODES_T=transposed, SAVED=saved is not None, PERSISTENT=persistent,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


@fake_of("block_forward")
def _(
    x: Tensor,
    x_scale: Tensor | None,
    x_factor: float,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    m: int,
    k: int,
    block: int | None,
    eps: float,
    activation: str,
    high: torch.dtype | None,
    codes: bool,
    transposed: bool,
    saved: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    n = w.shape[0]
    return _outputs(x, m, n, norm_blocks(n, block), Wanted(high, codes, transposed, saved))


def norm_forward(z_MN: Tensor, blocks: NormBlocks, eps: float, activation: str, wanted: Wanted) -> BlockOutputs:
    """activation(norm(z)) of a z that something else has written: so a standalone norm can hand on FP8."""
    return BlockOutputs(*torch.ops.loka.norm_forward(z_MN, blocks.block, eps, activation, *wanted))


@op("norm_forward")
@on_its_gpu
def _norm_forward(
    z: Tensor,
    block: int,
    eps: float,
    activation: str,
    high: torch.dtype | None,
    codes: bool,
    transposed: bool,
    saved: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from loka.kernels.triton import block_kernels as kernels

    z = z if z.stride(1) == 1 else z.contiguous()
    (m, n), blocks = z.shape, NormBlocks(z.shape[1], block)
    out = _outputs(z, m, n, blocks, Wanted(high, codes, transposed, saved))
    launch(
        kernels.norm_forward_kernel, (ceil_div(m, NORM_ROWS) * blocks.count, 1, 1),
        z, *out, m, n, z.stride(0), blocks.count, eps, 1 / blocks.code_scale, padded_size(n, 16), padded_size(m, 16),
        ROWS=NORM_ROWS, COLS=blocks.room, WIDTH=blocks.width, WIDER=blocks.wider, ACTIVATION=activation,
        HIGH=high is not None, CODES=codes, CODES_T=transposed, SAVED=saved is not None,
        num_warps=4,
    )  # fmt: skip
    return out


@fake_of("norm_forward")
def _(
    z: Tensor,
    block: int,
    eps: float,
    activation: str,
    high: torch.dtype | None,
    codes: bool,
    transposed: bool,
    saved: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (m, n), wanted = z.shape, Wanted(high, codes, transposed, saved)
    return _outputs(z, m, n, NormBlocks(n, block), wanted)


def norm_blocks(n: int, block: int | None) -> NormBlocks | None:
    """The norm's blocks, from the size that an op is given for them; None where there is no norm."""
    return None if block is None else NormBlocks(n, block)


def _outputs(
    like: Tensor, m: int, n: int, blocks: NormBlocks | None, wanted: Wanted
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    def empty(rows: int, cols: int, dtype: torch.dtype, needed: bool) -> Tensor:
        return like.new_empty((rows, cols) if needed else (0,), dtype=dtype)

    return (
        empty(m, n, wanted.high or torch.bfloat16, wanted.high is not None),
        empty(m, padded_size(n, 16), CODES_DTYPE, wanted.codes),
        empty(n, padded_size(m, 16), CODES_DTYPE, wanted.transposed),
        empty(m, padded_size(n, 16), wanted.saved or CODES_DTYPE, wanted.saved is not None),
        empty(blocks.count if blocks else 0, m, torch.float32, blocks is not None and wanted.saved is not None),
    )
