"""Our GEMM of e4m3 or int8 codes as an op of torch. It takes one scale for an operand or one for each of its rows."""

import torch
from torch import Tensor

from loka.kernels.ops import fake_of, op
from loka.kernels.triton.launch import launch, on_its_gpu
from loka.kernels.triton.tiles import ceil_div, choose_tiles, count, grid, multiprocessors

SUMS_PER_PROGRAM = 1024


def gemm(
    a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor | None, m: int, n: int, k: int,
    *, out_dtype: torch.dtype, bias: Tensor | None = None, promoted: bool = True, b_factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """a·bᵀ of the first m, n and k of two matrices of e4m3 or int8 codes, stored with a multiple of 16 columns. FP32 scales:
    one for all, or one a row. b's scale is the constant ``b_factor``, times ``b_scale`` where there is one.
    """
    return torch.ops.loka.scaled_gemm(a_MK, b_NK, a_scale, b_scale, bias, m, n, k, out_dtype, promoted, b_factor)


@op("scaled_gemm")
@on_its_gpu
def _scaled_gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor | None,
    bias: Tensor | None,
    m: int,
    n: int,
    k: int,
    out_dtype: torch.dtype,
    promoted: bool,
    b_factor: float,
) -> Tensor:
    from loka.kernels.triton import gemm_kernels as kernels

    int8 = a.dtype is torch.int8
    tiles = choose_tiles(m, n, k, multiprocessors(a.device), promoted=promoted, int8=int8)
    k_of_split = ceil_div(ceil_div(k, tiles.splits), tiles.depth) * tiles.depth
    splits = ceil_div(k, k_of_split)
    out = a.new_empty((m, n), dtype=out_dtype)
    part = out if splits == 1 else a.new_empty((splits, m, n), dtype=torch.float32)
    programs, persistent = grid(count(tiles, m, n), tiles, multiprocessors(a.device))
    launch(
        kernels.gemm_kernel, (programs, splits, 1),
        descriptor(a, m, k, tiles.rows, tiles.depth), descriptor(b, n, k, tiles.cols, tiles.depth),
        a_scale, b_scale, bias, part, m, n, k, k_of_split, b_factor,
        ROWS=tiles.rows, COLS=tiles.cols, DEPTH=tiles.depth,
        A_SCALES=scales_of(a_scale), B_SCALES=scales_of(b_scale),
        HAS_BIAS=bias is not None and splits == 1, PROMOTED=promoted, INT8=int8,
        PERSISTENT=persistent,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out if splits == 1 else _add_splits(part, bias, out)


def scales_of(scale: Tensor | None) -> str:
    return "none" if scale is None else "one" if scale.numel() == 1 else "rows"


@fake_of("scaled_gemm")
def _(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor | None,
    bias: Tensor | None,
    m: int,
    n: int,
    k: int,
    out_dtype: torch.dtype,
    promoted: bool,
    b_factor: float,
) -> Tensor:
    return a.new_empty((m, n), dtype=out_dtype)


def descriptor(codes: Tensor, rows: int, cols: int, tile_rows: int, tile_cols: int) -> object:
    """What TMA needs to load tiles of the first rows and columns of a matrix; the rest reads as 0."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(codes, [rows, cols], [codes.stride(0), 1], [tile_rows, tile_cols])


def _add_splits(part: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    from loka.kernels.triton import gemm_kernels as kernels

    launch(
        kernels.add_splits_kernel, (ceil_div(out.numel(), SUMS_PER_PROGRAM), 1, 1),
        part, bias, out, out.numel(), out.shape[1], part.shape[0],
        HAS_BIAS=bias is not None, LENGTH=SUMS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
    return out
