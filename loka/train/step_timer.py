"""Timing whole steps side by side. On a GPU a step is captured once and replayed, so that the host's launches are not timed."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from loka.measure.timing import Timing, current_gpu


@dataclass(frozen=True)
class StepTimer:
    """Runs one step and returns its µs."""

    run: Callable[[], float]
    is_graph: bool  # replayed; otherwise launched by the host each time


def step_timer(step: Callable[[], object], device: torch.device) -> StepTimer:
    """A timer of ``step``, which must have run before. A step that cannot be captured is launched instead."""
    if device.type != "cuda":
        return StepTimer(lambda: _host_time(step), is_graph=False)
    try:
        with current_gpu(device):
            graph = _capture(step)
    except RuntimeError:  # a host sync inside, or an allocation outside of the graph's pool
        torch.cuda.synchronize(device)
        return StepTimer(lambda: _event_time(step, device), is_graph=False)
    return StepTimer(lambda: _event_time(graph.replay, device), is_graph=True)


def take_turns(timers: Mapping[str, StepTimer], *, rounds: int) -> dict[str, Timing]:
    """Time ``rounds`` steps of each timer, one step of each in turn: a machine that slows down slows them alike."""
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            samples[name].append(timer.run())
    return {name: Timing.of(values) for name, values in samples.items()}


def _capture(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # fills the allocator, and makes what is made once
        with _raising_on_sync():
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    return graph


@contextmanager
def _raising_on_sync() -> Iterator[None]:
    """Raise where something waits for the device. Found in a capture, it would leave torch's generators unusable."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _event_time(step: Callable[[], object], device: torch.device) -> float:
    with current_gpu(device):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        end.synchronize()
    return 1e3 * start.elapsed_time(end)


def _host_time(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return 1e6 * (time.perf_counter() - start)
