"""Casts to e4m3, and of rows to int8, in the fewest reads: one for static and tile scales, and for row scales of rows that fit
a program; two where a scale covers more than a program can see (tensorwise, and row scales of the transposed matrix)."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from loka.core.errors import InvalidInput
from loka.core.recipe import Scaling
from loka.kernels.operand import OperandSpec, padded_size
from loka.kernels.ops import fake_of, op
from loka.kernels.triton.launch import Again, launch, on_its_gpu, recorded
from loka.kernels.triton.tiles import multiprocessors, power_of_two

WIDEST_ROW = 16384  # values of one row that a program holds in registers
NOT_WRITTEN = "none"
SCALINGS = (Scaling.STATIC, Scaling.TENSORWISE, Scaling.ROWWISE, Scaling.BLOCK_1X128, Scaling.BLOCK_128X128)
_IN_ONE_READ = (Scaling.STATIC, Scaling.BLOCK_1X128, Scaling.BLOCK_128X128, NOT_WRITTEN)  # a tile sees all its scales need
AMAX_TILE = (32, 512)
REMEMBERED_AT_ONCE = AMAXES_AT_ONCE = 1024
LARGEST_AT_ONCE = 8192  # by one program that does nothing else


Amaxes = tuple[Tensor, Tensor, Tensor]  # of rows, of columns, of all, each only as far as a scale is made from it


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
    if plain == "rowwise" and trans == NOT_WRITTEN:
        return 1 if cols <= WIDEST_ROW else 2
    return 1 if plain in _IN_ONE_READ and trans in _IN_ONE_READ else 2


def cast_matrix(x: Tensor, plain: Target, trans: Target) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of ``x`` in its own order of axes and transposed; empty tensors for a ``Target.none()``."""
    if trans.contraction % 4:
        raise InvalidInput(f"transposed codes are written four at a time: pad {trans.contraction} rows to a multiple of 4")
    return torch.ops.loka.cast_e4m3(x, *plain, *trans)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plain = Target(plain_scaling, plain_outer, plain_contraction, plain_static)
    trans = Target(trans_scaling, trans_outer, trans_contraction, trans_static)
    codes = *plain.empty(x), *trans.empty(x)
    write_codes(x, plain, trans, codes)
    return codes


