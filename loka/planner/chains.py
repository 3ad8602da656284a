"""Blocks that chain: one behind another takes its input in FP8 and saves the cast, so they are chosen together.

Every site has at most one producer. The best of a site and all behind it depends on one thing in front of it: whether the
producer hands on FP8. So the best of the whole is found exactly, in one pass from the last sites to the first.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from loka.planner.options import BlockOption

Way = BlockOption | None  # None: the site's own best, a triple or high precision


@dataclass(frozen=True)
class Ways:
    """What a site may run as, beside the time that its own best saves in a step."""

    producer: str | None
    saved_us: float
    blocks: tuple[BlockOption, ...]


def choose_blocks(sites: Mapping[str, Ways], min_speedup: float) -> dict[str, tuple[BlockOption, bool]]:
    """The blocks to run, each with whether its input comes in FP8, that together save the most time."""
    consumers: dict[str, list[str]] = {}
    for name, ways in sites.items():
        if ways.producer in sites:
            consumers.setdefault(ways.producer, []).append(name)
    front_to_back = [name for name, ways in sites.items() if ways.producer not in sites]
    for name in front_to_back:  # the list grows while it is walked
        front_to_back += consumers.get(name, ())
    best: dict[tuple[str, bool], tuple[float, Way]] = {}  # the most that a site and all behind it can save, and how, by ``fed``

    def behind(name: str, way: Way) -> float:
        return sum(best[consumer, hands_on_fp8(way)][0] for consumer in consumers.get(name, ()))

    for name in reversed(front_to_back):
        for fed in (False, True):  # whether its input comes in FP8
            options: list[tuple[float, Way]] = [(sites[name].saved_us + behind(name, None), None)]
            for option in sites[name].blocks:
                time_us = option.step_us(fed)
                if option.baseline_us >= min_speedup * time_us:
                    options.append((option.baseline_us - time_us + behind(name, option), option))
            best[name, fed] = max(options, key=lambda choice: choice[0])  # of equals the first
    chosen: dict[str, tuple[BlockOption, bool]] = {}
    for name in front_to_back:
        front = chosen.get(sites[name].producer or "")
        fed = front is not None and hands_on_fp8(front[0])
        way = best[name, fed][1]
        if way is not None:
            chosen[name] = way, fed
    return chosen


def hands_on_fp8(way: Way) -> bool:
    """Only behind a norm are values bounded, so that their scale is known before they are."""
    return way is not None and way.block.norm is not None
