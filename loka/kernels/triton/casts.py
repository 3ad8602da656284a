"""Casts to e4m3, and of rows to int8, in few reads. One read is enough for static scales, for those of square tiles, and for
row scales of rows that fit a program. It takes one more where a scale covers values that no single program sees (tensorwise,
and row scales of the transposed matrix)."""

from typing import NamedTuple

import torch
from torch import Tensor

from loka.core.errors import InvalidInput
from loka.core.recipe import Scaling
from loka.kernels.operand import OperandSpec, padded_size
from loka.kernels.ops import fake_of, op
from loka.kernels.triton.launch import launch, on_its_gpu
from loka.kernels.triton.tiles import power_of_two

WIDEST_ROW = 16384  # values of one row that a program holds in registers
NOT_WRITTEN = "none"
SCALINGS = (Scaling.STATIC, Scaling.TENSORWISE, Scaling.ROWWISE, Scaling.BLOCK_1X128, Scaling.BLOCK_128X128)
WIDEST_AMAX_TILE = 1024
COLS_OF_WARP = 256  # 32 threads of 16 bytes in bf16
FEW_AMAXES, AMAXES_AT_ONCE = 128, 1024
IF_OUTGROWN_PROGRAMS = 256  # of a pass that has nothing to do in nearly every call
LARGEST_AT_ONCE = 8192  # by one program that does nothing else
STRIPS_AT_ONCE = (256, 32)  # read by a program, and of how many rows or columns
SMALL = 2**21  # values of a matrix at most
MOST_OVERLAPPED = 2**25  # values that several kernels of a cast read at once; with more they take each other's bandwidth


Codes = tuple[Tensor, Tensor, Tensor, Tensor]  # codes and scales of the matrix as it lies, and of its transpose

# Of rows; of columns; and a few, the largest of which is the matrix's. Each is empty where no scale is made from it.
Amaxes = tuple[Tensor, Tensor, Tensor]


class Tile(NamedTuple):
    rows: int
    cols: int
    warps: int


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


def cast_tile(plain: str, trans: str, *, small: bool = False) -> Tile:
    """What was fastest on an H200 at all sizes, or of a ``small`` matrix whose amaxes a pass before has found. Scales of 128
    values need these in one tile."""
    if trans == "128x128" and plain in ("128x128", NOT_WRITTEN):
        return Tile(128, 128, warps=4)
    if (plain, trans) == ("1x128", NOT_WRITTEN):
        return Tile(64, 128, warps=4)
    if (plain, trans) == (NOT_WRITTEN, "1x128"):
        return Tile(128, 64, warps=4)
    if any(scaling in ("1x128", "128x128") for scaling in (plain, trans)):
        return Tile(128, 128, warps=8)
    if small and trans == "tensorwise":  # in 0.65 to 0.9 of the time; a large one takes up to 1.2 times as long by these
        return Tile(32, 128, warps=8) if plain == NOT_WRITTEN else Tile(32, 64, warps=4)
    return Tile(64, 128, warps=4) if "rowwise" in (plain, trans) else Tile(64, 64, warps=4)


