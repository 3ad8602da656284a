"""Means of repeated measurements with Student-t confidence intervals."""

import math
from collections.abc import Sequence
from functools import lru_cache

from loka.core.errors import InvalidInput
from loka.core.estimate import Estimate


def estimate_mean(samples: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Mean and interval of independent ``samples``. One sample, or one that is not finite, gives an unbounded interval."""
    n = len(samples)
    if n == 0:
        raise InvalidInput("no samples to estimate a mean from: add at least one")
    mean = sum(samples) / n  # not fsum, which raises on inf − inf, where NaN is the right answer
    if n > 1 and all(sample == samples[0] for sample in samples):  # such as the SQNR of an exact kernel, inf every time
        return Estimate(samples[0], samples[0], samples[0], n)
    if n == 1 or not math.isfinite(mean):
        return Estimate(mean, -math.inf, math.inf, n)
    # Two passes in floats: statistics.stdev sums exact fractions, which took half the time of measuring errors.
    deviation = math.sqrt(math.fsum((sample - mean) ** 2 for sample in samples) / (n - 1))
    half_width = t_quantile(confidence, n - 1) * deviation / math.sqrt(n)
    return Estimate(mean, mean - half_width, mean + half_width, n)


@lru_cache
def t_quantile(confidence: float, dof: int) -> float:
    """The t with P(|T| < t) = ``confidence`` for Student's T with ``dof`` degrees of freedom."""
    if not 0 < confidence < 1 or dof < 1:
        raise InvalidInput(f"confidence must lie between 0 and 1 and dof be at least 1, got {confidence} and {dof}")
    low, high = 0.0, math.pi / 2  # bisect the angle θ = atan(t/√dof): unlike t, it is bounded
    while low < (middle := (low + high) / 2) < high:
        if _central_probability(middle, dof) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(dof) * math.tan(low)


def _central_probability(theta: float, dof: int) -> float:
    """P(|T| < √dof·tan θ), by the finite series for whole dof (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    sin, cos = math.sin(theta), math.cos(theta)
    if dof == 1:
        return theta * 2 / math.pi
    # odd:  2/π·(θ + sin θ·(cos θ + 2/3·cos³θ + 2·4/(3·5)·cos⁵θ + …));  even:  sin θ·(1 + 1/2·cos²θ + 1·3/(2·4)·cos⁴θ + …)
    odd = dof % 2
    term = total = cos if odd else 1.0
    for k in range(2 + odd, dof, 2):
        term *= cos * cos * (k - 1) / k
        total += term
    return 2 / math.pi * (theta + sin * total) if odd else sin * total
