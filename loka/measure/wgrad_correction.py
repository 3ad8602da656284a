"""What drawn rows get wrong about gradients of weights, by what the Probe saw of them on real ones.

How rows cancel in a batch is more than a distribution of single rows knows. So the Probe measured what FP8 makes of dw on some
features of real rows (``loka.numerics.wgrad_errors``). The same is measured on those drawn rows that kernels are measured with,
and the errors of kernels are multiplied by the ratio.
"""

import dataclasses
import math
from dataclasses import dataclass

import torch

from loka.core.estimate import Estimate
from loka.core.recipe import Accumulation, Recipe
from loka.core.record import SiteRecord
from loka.measure.parts import SiteTensors
from loka.numerics.wgrad_errors import RECIPES, WgradErrors, some_rows, wgrad_errors

OF_A_BATCH = 0.4  # deviation of the logarithm of one batch's error: its dw is easily half as long as another's
USUAL = 0.2  # the logarithm of a ratio between seen and drawn rows, as it usually is
ALIKE_BY_CHANCE = 1.2  # two deviations of one batch's share of errors that are alike in all rows, where none are


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


class WgradCorrection:
    """Of one site; ``add`` is told of every sample that its options are measured with."""

    def __init__(self, site: SiteRecord) -> None:
        statistic = site.statistics.get("wgrad_errors")
        self._seen = statistic.tensors if statistic is not None and statistic.tensors["count"] > 0 else None
        self._rows = round(float(self._seen["rows"] / self._seen["count"])) if self._seen else 0
        self._drawn: list[WgradErrors] = []

    def add(self, tensors: SiteTensors) -> None:
        if self._seen is not None and tensors.dy is not None:
            x_RK, dy_RN = tensors.x[: self._rows].float(), tensors.dy[: self._rows].float()
            self._drawn.append(wgrad_errors([some_rows(x_RK, dy_RN)]))

    def factors(self, recipe: Recipe, samples: int) -> Factors:
        """Of an option that was measured with the first ``samples``; 1 for recipes that the Probe has not looked at."""
        drawn, as_full = self._drawn[:samples], dataclasses.replace(recipe, accumulation=Accumulation.FULL)
        if self._seen is None or not drawn or as_full not in RECIPES:
            return Factors()
        index, seen = RECIPES.index(as_full), self._seen
        count, squares = float(seen["count"]), float(seen["squares_W"][index])
        grown = _grown(float(seen["alike_W"][index]) / squares if squares > 0 else 0.0, float(seen["times"]) / count, count)
        of_values = _ratio(
            math.sqrt(grown) * float(seen["floored_W"][index]) / count, _mean([errors.floored_WB[index] for errors in drawn])
        )
        of_squares = _ratio(
            grown * _ratio(squares, float(seen["size"])),
            _ratio(_mean([errors.squares_WB[index] for errors in drawn]), _mean([errors.size_B for errors in drawn])),
        )
        return Factors(_trusted(of_values, count), _trusted(math.sqrt(of_squares), count))


def _grown(alike: float, times: float, batches: float) -> float:
    """How many times as large Σ error² is in ``times`` as many rows as it would be if all of it were chance. What is ``alike``
    in all rows, a share of it, grows with their square; only as much is taken for that as cannot be chance itself."""
    alike = min(1.0, max(0.0, alike - ALIKE_BY_CHANCE / math.sqrt(batches)))
    return 1 - alike + alike * times


def _trusted(ratio: float, batches: float) -> float:
    """As much of the ratio as is no chance, going by how large it is."""
    size = max(USUAL, abs(math.log(ratio))) ** 2
    return ratio ** (size / (size + OF_A_BATCH**2 / batches))


def _mean(values: list[torch.Tensor]) -> float:
    return float(torch.cat(values).mean())


def _ratio(a: float, b: float) -> float:
    """1 where either is 0 or no number: of errors that are none nothing can be learned."""
    return a / b if 0 < a < math.inf and 0 < b < math.inf else 1.0
