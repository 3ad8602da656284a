"""The factors that correct errors measured on drawn rows, where the Probe measured the same on real ones."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Protocol

from loka.core.estimate import Estimate
from loka.core.recipe import Accumulation, Recipe
from loka.measure.parts import SiteTensors

USUAL = 0.2  # the usual size of the logarithm of a ratio between seen and drawn rows


@dataclass(frozen=True)
class Factors:
    """By which errors are multiplied: those relative to each value, and those relative to the rms."""

    of_values: float = 1.0
    of_rms: float = 1.0

    def applied(self, metric: str, estimate: Estimate) -> Estimate:
        if metric == "sqnr_db":
            more = -20 * math.log10(self.of_rms)
            return Estimate(estimate.mean + more, estimate.low + more, estimate.high + more, estimate.n)
        by = self.of_rms if metric == "relative_rms" else self.of_values
        return Estimate(estimate.mean * by, estimate.low * by, estimate.high * by, estimate.n)


class Correction(Protocol):
    """Of one role of one site; ``add`` is given every sample that its options are measured with."""

    def add(self, tensors: SiteTensors) -> None: ...

    def factors(self, recipe: Recipe, samples: int) -> Factors:
        """Of an option that was measured with the first ``samples``; 1 for recipes that the Probe has not looked at."""
        ...


def as_looked_at(recipe: Recipe) -> Recipe:
    """The recipe as the Probe looked at it: summed in full, whatever the kernel does."""
    return dataclasses.replace(recipe, accumulation=Accumulation.FULL)


def trusted(ratio: float, deviation: float) -> float:
    """The ratio, drawn towards 1 the more it may be chance, going by its size; ``deviation`` is that of its logarithm."""
    size = max(USUAL, abs(math.log(ratio))) ** 2
    return ratio ** (size / (size + deviation**2))


def ratio(a: float, b: float) -> float:
    """1 where either is 0 or no number: nothing can be learned from that."""
    return a / b if 0 < a < math.inf and 0 < b < math.inf else 1.0
