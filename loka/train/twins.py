"""Comparing two models that differ by a plan alone: quality on the same examples, time in turns, and where the time goes."""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from loka.core.comparison import QualityPair, TimePair
from loka.core.plan import Goal
from loka.data.batch import Batch
from loka.models.recommender import Recommender
from loka.numerics.confidence import estimate_mean
from loka.train.config import Precision
from loka.train.precision import autocast
from loka.train.step_profile import Kind, profile_kernels, shares_of


@dataclass(frozen=True)
class Twin:
    """A model, and one call of what is timed with it: a training step, or a forward pass."""

    model: Recommender
    run: Callable[[], object]


def compare_quality(
    goal: Goal, high: Recommender, planned: Recommender, batches: Iterable[Batch], precision: Precision
) -> QualityPair:
    """The log-loss of both on the same batches. The interval is over batches: of these examples, not of other seeds."""
    pairs: list[tuple[int, float, float]] = []
    for batch in batches:
        pairs.append((len(batch), _log_loss(high, batch, precision), _log_loss(planned, batch, precision)))
    examples = sum(size for size, _, _ in pairs)
    high_loss, planned_loss = (sum(pair[0] * pair[side] for pair in pairs) / examples for side in (1, 2))
    # Batches of the same examples: their differences spread far less than their losses. Each is put in relation to the mean.
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
    """Both in turns, so that a machine that slows down slows them alike; the speed-up is the mean over rounds."""
    times: list[tuple[float, float]] = []
    for turn in range(rounds + 2):
        pair = _time_us(high), _time_us(planned)
        if turn >= 2:  # the first ones compile and allocate
            times.append(pair)
    return TimePair(
        goal=goal,
        batch_size=batch_size,
        high_us=statistics.median(before for before, _ in times),
        planned_us=statistics.median(after for _, after in times),
        speedup=estimate_mean([before / after for before, after in times]),
        high_by_kind=_by_kind(high, compiled, statistics.median(before for before, _ in times)),
        planned_by_kind=_by_kind(planned, compiled, statistics.median(after for _, after in times)),
    )


def _time_us(twin: Twin) -> float:
    on_cuda = next(twin.model.parameters()).is_cuda
    if on_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    twin.run()
    if on_cuda:
        torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start)


def _by_kind(twin: Twin, compiled: bool, total_us: float) -> dict[str, float]:
    """The time of a call split as the profiler sees it: its own cost is in every part alike, so that shares are taken."""
    shares = shares_of(profile_kernels(twin.run, twin.model, compiled=compiled), compiled=compiled)
    return {str(kind): share * total_us for kind in Kind if (share := shares[kind]) > 0}