@on_its_gpu
def write_codes(x: Tensor, plain: Target, trans: Target, codes: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    """``cast_matrix`` into tensors that are there, of the shapes it would return; for eager callers."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, cols = x.shape
    if _row_by_row(plain, trans, cols):
        noted = x.new_empty(rows if trans.scaling == Scaling.TENSORWISE else 0, dtype=torch.int32)
        launch_rowwise(x, plain, codes[0], codes[1], noted)
        if trans.scaling != NOT_WRITTEN:
            largest = few_with_largest(noted)
            _launch_cast(x, Target.none(), trans, (*Target.none().empty(x), *codes[2:]), (largest, largest, largest))
        return
    _launch_cast(x, plain, trans, codes, _amaxes(x, plain, trans))


def _row_by_row(plain: Target, trans: Target, cols: int) -> bool:
    """Whether row scales of the matrix as it is are written by themselves, whole rows in a program, beside a transposed form
    that needs no amaxes, or the largest of those rows: together they would need a pass for amaxes. On an H200 such a pair took
    1.3 to 1.7 times as long on average, of static and tile scales."""
    return plain.scaling == "rowwise" and trans.scaling in (*_IN_ONE_READ, Scaling.TENSORWISE) and cols <= WIDEST_ROW


def _needs_no_amaxes(plain: Target, trans: Target, cols: int) -> bool:
    """Whether ``write_codes`` finds all scales on its way, without a pass for amaxes."""
    return reads(plain.scaling, trans.scaling, cols) == 1 or _row_by_row(plain, trans, cols)


def remember_amax(x: Tensor, plain: Target, trans: Target) -> Tensor:
    """Memory for ``rewriting``: twice the amaxes of ``x`` that the targets' scales are made from, zeros to see others, and
    room for what outgrew them."""
    if remembered(x, plain, trans) == 0:
        return x.new_empty((3, 0), dtype=torch.int32)
    amax = torch.cat(_amaxes(x, plain, trans)).view(torch.float32)
    last = torch.where(amax.isfinite(), (2 * amax).clamp(max=3e38), amax).view(torch.int32)
    return torch.stack([last, torch.zeros_like(last), torch.zeros_like(last)])


def remembered(x: Tensor, plain: Target, trans: Target) -> int:
    """How many amaxes ``remember_amax`` keeps: none where row scales are written by themselves."""
    return 0 if _row_by_row(plain, trans, x.shape[1]) else sum(amax_sizes(x, plain, trans))


def rewriting(
    x: Tensor, plain: Target, trans: Target, codes: tuple[Tensor, Tensor, Tensor, Tensor], memory: Tensor | None = None
) -> Callable[[], None]:
    """``rewrite_codes`` of the same tensors as often as it is called."""
    # Launches alone would set no amaxes back to 0.
    are_all = memory is not None or _needs_no_amaxes(plain, trans, x.shape[1])
    return repeating(lambda: rewrite_codes(x, plain, trans, codes, memory), x, codes, are_all=are_all)


def repeating(
    write: Callable[[], None], x: Tensor, codes: tuple[Tensor, Tensor, Tensor, Tensor], *, are_all: bool = True
) -> Callable[[], None]:
    """``write`` of the codes of ``x`` as often as it is called: after the first time by its launches alone, without the Python
    that led to them, if they ``are_all`` it does and it need not copy x."""
    launches: tuple[Again, ...] = ()

    @on_its_gpu
    def run(x: Tensor) -> None:
        nonlocal launches
        if launches:
            for again in launches:
                again()
            tell_autograd(codes)
        elif are_all and x.stride(1) == 1:
            launches = recorded(write)
        else:
            write()

    return partial(run, x)


@on_its_gpu
def rewrite_codes(
    x: Tensor, plain: Target, trans: Target, codes: tuple[Tensor, Tensor, Tensor, Tensor], memory: Tensor | None = None
) -> None:
    """``write_codes`` for a matrix that changes little from one call to the next, as a weight in training.

    Where scales need amaxes that no program sees, it saves the pass for them: they are from amaxes twice as large as they were
    at the call before. Codes of a floating format lose nothing by it but the last binade below. Where an amax has more than
    doubled, or is a small part of what it was, all is written once more by its own. Row scales of both layouts are written
    apart, which is faster still. Without ``memory``, which ``remember_amax`` makes, this is ``write_codes``.
    """
    from loka.kernels.triton import cast_kernels as kernels

    x = x if x.stride(1) == 1 else x.contiguous()
    rows, cols = x.shape
    if memory is None or _needs_no_amaxes(plain, trans, cols):
        write_codes(x, plain, trans, codes)
        tell_autograd(codes)
        return
    if plain.scaling == trans.scaling == "rowwise" and cols <= WIDEST_ROW:  # together, 1.2 times as long on an H200
        launch_rowwise(x, plain, codes[0], codes[1], memory[0, :0])
        tell_autograd(codes[:2])
        rewrite_codes(x, Target.none(), trans, (*Target.none().empty(x), *codes[2:]), memory[:, rows:])
        return
    last, seen, outgrown = memory
    programs = -(-last.numel() // REMEMBERED_AT_ONCE)
    amaxes = _split_amaxes(last, x, plain, trans)
    _launch_cast(x, plain, trans, codes, amaxes, seen=_split_amaxes(seen, x, plain, trans))
    launch(
        kernels.remember_kernel, (programs, 1, 1), seen, last, outgrown, last.numel(), LENGTH=REMEMBERED_AT_ONCE, num_warps=4
    )
    _launch_cast(x, plain, trans, codes, amaxes, outgrown=outgrown[:programs])
    tell_autograd(codes)


def tell_autograd(codes: tuple[Tensor, ...]) -> None:
    """A kernel that writes into a tensor leaves no trace: a graph that saved it before would go on with what is there now."""
    for tensor in codes:
        torch.autograd.graph.increment_version(tensor)


def launch_rowwise(x: Tensor, plain: Target, codes: Tensor, scale: Tensor, noted: Tensor, *, power: bool = False) -> None:
    """Each row, which fits a program, by its own amax, which is ``noted`` where there is room; ``power``: by the smallest power
    of two that keeps it in the format."""
    from loka.kernels.triton import cast_kernels as kernels

    (rows, cols), step = x.shape, rows_at_once(plain.contraction)
    launch(
        kernels.rowwise_kernel, (-(-plain.outer // step), 1, 1),
        x, codes, scale, noted, rows, cols, x.stride(0), plain.outer, plain.contraction,
        ROWS=step, COLS=max(16, power_of_two(plain.contraction)), NOTED=noted.numel() > 0, POWER=power,
        num_warps=8 if plain.contraction > 1024 else 4,
    )  # fmt: skip


def few_with_largest(bits: Tensor) -> Tensor:
    """The largest of ``bits``, if need be among few others: every program of a pass reads all of them."""
    from loka.kernels.triton import cast_kernels as kernels

    if bits.numel() <= AMAXES_AT_ONCE:
        return bits
    largest = bits.new_empty(1)
    launch(kernels.largest_kernel, (1, 1, 1), bits, largest, bits.numel(), AT_ONCE=LARGEST_AT_ONCE, num_warps=8)
    return largest


def _launch_cast(
    x: Tensor,
    plain: Target,
    trans: Target,
    codes: tuple[Tensor, Tensor, Tensor, Tensor],
    amaxes: Amaxes,
    seen: Amaxes | None = None,
    outgrown: Tensor | None = None,
) -> None:
    """With scales from ``amaxes``; ``seen`` are raised to the matrix's own. Nothing is done where no ``outgrown`` is set."""
    from loka.kernels.triton import cast_kernels as kernels

    (rows, cols), (plain_codes, plain_scale, trans_codes, trans_scale) = x.shape, codes
    (row_amax, col_amax, all_amax), (seen_rows, seen_cols, seen_all) = amaxes, seen or amaxes
    words = trans_codes if trans.scaling == NOT_WRITTEN else trans_codes.view(torch.int32)
    tile = cast_tile((plain.scaling, trans.scaling))
    tiles_across = -(-max(plain.contraction, trans.outer) // tile.cols)
    tiles = tiles_across * -(-max(plain.outer, trans.contraction) // tile.rows)
    launch(
        kernels.cast_kernel, (tiles, 1, 1),
        x, plain_codes, plain_scale, words, trans_scale, row_amax, col_amax, all_amax, all_amax.numel(),
        seen_rows, seen_cols, seen_all, all_amax if outgrown is None else outgrown, 0 if outgrown is None else outgrown.numel(),
        rows, cols, x.stride(0), plain.outer, plain.contraction, trans.outer, trans.contraction,
        plain.static_scale, trans.static_scale, tiles_across,
        ROWS=tile.rows, COLS=tile.cols, PLAIN=plain.scaling, TRANS=trans.scaling, SAME=plain.has_scales_of(trans),
        ALL_AT_ONCE=1 if all_amax.numel() == 1 else AMAXES_AT_ONCE,
        ALIGNED=trans.contraction % 16 == 0, SEEN=seen is not None, IF_OUTGROWN=outgrown is not None,
        num_warps=8 if tile.rows == 128 else 4,
    )  # fmt: skip


def _split_amaxes(amax: Tensor, x: Tensor, plain: Target, trans: Target) -> Amaxes:
    of_rows, of_cols, of_all = amax.split(amax_sizes(x, plain, trans))
    return of_rows, of_cols, of_all


def amax_sizes(x: Tensor, plain: Target, trans: Target) -> list[int]:
    """How many amaxes of rows, of columns and of all the targets' scales are made from."""
    scalings = plain.scaling, trans.scaling
    return [x.shape[0] * (scalings[0] == "rowwise"), x.shape[1] * (scalings[1] == "rowwise"), int("tensorwise" in scalings)]


@on_its_gpu
def _amaxes(x: Tensor, plain: Target, trans: Target) -> Amaxes:
    """Amaxes of rows, columns and all of ``x``: of each, only what the targets need. One read, or none."""
    from loka.kernels.triton import cast_kernels as kernels

    x = x if x.stride(1) == 1 else x.contiguous()
    (rows, cols), (tile_rows, tile_cols) = x.shape, AMAX_TILE
    sizes = amax_sizes(x, plain, trans)
    if not any(sizes):
        none = x.new_empty(0, dtype=torch.int32)
        return none, none, none
    of_rows, of_cols, of_all = _split_amaxes(x.new_zeros(sum(sizes), dtype=torch.int32), x, plain, trans)
    down = tiles_down(rows, cols, multiprocessors(x.device))
    launch(
        kernels.amax_kernel, (-(-rows // (down * tile_rows)) * -(-cols // tile_cols), 1, 1),
        x, of_rows, of_cols, of_all, rows, cols, x.stride(0), down,
        ROWS=tile_rows, COLS=tile_cols, OF_ROWS=sizes[0] > 0, OF_COLS=sizes[1] > 0, OF_ALL=sizes[2] > 0, ONE_TILE=down == 1,
        num_warps=8,
    )  # fmt: skip
    return of_rows, of_cols, of_all


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plain = Target(plain_scaling, plain_outer, plain_contraction, plain_static)
    trans = Target(trans_scaling, trans_outer, trans_contraction, trans_static)
    return *plain.empty(x), *trans.empty(x)
