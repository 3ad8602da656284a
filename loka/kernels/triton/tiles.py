"""How work is cut into tiles: plain functions of the shape and of the number of multiprocessors."""

import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple

import torch

CPU_MULTIPROCESSORS = 4  # for Triton's interpreter, which runs programs one after another


@lru_cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else CPU_MULTIPROCESSORS


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least ``size``."""
    return 1 << max(size - 1, 0).bit_length()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Tiles:
    """One program's share of a GEMM (rows × cols of the output, ``depth`` of the contraction a step) and its resources."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    splits: int = 1  # programs that share an output tile, each contracting a part
    per_sm: int = 1  # programs for each multiprocessor; of 3 or 4 that persist, shared memory leaves room for one less at once


def grid(tiles_of_output: int, tiles: Tiles, sms: int) -> tuple[int, bool]:
    """How many programs to launch, and whether they are persistent: they are if an unsplit product has more tiles than programs
    run at once."""
    at_once = tiles.per_sm * sms
    persistent = tiles.splits == 1 and tiles_of_output > at_once
    return (at_once if persistent else tiles_of_output), persistent


class TileTimes(NamedTuple):
    """In µs: what a call takes besides its tiles, what the tiles that a multiprocessor holds at once take besides their
    contractions, and what one tile takes for 1,024 of its contraction: beside others, and at the least, ``alone``."""

    call: float
    wave: float
    contraction: float
    alone: float = 0.0


# The tiles a GEMM can be cut into, with fits to the three roles of 27 shapes and a few more, on an H200 on 2026-11-19. Several
# programs on a multiprocessor let one of them contract while another one stores.
_FAST_US = {
    Tiles(128, 256, 128, warps=8, stages=3): TileTimes(1.5, 3.2, 5.2),
    Tiles(128, 128, 128, warps=4, stages=4): TileTimes(2.0, 1.5, 2.65),
    Tiles(128, 128, 128, warps=4, stages=3, per_sm=2): TileTimes(1.45, 2.55, 2.7),
    Tiles(64, 128, 128, warps=4, stages=6): TileTimes(1.75, 1.5, 1.45),
    Tiles(64, 128, 128, warps=4, stages=4, per_sm=2): TileTimes(1.6, 1.5, 1.55),
    Tiles(64, 128, 128, warps=4, stages=3, per_sm=3): TileTimes(0.0, 3.0, 1.95),
    Tiles(64, 64, 128, warps=4, stages=3, per_sm=4): TileTimes(0.45, 2.55, 0.95, alone=1.2),
}
# Promotion needs each sum twice, and large tiles have no registers for that. It also makes a tile wait, if it is alone.
_PROMOTED_US = {
    Tiles(128, 128, 128, warps=8, stages=4): TileTimes(0.45, 2.65, 4.1),
    Tiles(64, 128, 128, warps=4, stages=4, per_sm=2): TileTimes(0.8, 0.65, 2.1, alone=2.65),
    Tiles(64, 64, 128, warps=4, stages=4, per_sm=3): TileTimes(0.3, 0.3, 1.3, alone=2.75),
}
_INT8_US = {
    Tiles(128, 128, 128, warps=4, stages=3, per_sm=2): TileTimes(2.45, 2.75, 2.6),
    Tiles(64, 128, 128, warps=4, stages=4, per_sm=2): TileTimes(1.45, 2.2, 1.25),
    Tiles(64, 128, 128, warps=4, stages=3, per_sm=3): TileTimes(0.0, 3.65, 1.9),
    Tiles(64, 64, 128, warps=4, stages=3, per_sm=4): TileTimes(0.5, 2.65, 1.05),
}
GEMM_TILES, PROMOTED_TILES, INT8_TILES = tuple(_FAST_US), tuple(_PROMOTED_US), tuple(_INT8_US)
SHORTEST_SPLIT = 1024  # of a contraction
MOST_SPLITS = 8
# Adding up the parts of a split contraction: a launch, and 8 bytes of traffic through the cache for every sum.
_ADDING_US = 2.5
_SUMS_PER_US = 750_000


@cache  # comparing them takes longer than a launch
def choose_tiles(m: int, n: int, k: int, sms: int, *, promoted: bool, int8: bool = False) -> Tiles:
    """The tiles that finish first by the times above. Ties go to the larger tiles. Sums of int8 are exact, never promoted.

    A long contraction into few tiles is split, so that every multiprocessor has a part of it.
    """
    times = _INT8_US if int8 else _PROMOTED_US if promoted else _FAST_US
    choices = [replace(tiles, splits=splits) for tiles in times for splits in {1, _splits(tiles, m, n, k, sms)}]
    return min(choices, key=lambda tiles: _split_time_us(tiles, times[replace(tiles, splits=1)], m, n, k, sms))


def count(tiles: Tiles, m: int, n: int) -> int:
    """Tiles of an m×n output."""
    return ceil_div(m, tiles.rows) * ceil_div(n, tiles.cols)


