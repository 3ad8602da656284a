"""The gradient of norm and activation as ops of torch: dz as the codes that dgrad and wgrad read, or in high precision.

Axes:  M rows of the batch,  N features,  B norm blocks,  G groups of rows.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from loka.kernels.operand import padded_size
from loka.kernels.ops import fake_of, op
from loka.kernels.triton.block import CODES_DTYPE, norm_blocks
from loka.kernels.triton.launch import launch, on_its_gpu
from loka.kernels.triton.share import ScaledCodes, share_scales
from loka.kernels.triton.tiles import (
    GRADIENT_ROWS,
    Columns,
    NormBlocks,
    ceil_div,
    gradient_cols,
    gradient_steps,
)


class GradientCodes(NamedTuple):
    """dz as e4m3 codes, stored with a multiple of 16 columns; what was not asked for has no elements.

    As dgrad reads it, each row has a scale, a power of two. Transposed, as wgrad reads it, all have one: a power of two times
    the scale of x, at the beginning of the first row of ``wgrad_scales``. The second row begins with 1, for the other operand.
    """

    codes_MN: Tensor
    scale_M: Tensor
    codes_NM: Tensor
    wgrad_scales: Tensor
    bias_N: Tensor


@dataclass(frozen=True)
class _Grid:
    """How programs share a matrix of ``rows`` × ``cols``: each has one block of columns, and goes ``steps`` tiles down."""

    rows: int
    cols: int
    tile_cols: int
    columns: Columns
    steps: int

    @classmethod
    def of(cls, matrix: Tensor, blocks: NormBlocks | None) -> "_Grid":
        rows, cols = matrix.shape
        tile_cols = gradient_cols(cols, blocks)
        columns = Columns.of(cols, blocks, tile_cols)
        return cls(rows, cols, tile_cols, columns, gradient_steps(rows, columns))

    @property
    def groups(self) -> int:
        """How many groups of rows there are; a program goes down one of them."""
        return ceil_div(self.rows, GRADIENT_ROWS * self.steps)

    @property
    def programs(self) -> int:
        return self.groups * self.columns.count

    def scratch(self, codes: Tensor, like: Tensor) -> ScaledCodes:
        """Memory for the first pass; ``codes`` is used if it has room."""
        return ScaledCodes(
            codes if codes.numel() else codes.new_empty((self.rows, padded_size(self.cols, 16))),
            like.new_empty((self.columns.count, self.rows), dtype=torch.int32),
            like.new_empty(self.programs, dtype=torch.int32),
        )


def block_gradient(
    dy_MN: Tensor, u_MN: Tensor, rstd_BM: Tensor, blocks: NormBlocks | None, activation: str,
    *, rows: bool, transposed: bool, bias: bool, x_factor: float,
) -> GradientCodes:  # fmt: skip
    """dz from dy and what forward saved, in the forms asked for, and the bias's gradient.

    Without a norm, u may be anything at which the activation has the same slope, such as relu's y; without an activation as
    well, it is not read.
    """
    block = None if blocks is None else blocks.block
    codes_MN, scale_M, codes_NM, wgrad_scales, bias_sums_GN = torch.ops.loka.block_gradient(
        dy_MN, u_MN, rstd_BM, block, activation, rows, transposed, bias, x_factor
    )
    return GradientCodes(codes_MN, scale_M, codes_NM, wgrad_scales, bias_sums_GN.sum(0))


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
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    blocks = norm_blocks(dy.shape[1], block)
    grid = _Grid.of(dy, blocks)
    out = codes, scale, codes_t, wgrad_scales, bias_sums = _outputs(dy, grid.groups, rows, transposed, bias)
    made = grid.scratch(codes, dy)
    _launch_gradient(grid, dy, u, rstd, dy.new_empty(0), made, bias_sums, blocks, activation)
    if rows or transposed:
        share_scales(
            made, grid.columns, grid.tile_cols, dy.shape, scale, codes_t, wgrad_scales, norm=block is not None, factor=x_factor
        )
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
    return _outputs(dy, _Grid.of(dy, norm_blocks(dy.shape[1], block)).groups, rows, transposed, bias)


def norm_gradient(dy_MN: Tensor, u_MN: Tensor, rstd_BM: Tensor, blocks: NormBlocks) -> Tensor:
    """dz of a norm that stands alone, in dy's dtype."""
    return torch.ops.loka.norm_gradient(dy_MN, u_MN, rstd_BM, blocks.block)


@op("norm_gradient")
@on_its_gpu
def _norm_gradient(dy: Tensor, u: Tensor, rstd: Tensor, block: int) -> Tensor:
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    dz, blocks = _empty_gradient(dy, u, rstd, block), NormBlocks(dy.shape[1], block)
    nothing = dy.new_empty(0, dtype=torch.int32)
    made, bias_sums = ScaledCodes(dy.new_empty(0, dtype=CODES_DTYPE), nothing, nothing), dy.new_empty(0, dtype=torch.float32)
    _launch_gradient(_Grid.of(dy, blocks), dy, u, rstd, dz, made, bias_sums, blocks, "none")
    return dz


@fake_of("norm_gradient")
def _empty_gradient(dy: Tensor, u: Tensor, rstd: Tensor, block: int) -> Tensor:
    return dy.new_empty(dy.shape)


def _launch_gradient(
    grid: _Grid, dy: Tensor, u: Tensor, rstd: Tensor, dz: Tensor, made: ScaledCodes, bias_sums: Tensor,
    blocks: NormBlocks | None, activation: str,
) -> None:  # fmt: skip
    """Write dz into ``dz`` if that has room, otherwise as codes into ``made``."""
    from loka.kernels.triton import gradient_kernels as kernels

    launch(
        kernels.gradient_kernel, (grid.programs, 1, 1),
        dy, u, rstd, dz, *made, bias_sums,
        grid.rows, grid.cols, dy.stride(0), u.stride(0), padded_size(grid.cols, 16), grid.columns.count,
        blocks.code_scale if blocks and u.dtype is CODES_DTYPE else 1.0,
        NORM=blocks is not None, ROWS=GRADIENT_ROWS, STEPS=grid.steps, COLS=grid.tile_cols,
        WIDTH=grid.columns.width, WIDER=grid.columns.wider,
        ACTIVATION=activation, HIGH=dz.numel() > 0, BIAS=bias_sums.numel() > 0, EIGHTS=u.stride(0) % 8 == 0, num_warps=4,
    )  # fmt: skip


def _outputs(
    dy: Tensor, groups: int, rows: bool, transposed: bool, bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    m, n = dy.shape
    return (
        dy.new_empty((m, padded_size(n, 16)) if rows else (0,), dtype=CODES_DTYPE),
        dy.new_empty(m if rows else 0, dtype=torch.float32),
        dy.new_empty((n, padded_size(m, 16)) if transposed else (0,), dtype=CODES_DTYPE),
        dy.new_empty((2, 4) if transposed else (0,), dtype=torch.float32),  # rows of 16 bytes, as cuBLAS wants a scale aligned
        dy.new_empty((groups, n) if bias else (0, 0), dtype=torch.float32),
    )
