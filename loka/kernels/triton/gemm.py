"""Our FP8 GEMMs as ops of torch.

``gemm`` takes one scale for an operand or one for each of its rows. ``grouped_gemm`` takes row scales that also change
along the contraction, which is what a backward pass can write without seeing all of a row or column.
"""

import torch
from torch import Tensor

from loka.kernels.triton.tiles import ceil_div, choose_tiles, count, multiprocessors

SUMS_PER_PROGRAM = 1024


def gemm(
    a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor, m: int, n: int, k: int,
    *, out_dtype: torch.dtype, bias: Tensor | None = None, promoted: bool = True,
) -> Tensor:  # fmt: skip
    """a·bᵀ of the first m, n and k of two e4m3 matrices stored with a multiple of 16 columns; FP32 scales, one or one a row."""
    return torch.ops.loka.fp8_gemm(a_MK, b_NK, a_scale, b_scale, bias, m, n, k, out_dtype, promoted)


@torch.library.custom_op("loka::fp8_gemm", mutates_args=())
def _fp8_gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    m: int,
    n: int,
    k: int,
    out_dtype: torch.dtype,
    promoted: bool,
) -> Tensor:
    from loka.kernels.triton import gemm_kernels as kernels

    tiles = choose_tiles(m, n, k, multiprocessors(a.device), promoted=promoted)
    k_of_split = ceil_div(ceil_div(k, tiles.splits), tiles.depth) * tiles.depth
    splits = ceil_div(k, k_of_split)
    out = a.new_empty((m, n), dtype=out_dtype)
    part = out if splits == 1 else a.new_empty((splits, m, n), dtype=torch.float32)
    kernels.gemm_kernel[(count(tiles, m, n), splits)](
        descriptor(a, m, k, tiles.rows, tiles.depth), descriptor(b, n, k, tiles.cols, tiles.depth),
        a_scale, b_scale, bias, part, m, n, k, k_of_split,
        ROWS=tiles.rows, COLS=tiles.cols, DEPTH=tiles.depth,
        A_ROWWISE=a_scale.numel() > 1, B_ROWWISE=b_scale.numel() > 1,
        HAS_BIAS=bias is not None and splits == 1, PROMOTED=promoted,
        num_warps=tiles.warps, num_stages=tiles.stages, launch_pdl=a.is_cuda,
    )  # fmt: skip
    return out if splits == 1 else _add_splits(part, bias, out)


@_fp8_gemm.register_fake
def _(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    m: int,
    n: int,
    k: int,
    out_dtype: torch.dtype,
    promoted: bool,
) -> Tensor:
    return a.new_empty((m, n), dtype=out_dtype)


def grouped_gemm(
    a_MK: Tensor, b_NK: Tensor, a_scale_GM: Tensor, b_scale: Tensor | None, m: int, n: int,
    *, out_dtype: torch.dtype, b_factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """a·bᵀ where a row of a has a scale for each of G equal groups of the contraction, a power of two of 32 or more long.

    b's scale is the constant ``b_factor``, times ``b_scale``, one for each of its rows. b may have fewer columns than a: the
    rest are zeros.
    """
    return torch.ops.loka.fp8_grouped_gemm(a_MK, b_NK, a_scale_GM, b_scale, m, n, out_dtype, b_factor)


@torch.library.custom_op("loka::fp8_grouped_gemm", mutates_args=())
def _fp8_grouped_gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor | None,
    m: int,
    n: int,
    out_dtype: torch.dtype,
    b_factor: float,
) -> Tensor:
    from loka.kernels.triton import gemm_kernels as kernels

    groups, k = a_scale.shape[0], a.shape[1]
    length = k // groups
    depth = min(128, length)
    tiles = choose_tiles(m, n, k, multiprocessors(a.device), promoted=True)
    groups_of_split = ceil_div(groups, tiles.splits)
    splits = ceil_div(groups, groups_of_split)
    out = a.new_empty((m, n), dtype=out_dtype)
    part = out if splits == 1 else a.new_empty((splits, m, n), dtype=torch.float32)
    kernels.grouped_gemm_kernel[(count(tiles, m, n), splits)](
        descriptor(a, m, k, tiles.rows, depth), descriptor(b, n, min(k, b.shape[1]), tiles.cols, depth),
        a_scale, b_scale, part, m, n, groups, groups_of_split, b_factor,
        ROWS=tiles.rows, COLS=tiles.cols, DEPTH=depth, STEPS=length // depth, B_ROWWISE=b_scale is not None,
        num_warps=tiles.warps, num_stages=tiles.stages, launch_pdl=a.is_cuda,
    )  # fmt: skip
    return out if splits == 1 else _add_splits(part, None, out)


@_fp8_grouped_gemm.register_fake
def _(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor | None,
    m: int,
    n: int,
    out_dtype: torch.dtype,
    b_factor: float,
) -> Tensor:
    return a.new_empty((m, n), dtype=out_dtype)


def descriptor(codes: Tensor, rows: int, cols: int, tile_rows: int, tile_cols: int) -> object:
    """What TMA needs to load tiles of the first rows and columns of a matrix; the rest reads as 0."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(codes, [rows, cols], [codes.stride(0), 1], [tile_rows, tile_cols])


def _add_splits(part: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    from loka.kernels.triton import gemm_kernels as kernels

    kernels.add_splits_kernel[(ceil_div(out.numel(), SUMS_PER_PROGRAM),)](
        part, bias, out, out.numel(), out.shape[1], part.shape[0],
        HAS_BIAS=bias is not None, LENGTH=SUMS_PER_PROGRAM, num_warps=4, launch_pdl=out.is_cuda,
    )  # fmt: skip
    return out
