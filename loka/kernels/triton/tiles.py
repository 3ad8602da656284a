"""How work is cut into tiles: plain functions of the shape and of the number of multiprocessors."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

CPU_MULTIPROCESSORS = 4  # for Triton's interpreter, which runs programs one after another


@lru_cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else CPU_MULTIPROCESSORS


def power_of_two(size: int) -> int:
    """The smallest one that is at least ``size``."""
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


# The tiles a GEMM can be cut into, and the time of one relative to 128×128: by the tensor core, and by what it loads.
_COSTS = {
    Tiles(128, 256, 128, warps=8, stages=3): 1.8,  # without promotion: its sums do not fit into registers twice
    Tiles(128, 128, 128, warps=8, stages=4): 1.0,
    Tiles(64, 256, 128, warps=8, stages=4): 1.15,
    Tiles(64, 128, 128, warps=4, stages=4): 0.6,
    Tiles(64, 64, 128, warps=4, stages=4): 0.38,
}
GEMM_TILES = tuple(_COSTS)
SHORTEST_SPLIT = 1024  # of a contraction: adding up the parts costs a launch
MOST_SPLITS = 8


def choose_tiles(m: int, n: int, k: int, sms: int, *, promoted: bool) -> Tiles:
    """The tiles that finish first if every program of a wave takes its tile's time. Ties go to the larger tiles.

    A long contraction into few tiles is split, so that every multiprocessor has a part of it.
    """
    able = [tiles for tiles in GEMM_TILES if not (promoted and tiles.rows * tiles.cols > 128 * 128)]
    return min((_with_splits(tiles, m, n, k, sms) for tiles in able), key=lambda tiles: _time(tiles, m, n, sms))


def count(tiles: Tiles, m: int, n: int) -> int:
    """Tiles of an m×n output."""
    return ceil_div(m, tiles.rows) * ceil_div(n, tiles.cols)


def _with_splits(tiles: Tiles, m: int, n: int, k: int, sms: int) -> Tiles:
    splits = min(sms // count(tiles, m, n), k // SHORTEST_SPLIT, MOST_SPLITS)
    return replace(tiles, splits=max(1, splits))


def _time(tiles: Tiles, m: int, n: int, sms: int) -> float:
    waves = ceil_div(count(tiles, m, n) * tiles.splits, sms)
    return waves * _COSTS[replace(tiles, splits=1)] / tiles.splits


@dataclass(frozen=True)
class NormBlocks:
    """The near-equal blocks that a norm cuts ``features`` into, each at most ``block`` long: the first ``wider`` of them are
    one longer than ``width``. A tile of ``room`` columns holds any one of them."""

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
        """The scale of codes behind the norm: no value leaves a block of n larger than √n, and no activation grows it."""
        return math.sqrt(self.width + (self.wider > 0)) / E4M3_MAX


NARROWEST_TILE = 32
WIDEST_TILE = 256  # a norm block must lie in a tile whole
E4M3_MAX = 448.0
PROMOTED_FROM = 8192  # a shorter contraction loses nothing that shows beside the rounding of its operands
# Half the loads of 64×256; but promoted sums, or a bias beside them, do not fit into its registers.
_WIDE_BLOCK = Tiles(128, 256, 128, warps=16, stages=3)
_BLOCK = Tiles(64, 256, 128, warps=8, stages=4)
_WIDE_BLOCK_TIME = 1.75  # of a wave, in waves of _BLOCK


def is_promoted(contraction: int) -> bool:
    return contraction >= PROMOTED_FROM


def choose_block_tiles(m: int, blocks: NormBlocks, k: int, sms: int, *, has_bias: bool) -> Tiles:
    """Tiles that hold a norm block each: the larger ones where there are enough of them."""
    if blocks.room < _BLOCK.cols:
        return Tiles(64, blocks.room, 128, warps=4, stages=4)
    waves, wide_waves = (ceil_div(ceil_div(m, tiles.rows) * blocks.count, sms) for tiles in (_BLOCK, _WIDE_BLOCK))
    fits = not (is_promoted(k) or has_bias)
    return _WIDE_BLOCK if fits and wide_waves * _WIDE_BLOCK_TIME < waves else _BLOCK


@dataclass(frozen=True)
class BackwardTiles:
    """A program of the backward pass takes ``rows`` at a time, ``steps`` times; what it takes has one scale a feature."""

    rows: int
    steps: int
    warps: int

    @property
    def group(self) -> int:
        return self.rows * self.steps


def choose_backward_tiles(m: int, blocks: NormBlocks, sms: int) -> BackwardTiles:
    """Groups of 128 rows, the depth that wgrad's product likes; of 64 where they would leave multiprocessors idle."""
    steps = 2 if ceil_div(m, 128) * blocks.count >= sms else 1
    return BackwardTiles(64, steps, warps=max(4, 64 * blocks.room // 1024))
