"""The time of idle steps, taken without waiting for the device."""

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

KEPT = 64  # steps; the median over the newest of them is the answer


class StepClock:
    """Times blocks on ``device``: by its own events on CUDA, so that nothing waits, and by the clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: deque[float] = deque(maxlen=KEPT)
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=KEPT)

    @contextmanager
    def timed(self) -> Iterator[None]:
        if self._device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(torch.cuda.current_stream(self._device))  # of ours, which need not be the current device
            yield
            end.record(torch.cuda.current_stream(self._device))
            self._events.append((begin, end))
        else:
            begin_s = time.perf_counter()
            yield
            self._seconds.append(time.perf_counter() - begin_s)

    def median_us(self) -> float | None:
        """The median step in µs, or None where none was timed. Waits for the last of them."""
        if self._events:
            self._events[-1][1].synchronize()
            return statistics.median(1e3 * begin.elapsed_time(end) for begin, end in self._events)
        return statistics.median(1e6 * seconds for seconds in self._seconds) if self._seconds else None