def _splits(tiles: Tiles, m: int, n: int, k: int, sms: int) -> int:
    return max(1, min(tiles.per_sm * sms // count(tiles, m, n), k // SHORTEST_SPLIT, MOST_SPLITS))


def _split_time_us(tiles: Tiles, times: TileTimes, m: int, n: int, k: int, sms: int) -> float:
    adding = _ADDING_US + tiles.splits * m * n / _SUMS_PER_US if tiles.splits > 1 else 0.0
    return _time_us(tiles, times, count(tiles, m, n) * tiles.splits, ceil_div(k, tiles.splits), sms) + adding


def _time_us(tiles: Tiles, times: TileTimes, tiles_of_output: int, k: int, sms: int) -> float:
    """Tiles on one multiprocessor share its tensor cores, so their contractions add up, unless those are too few to keep it
    busy; all else runs side by side."""
    tiles_each = ceil_div(tiles_of_output, sms)
    waves = ceil_div(tiles_each, tiles.per_sm)
    return times.call + waves * times.wave + max(tiles_each * times.contraction, waves * times.alone) * k / 1024


@dataclass(frozen=True)
class NormBlocks:
    """The near-equal blocks that a norm cuts ``features`` into, each at most ``block`` long. The first ``wider`` of them have
    one feature more than ``width``. A tile of ``room`` columns holds any of them."""

    features: int
    block: int

    @property
    def count(self) -> int:
        return ceil_div(self.features, self.block)

    @property
    def width(self) -> int:
        return self.features // self.count

    @property
    def wider(self) -> int:
        return self.features % self.count

    @property
    def room(self) -> int:
        return max(NARROWEST_TILE, power_of_two(self.width + (self.wider > 0)))

    @property
    def code_scale(self) -> float:
        """The scale of codes behind the norm: there values of a block of n are at most √n, and no activation enlarges them."""
        return math.sqrt(self.width + (self.wider > 0)) / E4M3_MAX


NARROWEST_TILE = 32
WIDEST_TILE = 256  # a norm block must lie in a tile whole
E4M3_MAX = 448.0
# Up to here fast sums lose nothing that shows beside the rounding of operands: in fprop and dgrad of Wukong's layers they had
# 1.001 times the error of full ones at 8,192 and 1.004 times at 16,384. wgrad, whose sums have a mean, is always promoted.
LONGEST_FAST = 16384
# Tiles that hold the widest norm block, with fits to 27 shapes on an H200: for one form, and for codes, transposed codes and
# saved codes at once. A bf16 form among several needs more registers, and promoted sums need theirs twice: both take the roomy
# tile, which spills nothing.
_ROOMY_BLOCK = Tiles(64, 256, 128, warps=8, stages=4)
_WIDE_BLOCK = Tiles(128, 256, 128, warps=8, stages=3)
_ONE_FORM_US = {
    Tiles(64, 256, 128, warps=4, stages=4): TileTimes(1.9, 1.7, 2.95),
    Tiles(64, 256, 128, warps=4, stages=2, per_sm=2): TileTimes(0.5, 3.0, 3.4),
    _WIDE_BLOCK: TileTimes(1.3, 2.9, 5.55),
}
_CODES_US = {_ROOMY_BLOCK: TileTimes(2.2, 2.5, 3.0), _WIDE_BLOCK: TileTimes(0.95, 4.9, 5.35)}


def is_promoted(contraction: int) -> bool:
    return contraction > LONGEST_FAST


@cache
def choose_block_tiles(m: int, n: int, k: int, blocks: NormBlocks | None, sms: int, *, forms: int, only_codes: bool) -> Tiles:
    """Tiles that hold a norm block each, for writing 1 to 4 ``forms`` of it, ``only_codes`` or wider ones too: of those that
    have the registers, the ones that finish first.

    Without a norm they are those of an unsplit product, by its times; more than one form takes the tiles for promoted sums, for
    their room.
    """
    if blocks is None:
        product = _PROMOTED_US if is_promoted(k) or forms > 1 else _FAST_US
        return min(product, key=lambda tiles: _time_us(tiles, product[tiles], count(tiles, m, n), k, sms))
    if blocks.room < _ROOMY_BLOCK.cols:
        return Tiles(64, blocks.room, 128, warps=4, stages=4)
    if is_promoted(k) or (forms > 1 and not only_codes):
        return _ROOMY_BLOCK
    times = _ONE_FORM_US if forms == 1 else _CODES_US
    return min(times, key=lambda tiles: _time_us(tiles, times[tiles], ceil_div(m, tiles.rows) * blocks.count, k, sms))


class Columns(NamedTuple):
    """How programs share the features: ``count`` runs of ``width``, the first ``wider`` of them one longer."""

    count: int
    width: int
    wider: int

    @classmethod
    def of(cls, n: int, blocks: NormBlocks | None, tile_cols: int) -> "Columns":
        """Norm blocks, or without a norm whole tiles, the last of which may reach past ``n``."""
        return cls(ceil_div(n, tile_cols), tile_cols, 0) if blocks is None else cls(blocks.count, blocks.width, blocks.wider)


NORM_ROWS, GRADIENT_ROWS = 32, 16
SHARED_TILE = (64, 128)  # rows and columns at most, of the pass that shares scales
MOST_GRADIENT_PROGRAMS = 8192  # each notes its largest scale, and one program reads all those


def gradient_cols(n: int, blocks: NormBlocks | None) -> int:
    """The columns of a gradient's tile."""
    return min(WIDEST_TILE, max(NARROWEST_TILE, power_of_two(n))) if blocks is None else blocks.room


def gradient_steps(m: int, columns: Columns) -> int:
    """How many tiles of rows a program goes down: one, unless there would be too many programs."""
    return max(1, ceil_div(ceil_div(m, GRADIENT_ROWS) * columns.count, MOST_GRADIENT_PROGRAMS))
