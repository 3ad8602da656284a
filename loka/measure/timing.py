"""Timing candidates side by side, so that a noisy machine slows all of them alike.

Every candidate is called with a turn number, and picks its inputs by it: what a model reads cold (weights) is rotated
over enough copies to leave the cache, what it reads warm (activations just written) is not. On a GPU a round of turns is
one replay of a CUDA graph, so that launching from the host is not what is timed.
"""

import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

TimedCall = Callable[[int], object]

BUDGET_S = {"cuda": 0.04, "cpu": 0.5}  # of a survey's candidate: calls that take milliseconds are timed a few times only


@dataclass(frozen=True)
class Timing:
    """Median time of one call and the quartiles around it, over ``rounds`` rounds of several calls each."""

    median_us: float
    low_us: float
    high_us: float
    rounds: int

    @classmethod
    def of(cls, samples_us: Sequence[float]) -> "Timing":
        """One sample a round."""
        low, median, high = statistics.quantiles(samples_us, n=4) if len(samples_us) > 1 else (samples_us[0],) * 3
        return cls(median, low, high, len(samples_us))


def time_together(
    candidates: Mapping[str, TimedCall],
    device: torch.device,
    *,
    turns: int = 8,
    rounds: int = 11,
    budget_s: float = math.inf,
) -> dict[str, Timing]:
    """Time each candidate over ``rounds`` rounds of ``turns`` calls, the candidates taking every round in turn.

    One that has taken ``budget_s`` drops out of the rounds that are left.
    """
    with current_gpu(device):
        timers = {name: _timer(candidate, device, turns) for name, candidate in candidates.items()}
        samples: dict[str, list[float]] = {name: [] for name in timers}
        for _ in range(rounds):
            for name, timer in timers.items():
                if sum(samples[name]) * turns < 1e6 * budget_s:
                    samples[name].append(timer() / turns)
    return {name: Timing.of(values) for name, values in samples.items()}


def current_gpu(device: torch.device) -> AbstractContextManager[object]:
    """Within it, streams, events and graphs are those of ``device``, if it is a GPU, and not of torch's current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def copies_past_cache(n_bytes: int, device: torch.device) -> int:
    """How many copies of ``n_bytes`` must be rotated so that none is found in the last-level cache when its turn comes."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 64 << 20
    return max(2, min(64, -(-2 * cache // max(n_bytes, 1))))


def whole_rotations(copies: int, least: int = 8) -> int:
    """How many turns give every copy the same number of them, at least ``least`` in all."""
    return copies * -(-least // copies)


def _timer(candidate: TimedCall, device: torch.device, turns: int) -> Callable[[], float]:
    return _graph_timer(candidate, turns) if device.type == "cuda" else _host_timer(candidate, turns)


def _host_timer(candidate: TimedCall, turns: int) -> Callable[[], float]:
    candidate(0)  # compiles, packs, allocates

    def run() -> float:
        start = time.perf_counter()
        for turn in range(turns):
            candidate(turn)
        return 1e6 * (time.perf_counter() - start)

    return run


def _graph_timer(candidate: TimedCall, turns: int) -> Callable[[], float]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for turn in range(3):  # compiles, picks algorithms, fills the allocator
            candidate(turn)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # a cast that is a view launches nothing
        with torch.cuda.graph(graph):
            for turn in range(turns):
                candidate(turn)
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def run() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end)

    return run
