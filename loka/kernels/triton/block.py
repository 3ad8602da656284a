"""The fused block as ops of torch: product, norm and activation in one kernel, and the gradient of norm and activation.

Axes:  M rows of the batch,  N features out,  K features in,  B norm blocks,  G groups of rows in backward.
Codes are e4m3. Behind the norm their scale is a constant, ``NormBlocks.code_scale``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from loka.kernels.operand import padded_size
from loka.kernels.triton.gemm import descriptor
from loka.kernels.triton.tiles import (
    NORM_BACKWARD_ROWS,
    NORM_ROWS,
    NormBlocks,
    ceil_div,
    choose_block_tiles,
    grid,
    is_promoted,
    multiprocessors,
    norm_backward_steps,
)

ACTIVATIONS = ("none", "relu", "hard_swish")


class Wanted(NamedTuple):
    """What a forward pass writes: y in a high-precision dtype, its codes, their transpose, what backward needs."""

    high: torch.dtype | None = None
    codes: bool = False
    transposed: bool = False
    saved: bool = False

    @property
    def forms(self) -> int:
        return (self.high is not None) + self.codes + self.transposed + self.saved


class BlockOutputs(NamedTuple):
    """What was not wanted has no elements. Codes are stored with a multiple of 16 columns: behind the first N or M lies
    nothing that may be read."""

    y_MN: Tensor
    codes_MN: Tensor
    codes_NM: Tensor
    normed_MN: Tensor  # codes of what the norm returned, before the activation
    rstd_BM: Tensor


def block_forward(
    x_MK: Tensor, x_scale_M: Tensor | None, x_factor: float, w_NK: Tensor, w_scale_N: Tensor, bias_N: Tensor | None,
    m: int, k: int, blocks: NormBlocks, eps: float, activation: str, wanted: Wanted,
) -> BlockOutputs:  # fmt: skip
    """activation(norm(x·wᵀ + b)) of codes: x with the scale ``x_factor``, times one a row if given, w with one a row."""
    return BlockOutputs(
        *torch.ops.loka.block_forward(
            x_MK, x_scale_M, x_factor, w_NK, w_scale_N, bias_N, m, k, blocks.features, blocks.block, eps, activation, *wanted
        )
    )


@torch.library.custom_op("loka::block_forward", mutates_args=())
def _block_forward(
    x: Tensor,
    x_scale: Tensor | None,
    x_factor: float,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    m: int,
    k: int,
    n: int,
    block: int,
    eps: float,
    activation: str,
    high: torch.dtype | None,
    codes: bool,
    transposed: bool,
    saved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from loka.kernels.triton import block_kernels as kernels

    blocks, wanted = NormBlocks(n, block), Wanted(high, codes, transposed, saved)
    tiles = choose_block_tiles(m, blocks, k, multiprocessors(x.device), forms=wanted.forms)
    out = _outputs(x, m, blocks, wanted)
    programs, persistent = grid(ceil_div(m, tiles.rows) * blocks.count, tiles, multiprocessors(x.device))
    kernels.block_forward_kernel[(programs,)](
        descriptor(x, m, k, tiles.rows, tiles.depth), descriptor(w, n, k, tiles.cols, tiles.depth),
        x_scale, w_scale, bias, *out,
        m, n, k, blocks.count, eps, x_factor, 1 / blocks.code_scale, padded_size(n, 16), padded_size(m, 16),
        ROWS=tiles.rows, COLS=tiles.cols, WIDTH=blocks.width, WIDER=blocks.wider, DEPTH=tiles.depth, PROMOTED=is_promoted(k),
        X_ROWWISE=x_scale is not None, HAS_BIAS=bias is not None, ACTIVATION=activation,
        HIGH=high is not None, CODES=codes, CODES_T=transposed, SAVED=saved, PERSISTENT=persistent,
        num_warps=tiles.warps, num_stages=tiles.stages, launch_pdl=x.is_cuda,
    )  # fmt: skip
    return out


@_block_forward.register_fake
def _(
    x: Tensor,
    x_scale: Tensor | None,
    x_factor: float,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    m: int,
    k: int,
    n: int,
    block: int,
    eps: float,
    activation: str,
    high: torch.dtype | None,
    codes: bool,
    transposed: bool,
    saved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _outputs(x, m, NormBlocks(n, block), Wanted(high, codes, transposed, saved))


def norm_forward(z_MN: Tensor, blocks: NormBlocks, eps: float, activation: str, wanted: Wanted) -> BlockOutputs:
    """activation(norm(z)) of a matrix that something else has written: how a standalone norm hands on FP8."""
    return BlockOutputs(*torch.ops.loka.norm_forward(z_MN, blocks.block, eps, activation, *wanted))


@torch.library.custom_op("loka::norm_forward", mutates_args=())
def _norm_forward(
    z: Tensor, block: int, eps: float, activation: str, high: torch.dtype | None, codes: bool, transposed: bool, saved: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from loka.kernels.triton import block_kernels as kernels

    z = z if z.stride(1) == 1 else z.contiguous()
    (m, n), blocks = z.shape, NormBlocks(z.shape[1], block)
    out = _outputs(z, m, blocks, Wanted(high, codes, transposed, saved))
    kernels.norm_forward_kernel[(ceil_div(m, NORM_ROWS) * blocks.count,)](
        z, *out, m, n, z.stride(0), blocks.count, eps, 1 / blocks.code_scale, padded_size(n, 16), padded_size(m, 16),
        ROWS=NORM_ROWS, COLS=blocks.room, WIDTH=blocks.width, WIDER=blocks.wider, ACTIVATION=activation,
        HIGH=high is not None, CODES=codes, CODES_T=transposed, SAVED=saved, num_warps=4, launch_pdl=z.is_cuda,
    )  # fmt: skip
    return out


@_norm_forward.register_fake
def _(
    z: Tensor, block: int, eps: float, activation: str, high: torch.dtype | None, codes: bool, transposed: bool, saved: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _outputs(z, z.shape[0], NormBlocks(z.shape[1], block), Wanted(high, codes, transposed, saved))


def _outputs(like: Tensor, m: int, blocks: NormBlocks, wanted: Wanted) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    n, fp8 = blocks.features, torch.float8_e4m3fn

    def empty(rows: int, cols: int, dtype: torch.dtype, needed: bool) -> Tensor:
        return like.new_empty((rows, cols) if needed else (0,), dtype=dtype)

    return (
        empty(m, n, wanted.high or torch.bfloat16, wanted.high is not None),
        empty(m, padded_size(n, 16), fp8, wanted.codes),
        empty(n, padded_size(m, 16), fp8, wanted.transposed),
        empty(m, padded_size(n, 16), fp8, wanted.saved),
        empty(blocks.count, m, torch.float32, wanted.saved),
    )


class NormGradient(NamedTuple):
    """The gradient behind activation and norm, the amaxes of its rows and then columns, and the bias's gradient if wanted."""

    dz_MN: Tensor
    amax: Tensor  # as ``cast_matrix`` takes it
    bias_N: Tensor


