"""Comparing two models that differ by a plan alone: quality on the same examples, time in turns, and what the time goes to."""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from loka.core.comparison import WAITING, QualityPair, TimePair
from loka.core.estimate import Estimate
from loka.core.plan import Goal
from loka.data.batch import Batch
from loka.models.recommender import Recommender
from loka.numerics.confidence import estimate_mean
from loka.train.config import Precision
from loka.train.precision import autocast
from loka.train.step_profile import Kind, TimedKernel, profile_kernels, times_of

CALLS_IN_A_ROW = 4  # on a GPU, between two waits for it


@dataclass(frozen=True)
class Twin:
    """A model, and one call of what is timed with it: a training step, or a forward pass."""

    model: Recommender
    run: Callable[[], object]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def is_on_gpu(self) -> bool:
        return self.device.type == "cuda"


def compare_quality(
    goal: Goal, high: Recommender, planned: Recommender, batches: Iterable[Batch], precision: Precision
) -> QualityPair:
    """The log-loss of both on the same batches. The interval is over batches of examples, not over seeds."""
    pairs: list[tuple[int, float, float]] = []
    for batch in batches:
        pairs.append((len(batch), _log_loss(high, batch, precision), _log_loss(planned, batch, precision)))
    examples = sum(size for size, _, _ in pairs)
    high_loss, planned_loss = (sum(pair[0] * pair[side] for pair in pairs) / examples for side in (1, 2))
    # Both models see the same batches: differences spread far less than losses. Each is divided by the mean loss; a last batch
    # that is smaller is left out.
    whole = [pair for pair in pairs if pair[0] == pairs[0][0]]
    change = estimate_mean([(planned_batch - high_batch) / high_loss for _, high_batch, planned_batch in whole])
    return QualityPair(goal, high_loss, planned_loss, change, examples)


def _log_loss(model: Recommender, batch: Batch, precision: Precision) -> float:
    model.eval()
    with torch.no_grad(), autocast(precision, batch.label_B.device):
        logits_B = model(batch)
    # In float64: the difference of two losses is looked at in its fifth digit.
    return float(F.binary_cross_entropy_with_logits(logits_B.double(), batch.label_B.double()))


def compare_times(
    goal: Goal, batch_size: int, high: Twin, planned: Twin, *, rounds: int = 15, compiled: bool = False
) -> TimePair:
    """Both in turns, and what their time goes to; the speed-up is the mean over rounds."""
    times = _times_in_turns_us(high, planned, rounds)
    high_us, planned_us = (statistics.median(pair[side] for pair in times) for side in (0, 1))
    return TimePair(
        goal=goal,
        batch_size=batch_size,
        high_us=high_us,
        planned_us=planned_us,
        speedup=_speedup_of(times),
        high_by_kind=_by_kind(high, high_us, compiled),
        planned_by_kind=_by_kind(planned, planned_us, compiled),
    )


def measure_speedup(high: Twin, planned: Twin, *, rounds: int) -> Estimate:
    """How much faster ``planned`` is, without the profile of ``compare_times``, which takes longer than a few rounds."""
    return _speedup_of(_times_in_turns_us(high, planned, rounds))


def _times_in_turns_us(high: Twin, planned: Twin, rounds: int) -> list[tuple[float, float]]:
    """Both in turns, so that a machine that slows down slows them alike."""
    pairs = [(_time_us(high), _time_us(planned)) for _ in range(rounds + 2)]
    return pairs[2:]  # the first ones compile and allocate


def _speedup_of(times: list[tuple[float, float]]) -> Estimate:
    return estimate_mean([before / after for before, after in times])


def _time_us(twin: Twin) -> float:
    if twin.is_on_gpu:
        return time_in_a_row_us(twin.run, CALLS_IN_A_ROW, partial(torch.cuda.synchronize, twin.device))
    return time_in_a_row_us(twin.run, 1, lambda: None)


def time_in_a_row_us(run: Callable[[], object], calls: int, wait: Callable[[], object]) -> float:
    """The µs of one of ``calls`` in a row. The host calls ``wait`` only before the first and after the last: between them it
    runs ahead of the device, as in training."""
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    wait()
    return 1e6 * (time.perf_counter() - start) / calls


def _by_kind(twin: Twin, total_us: float, compiled: bool) -> dict[str, float]:
    kernels = profile_kernels(twin.run, twin.model, compiled=compiled)
    return split_by_kind(kernels, total_us, compiled=compiled, on_gpu=twin.is_on_gpu)


def split_by_kind(kernels: Iterable[TimedKernel], total_us: float, *, compiled: bool, on_gpu: bool) -> dict[str, float]:
    """The ``total_us`` of a call, split by kind of work.

    On a GPU kernels take their own time; for the rest of the call it waits for the host to launch the next. On a CPU the times
    of operators hold the profiler's cost, in each alike, so they are scaled to add up to the total.
    """
    times_us = times_of(kernels, compiled=compiled)
    busy_us = sum(times_us.values())
    scale = total_us / busy_us if not on_gpu or busy_us > total_us else 1.0
    split = {str(kind): scale * time_us for kind in Kind if (time_us := times_us[kind]) > 0}
    waiting_us = total_us - scale * busy_us
    return split | {WAITING: waiting_us} if on_gpu and waiting_us > 0 else split