def rows_at_once(cols: int) -> int:
    """How many whole rows a program casts: about 4,096 values keep enough loads in flight without filling registers."""
    return max(1, min(16, 4096 // power_of_two(cols)))


def amax_tile(rows: int, cols: int, *, of_cols: bool) -> Tile:
    """The tile of the pass for amaxes. For amaxes of columns it is as wide as the matrix, within limits, with a warp for every
    COLS_OF_WARP columns. Otherwise eight warps share one: with the other kind a cast with one scale took 1.14 times as long on
    an H200. Where one smaller tile a program is enough, those leave room for the kernel that follows: the cast took 0.8 to 0.95
    of the time."""
    if not of_cols:
        small = Tile(16, 256, warps=4)
        return small if tiles_down(rows, cols, small) == 1 else Tile(32, 512, warps=8)
    wide = max(COLS_OF_WARP, min(WIDEST_AMAX_TILE, power_of_two(cols)))
    return Tile(16, wide, warps=wide // COLS_OF_WARP)


def tiles_down(rows: int, cols: int, tile: Tile) -> int:
    """How many tiles a program of the amax pass goes down: as few as leave at most AMAXES_AT_ONCE programs, or all of them."""
    row_tiles, col_tiles = -(-rows // tile.rows), -(-cols // tile.cols)
    return -(-row_tiles // max(1, AMAXES_AT_ONCE // col_tiles))


def cast_matrix(x: Tensor, plain: Target, trans: Target) -> Codes:
    """Codes and scales of ``x`` in its own order of axes and transposed; empty tensors for a ``Target.none()``."""
    *codes, _ = _cast_op(x, plain, trans, summed=False)
    return tuple(codes)  # pyrefly: ignore[bad-return]


def cast_and_sum(x: Tensor, plain: Target, trans: Target) -> tuple[Codes, Tensor]:
    """The same, and the sums of the columns of ``x`` in FP32: out of the same read, or in one more for row scales alone."""
    *codes, sum_C = _cast_op(x, plain, trans, summed=True)
    return tuple(codes), sum_C  # pyrefly: ignore[bad-return]


def _cast_op(x: Tensor, plain: Target, trans: Target, *, summed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if trans.contraction % 4:
        raise InvalidInput(f"transposed codes are written four at a time: pad {trans.contraction} rows to a multiple of 4")
    return torch.ops.loka.cast_e4m3(x, *plain, *trans, summed)


@op("cast_e4m3")
def _cast_e4m3(
    x: Tensor,
    plain_scaling: str,
    plain_outer: int,
    plain_contraction: int,
    plain_static: float,
    trans_scaling: str,
    trans_outer: int,
    trans_contraction: int,
    trans_static: float,
    summed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    plain = Target(plain_scaling, plain_outer, plain_contraction, plain_static)
    trans = Target(trans_scaling, trans_outer, trans_contraction, trans_static)
    codes = *plain.empty(x), *trans.empty(x)
    if not summed:
        write_codes(x, plain, trans, codes)
        return *codes, _empty_sum(x, summed)
    sums_SC = x.new_empty((_strips_summed(plain, trans, x.shape[1]), x.shape[1]), dtype=torch.float32)
    write_codes(x, plain, trans, codes, sums_SC)
    return *codes, _over_strips(sums_SC, add=True) if len(sums_SC) else x.sum(0, dtype=torch.float32)


def _empty_sum(x: Tensor, summed: bool) -> Tensor:
    return x.new_empty(x.shape[1] if summed else 0, dtype=torch.float32)


def _strips_summed(plain: Target, trans: Target, cols: int) -> int:
    """How many warps sum the columns of their rows: none where everything is written by programs that hold whole rows."""
    if _are_apart(plain, trans, cols):
        plain = Target.none()
    tile = cast_tile(plain.scaling, trans.scaling)
    return tile.warps * -(-max(plain.outer, trans.contraction) // tile.rows)


@on_its_gpu
def write_codes(x: Tensor, plain: Target, trans: Target, codes: Codes, sums_SC: Tensor | None = None) -> None:
    """``cast_matrix`` into existing tensors, of the shapes it would return; for eager callers."""
    x = x if x.stride(1) == 1 else x.contiguous()
    overlapped, nothing = x.numel() <= MOST_OVERLAPPED, Target.none()
    if not _are_apart(plain, trans, x.shape[1]):
        amaxes = find_amaxes(x, plain, trans, more=overlapped)
        launch_cast(x, plain, trans, codes, amaxes, sums_SC=sums_SC, early=overlapped and any(map(torch.numel, amaxes)))
        return
    none, transposed = x.new_empty(0, dtype=torch.int32), (*nothing.empty(x), *codes[2:])
    if plain.scaling == Scaling.ROWWISE:
        programs = -(-plain.outer // rows_at_once(plain.contraction))
        noted = x.new_empty(programs if trans.scaling == Scaling.TENSORWISE else 0, dtype=torch.int32)
        launch_rowwise(x, plain, codes[0], codes[1], noted)
        if noted.numel():
            launch_cast(x, nothing, trans, transposed, (none, none, few_with_largest(noted)), sums_SC=sums_SC)
        elif trans.scaling != NOT_WRITTEN:
            write_codes(x, nothing, trans, transposed, sums_SC)
    else:
        launch_cast(x, plain, nothing, (*codes[:2], *nothing.empty(x)), (none, none, none), more=overlapped)
        launch_cast(x, nothing, trans, transposed, (none, none, none), sums_SC=sums_SC, early=overlapped)


def are_by_rows(plain: Target, cols: int) -> bool:
    """Whether programs that hold whole rows write the matrix as it lies."""
    return plain.scaling == Scaling.ROWWISE and cols <= WIDEST_ROW


def _are_apart(plain: Target, trans: Target, cols: int) -> bool:
    """Whether the matrix as it lies is written in a pass of its own, before any transpose: with row scales by whole rows, and
    where both have 1×128 scales, for which small tiles are enough. In one pass it took 1.2 to 1.7 times as long on an H200."""
    return are_by_rows(plain, cols) or plain.scaling == trans.scaling == Scaling.BLOCK_1X128


def launch_rowwise(
    x: Tensor, plain: Target, codes: Tensor, scale: Tensor, noted: Tensor, *, power: bool = False, more: bool = False
) -> None:
    """Cast each row, which must fit a program, by its own amax, or with ``power`` by the smallest power of two that keeps it in
    the format. ``noted``, if it has room, gets the largest amax of each program. ``more``: what reads the codes follows; to
    what reads the matrix again an early start is no help, it took up to 1.2 times as long on an H200."""
    from loka.kernels.triton import cast_kernels as kernels

    (rows, cols), step = x.shape, rows_at_once(plain.contraction)
    launch(
        kernels.rowwise_kernel, (-(-plain.outer // step), 1, 1),
        x, codes, scale, noted, rows, cols, x.stride(0), plain.outer, plain.contraction,
        ROWS=step, COLS=max(16, power_of_two(plain.contraction)), NOTED=noted.numel() > 0, POWER=power, MORE=more,
        num_warps=8 if plain.contraction > 1024 else 4,
    )  # fmt: skip


def few_with_largest(bits: Tensor) -> Tensor:
    """``bits`` if they are few, otherwise the largest of them alone: every program of a pass reads all that this returns."""
    from loka.kernels.triton import cast_kernels as kernels

    if bits.numel() <= AMAXES_AT_ONCE:
        return bits
    largest = bits.new_empty(1)
    launch(kernels.largest_kernel, (1, 1, 1), bits, largest, bits.numel(), AT_ONCE=LARGEST_AT_ONCE, num_warps=8)
    return largest


def launch_cast(
    x: Tensor,
    plain: Target,
    trans: Target,
    codes: Codes,
    amaxes: Amaxes,
    seen: Amaxes | None = None,
    outgrown: Tensor | None = None,
    sums_SC: Tensor | None = None,
    *,
    early: bool = False,
    more: bool = False,
) -> None:
    """Write codes with scales from ``amaxes``. ``seen``, if given, are raised to the matrix's own amaxes; sums of its columns
    by strips go to ``sums_SC``, if that has room. With ``outgrown``, nothing is done unless one of its flags is set. ``early``,
    ``more``: another kernel of the same cast came before, or follows."""
    from loka.kernels.triton import cast_kernels as kernels

    (rows, cols), (plain_codes, plain_scale, trans_codes, trans_scale) = x.shape, codes
    (row_amax, col_amax, all_amax), (seen_rows, seen_cols, seen_all) = amaxes, seen or amaxes
    words = trans_codes if trans.scaling == NOT_WRITTEN else trans_codes.view(torch.int32)
    summed = sums_SC is not None and len(sums_SC) > 0  # its strips are of tiles for any size
    tile = cast_tile(plain.scaling, trans.scaling, small=early and x.numel() <= SMALL and not summed)
    tiles_across = -(-max(plain.contraction, trans.outer) // tile.cols)
    tiles = tiles_across * -(-max(plain.outer, trans.contraction) // tile.rows)
    launch(
        kernels.cast_kernel, (tiles if outgrown is None else min(tiles, IF_OUTGROWN_PROGRAMS), 1, 1),
        x, plain_codes, plain_scale, words, trans_scale, row_amax, col_amax, all_amax, all_amax.numel(),
        seen_rows, seen_cols, seen_all, sums_SC,
        all_amax if outgrown is None else outgrown, 0 if outgrown is None else outgrown.numel(),
        rows, cols, x.stride(0), plain.outer, plain.contraction, trans.outer, trans.contraction,
        plain.static_scale, trans.static_scale, tiles, tiles_across,
        ROWS=tile.rows, COLS=tile.cols, PLAIN=plain.scaling, TRANS=trans.scaling, SAME=plain.has_scales_of(trans),
        ALL_AT_ONCE=next((count for count in (1, FEW_AMAXES) if all_amax.numel() <= count), AMAXES_AT_ONCE),
        ALIGNED=trans.contraction % 16 == 0, SEEN=0 if seen is None else max(1, seen_all.numel()),
        SUMS=tile.warps if summed else 0, IF_OUTGROWN=outgrown is not None,
        EARLY=early, MORE=more, num_warps=tile.warps,
    )  # fmt: skip


def amax_sizes(x: Tensor, plain: Target, trans: Target) -> list[int]:
    """How many amaxes the targets' scales are made from: of rows, of columns, and of the whole matrix."""
    scalings = plain.scaling, trans.scaling
    return [x.shape[0] * (scalings[0] == "rowwise"), x.shape[1] * (scalings[1] == "rowwise"), int("tensorwise" in scalings)]


@on_its_gpu
def find_amaxes(x: Tensor, plain: Target, trans: Target, *, more: bool = False) -> Amaxes:
    """The amaxes of ``x`` that the targets need: of its rows, of its columns, of all of it. One read, or none. ``more``:
    another kernel of the same cast follows."""
    from loka.kernels.triton import cast_kernels as kernels

    x = x if x.stride(1) == 1 else x.contiguous()
    (rows, cols), (of_rows, of_cols, of_all) = x.shape, (size > 0 for size in amax_sizes(x, plain, trans))
    none = x.new_empty(0, dtype=torch.int32)
    if not (of_rows or of_cols or of_all):
        return none, none, none
    tile = amax_tile(rows, cols, of_cols=of_cols)
    down = tiles_down(rows, cols, tile)
    row_strips, col_strips = -(-rows // (down * tile.rows)), -(-cols // tile.cols)
    row_amaxes = none.new_empty((col_strips, rows)) if of_rows else none
    col_amaxes = none.new_empty((row_strips, cols)) if of_cols else none
    all_amaxes = none.new_empty(row_strips * col_strips) if of_all else none
    launch(
        kernels.amax_kernel, (row_strips * col_strips, 1, 1),
        x, row_amaxes, col_amaxes, all_amaxes, rows, cols, x.stride(0), down,
        ROWS=tile.rows, COLS=tile.cols, OF_ROWS=of_rows, OF_COLS=of_cols, OF_ALL=of_all, ONE_TILE=down == 1,
        MORE=more, num_warps=tile.warps,
    )  # fmt: skip
    return _over_strips(row_amaxes, add=False), _over_strips(col_amaxes, add=False), all_amaxes


@on_its_gpu
def _over_strips(strips: Tensor, *, add: bool) -> Tensor:
    """For each row or column the sum over strips (strips × rows or columns), or the largest of their magnitudes."""
    from loka.kernels.triton import cast_kernels as kernels

    if strips.numel() == 0 or len(strips) == 1:
        return strips.flatten()
    (count, size), (at_once, length) = strips.shape, STRIPS_AT_ONCE
    result = strips.new_empty(size)
    launch(
        kernels.over_strips_kernel, (-(-size // length), 1, 1), strips, result, count, size,
        STRIPS=min(at_once, power_of_two(count)), LENGTH=length, SUM=add, num_warps=8,
    )  # fmt: skip
    return result


def cast_int8_rows(x: Tensor, outer: int, contraction: int) -> tuple[Tensor, Tensor]:
    """int8 codes and a scale for each row, which must fit a program, with padding to ``outer`` rows of ``contraction``."""
    return torch.ops.loka.cast_int8_rows(x, outer, contraction)


@op("cast_int8_rows")
@on_its_gpu
def _cast_int8_rows(x: Tensor, outer: int, contraction: int) -> tuple[Tensor, Tensor]:
    codes, scale = _empty_int8_rows(x, outer, contraction)
    write_codes(x, Target("rowwise", outer, contraction, 1.0), Target.none(), (codes, scale, *Target.none().empty(x)))
    return codes, scale


@fake_of("cast_int8_rows")
def _empty_int8_rows(x: Tensor, outer: int, contraction: int) -> tuple[Tensor, Tensor]:
    return x.new_empty((outer, contraction), dtype=torch.int8), x.new_empty((outer, 1), dtype=torch.float32)


@fake_of("cast_e4m3")
def _(
    x: Tensor,
    plain_scaling: str,
    plain_outer: int,
    plain_contraction: int,
    plain_static: float,
    trans_scaling: str,
    trans_outer: int,
    trans_contraction: int,
    trans_static: float,
    summed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    plain = Target(plain_scaling, plain_outer, plain_contraction, plain_static)
    trans = Target(trans_scaling, trans_outer, trans_contraction, trans_static)
    return *plain.empty(x), *trans.empty(x), _empty_sum(x, summed)
