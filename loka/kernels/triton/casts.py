"""Casts to e4m3 in the fewest reads: one for static and tile scales, and for row scales of rows that fit a program; two
where a scale covers more than a program can see (tensorwise, and row scales of the transposed matrix)."""

from typing import NamedTuple

import torch
from torch import Tensor

from loka.core.errors import InvalidInput
from loka.core.recipe import Scaling
from loka.kernels.operand import OperandSpec, padded_size
from loka.kernels.triton.tiles import multiprocessors, power_of_two

WIDEST_ROW = 16384  # values of one row that a program holds in registers
NOT_WRITTEN = "none"
SCALINGS = (Scaling.STATIC, Scaling.TENSORWISE, Scaling.ROWWISE, Scaling.BLOCK_1X128, Scaling.BLOCK_128X128)
AMAX_TILE = (32, 512)


class Tile(NamedTuple):
    rows: int
    cols: int


class Target(NamedTuple):
    """One form of the matrix to write: its scaling, and its sizes with padding (outer axis, contracted axis)."""

    scaling: str
    outer: int
    contraction: int
    static_scale: float

    @classmethod
    def of(cls, spec: OperandSpec, outer: int, contraction: int) -> "Target":
        sizes = padded_size(outer, spec.outer_multiple), padded_size(contraction, spec.contraction_multiple)
        return cls(spec.scaling.value, *sizes, spec.static_scale or 1.0)

    @classmethod
    def none(cls) -> "Target":
        return cls(NOT_WRITTEN, 0, 0, 1.0)

    def has_scales_of(self, transposed: "Target") -> bool:
        """Whether a value has the same scale in both, whatever the values are."""
        whole = self.scaling in (Scaling.STATIC, Scaling.TENSORWISE, Scaling.BLOCK_128X128)
        return whole and self.scaling == transposed.scaling and self.static_scale == transposed.static_scale

    def empty(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for codes and scales, on the device of ``x``."""
        codes = x.new_empty((self.outer, self.contraction), dtype=torch.float8_e4m3fn)
        blocks = -(-self.contraction // 128)
        if self.scaling == Scaling.BLOCK_1X128:  # with the outer axis contiguous, as cuBLAS reads them
            return codes, x.new_empty((blocks, self.outer), dtype=torch.float32).t()
        shape = {
            NOT_WRITTEN: (0, 0),
            Scaling.ROWWISE: (self.outer, 1),
            Scaling.BLOCK_128X128: (-(-self.outer // 128), blocks),
        }.get(self.scaling, (1, 1))
        return codes, x.new_empty(shape, dtype=torch.float32)


def cast_tile(scalings: tuple[str, str]) -> Tile:
    """What was fastest on an H200 at all sizes; scales of 128 values need them in one tile."""
    if any(scaling in ("1x128", "128x128") for scaling in scalings):
        return Tile(128, 128)
    return Tile(64, 128) if "rowwise" in scalings else Tile(64, 64)


def rows_at_once(cols: int) -> int:
    """How many whole rows a program casts: about 8,192 values keep enough loads in flight without filling registers."""
    return max(1, min(16, 8192 // power_of_two(cols)))


def tiles_down(rows: int, cols: int, sms: int) -> int:
    """How many tiles a program of the amax pass goes down: as many as leave four programs for every multiprocessor."""
    row_tiles, col_tiles = -(-rows // AMAX_TILE[0]), -(-cols // AMAX_TILE[1])
    return max(1, min(row_tiles, row_tiles * col_tiles // (4 * sms)))


def reads(plain: str, trans: str, cols: int) -> int:
    """How often a cast reads the matrix."""
    in_one_read = ("static", "1x128", "128x128", NOT_WRITTEN)
    if plain == "rowwise" and trans == NOT_WRITTEN:
        return 1 if cols <= WIDEST_ROW else 2
    return 1 if plain in in_one_read and trans in in_one_read else 2


def cast_matrix(x: Tensor, plain: Target, trans: Target, amax: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of ``x`` in its own order of axes and transposed; empty tensors for a ``Target.none()``.

    ``amax`` are the amaxes of rows, then of columns, where whoever wrote ``x`` has seen them: then it is read only once.
    """
    if trans.contraction % 4:
        raise InvalidInput(f"transposed codes are written four at a time: pad {trans.contraction} rows to a multiple of 4")
    return torch.ops.loka.cast_e4m3(x, amax, *plain, *trans)


@torch.library.custom_op("loka::cast_e4m3", mutates_args=())
def _cast_e4m3(
    x: Tensor,
    amax: Tensor | None,
    plain_scaling: str,
    plain_outer: int,
    plain_contraction: int,
    plain_static: float,
    trans_scaling: str,
    trans_outer: int,
    trans_contraction: int,
    trans_static: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plain = Target(plain_scaling, plain_outer, plain_contraction, plain_static)
    trans = Target(trans_scaling, trans_outer, trans_contraction, trans_static)
    codes = *plain.empty(x), *trans.empty(x)
    write_codes(x, plain, trans, codes, amax)
    return codes


def write_codes(
    x: Tensor, plain: Target, trans: Target, codes: tuple[Tensor, Tensor, Tensor, Tensor], amax: Tensor | None = None
) -> None:
    """``cast_matrix`` into tensors that are there, of the shapes it would return; for eager callers."""
    from loka.kernels.triton import cast_kernels as kernels

    plain_codes, plain_scale, trans_codes, trans_scale = codes
    x = x if x.stride(1) == 1 else x.contiguous()
    (rows, cols), row_stride = x.shape, x.stride(0)
    if plain.scaling == "rowwise" and trans.scaling == NOT_WRITTEN and amax is None and cols <= WIDEST_ROW:
        step = rows_at_once(plain.contraction)
        kernels.rowwise_kernel[(-(-plain.outer // step),)](
            x, plain_codes, plain_scale, rows, cols, row_stride, plain.outer, plain.contraction,
            ROWS=step, COLS=max(16, power_of_two(plain.contraction)), num_warps=8 if plain.contraction > 1024 else 4,
            launch_pdl=x.is_cuda,
        )  # fmt: skip
        return

    sms = multiprocessors(x.device)
    scalings = plain.scaling, trans.scaling
    if amax is None:
        row_amax, col_amax, all_amax = _amaxes(x, scalings, sms)
    else:
        row_amax, col_amax, all_amax = amax[:rows], amax[rows:], amax
    tile = cast_tile(scalings)
    tiles_across = -(-max(plain.contraction, trans.outer) // tile.cols)
    tiles = tiles_across * -(-max(plain.outer, trans.contraction) // tile.rows)
    kernels.cast_kernel[(tiles,)](
        x, plain_codes, plain_scale, trans_codes.flatten().view(torch.int32), trans_scale, row_amax, col_amax, all_amax,
        rows, cols, row_stride, plain.outer, plain.contraction, trans.outer, trans.contraction,
        plain.static_scale, trans.static_scale, tiles_across,
        ROWS=tile.rows, COLS=tile.cols, PLAIN=plain.scaling, TRANS=trans.scaling, SAME=plain.has_scales_of(trans),
        ALIGNED=trans.contraction % 16 == 0, num_warps=8 if tile.rows == 128 else 4, launch_pdl=x.is_cuda,
    )  # fmt: skip


def _amaxes(x: Tensor, scalings: tuple[str, str], sms: int) -> tuple[Tensor, Tensor, Tensor]:
    """Amaxes of rows, columns and all of ``x``: of each, only what ``scalings`` need. One read, or none."""
    from loka.kernels.triton import cast_kernels as kernels

    (rows, cols), (tile_rows, tile_cols) = x.shape, AMAX_TILE
    of_rows, of_cols, of_all = scalings[0] == "rowwise", scalings[1] == "rowwise", "tensorwise" in scalings
    sizes = [rows if of_rows else 0, cols if of_cols else 0, 1 if of_all else 0]
    row_amax, col_amax, all_amax = x.new_zeros(sum(sizes), dtype=torch.int32).split(sizes)  # zeroed in one launch
    if of_rows or of_cols or of_all:
        down = tiles_down(rows, cols, sms)
        kernels.amax_kernel[(-(-rows // (down * tile_rows)) * -(-cols // tile_cols),)](
            x, row_amax, col_amax, all_amax, rows, cols, x.stride(0), down,
            ROWS=tile_rows, COLS=tile_cols, OF_ROWS=of_rows, OF_COLS=of_cols, OF_ALL=of_all, num_warps=8,
            launch_pdl=x.is_cuda,
        )  # fmt: skip
    return row_amax, col_amax, all_amax


@_cast_e4m3.register_fake
def _(
    x: Tensor,
    amax: Tensor | None,
    plain_scaling: str,
    plain_outer: int,
    plain_contraction: int,
    plain_static: float,
    trans_scaling: str,
    trans_outer: int,
    trans_contraction: int,
    trans_static: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plain = Target(plain_scaling, plain_outer, plain_contraction, plain_static)
    trans = Target(trans_scaling, trans_outer, trans_contraction, trans_static)
    return *plain.empty(x), *trans.empty(x)