def norm_backward(
    dy_MN: Tensor, normed_MN: Tensor, rstd_BM: Tensor, blocks: NormBlocks, activation: str, *, bias: bool
) -> NormGradient:  # fmt: skip
    """dz from dy and what forward saved, in dy's dtype."""
    dz, amax, bias_sums_GN = torch.ops.loka.norm_backward(
        dy_MN, normed_MN, rstd_BM, blocks.features, blocks.block, activation, bias
    )
    return NormGradient(dz, amax, bias_sums_GN.sum(0))


@torch.library.custom_op("loka::norm_backward", mutates_args=())
def _norm_backward(
    dy: Tensor, normed: Tensor, rstd: Tensor, n: int, block: int, activation: str, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from loka.kernels.triton import block_kernels as kernels

    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    m, blocks = dy.shape[0], NormBlocks(n, block)
    steps = norm_backward_steps(m, blocks, multiprocessors(dy.device))
    groups = ceil_div(m, NORM_BACKWARD_ROWS * steps)
    dz, amax, bias_sums = dy.new_empty((m, n)), dy.new_zeros(m + n, dtype=torch.int32), _bias_sums(dy, groups, n, bias)
    kernels.norm_backward_kernel[(groups * blocks.count,)](
        dy, normed, rstd, dz, amax[:m], amax[m:], bias_sums,
        m, n, dy.stride(0), normed.stride(0), blocks.count, blocks.code_scale,
        ROWS=NORM_BACKWARD_ROWS, STEPS=steps, COLS=blocks.room, WIDTH=blocks.width, WIDER=blocks.wider,
        ACTIVATION=activation, BIAS=bias, num_warps=8, launch_pdl=dy.is_cuda,
    )  # fmt: skip
    return dz, amax, bias_sums


@_norm_backward.register_fake
def _(
    dy: Tensor, normed: Tensor, rstd: Tensor, n: int, block: int, activation: str, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    m = dy.shape[0]
    groups = ceil_div(m, NORM_BACKWARD_ROWS * norm_backward_steps(m, NormBlocks(n, block), multiprocessors(dy.device)))
    return dy.new_empty((m, n)), dy.new_empty(m + n, dtype=torch.int32), _bias_sums(dy, groups, n, bias)


def _bias_sums(dy: Tensor, groups: int, n: int, wanted: bool) -> Tensor:
    return dy.new_empty((groups, n) if wanted else (0, 0), dtype=torch.float32)
