"""What drawn rows get wrong about gradients of weights, by what the Probe saw of them on real ones.

How rows cancel in a batch is more than a distribution of single rows knows. So the Probe measured what FP8 makes of dw on some
features of real rows (``loka.numerics.wgrad_errors``). The same is measured on those drawn rows that kernels are measured with,
and the errors of kernels are multiplied by the ratio.
"""

import math

import torch

from loka.core.recipe import Recipe
from loka.core.site_record import SiteRecord
from loka.measure.factors import Factors, as_looked_at, ratio, trusted
from loka.measure.parts import SiteTensors
from loka.numerics.wgrad_errors import RECIPES, WgradErrors, some_rows, wgrad_errors

OF_A_BATCH = 0.4  # deviation of the logarithm of one batch's error: its dw is easily half as long as another's
ALIKE_BY_CHANCE = 1.2  # two deviations of one batch's share of errors that are alike in all rows, where none are


class WgradCorrection:
    """Of one site, as ``Correction`` says."""

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
        drawn, as_full = self._drawn[:samples], as_looked_at(recipe)
        if self._seen is None or not drawn or as_full not in RECIPES:
            return Factors()
        index, seen = RECIPES.index(as_full), self._seen
        count, squares = float(seen["count"]), float(seen["squares_W"][index])
        times = float(seen["times"]) / count
        grown = _grown(float(seen["alike_W"][index]) / squares if squares > 0 else 0.0, times, count)
        of_values = ratio(
            math.sqrt(grown) * float(seen["floored_W"][index]) / count, _mean([errors.floored_WB[index] for errors in drawn])
        )
        of_squares = ratio(
            grown * squares * _mean([errors.size_B for errors in drawn]),
            float(seen["size"]) * _mean([errors.squares_WB[index] for errors in drawn]),
        )
        deviation = math.hypot(OF_A_BATCH / math.sqrt(count), _of_the_rest(times, count))
        return Factors(trusted(of_values, deviation), trusted(math.sqrt(of_squares), deviation))


def _grown(alike: float, times: float, batches: float) -> float:
    """How many times as large Σ error² is in ``times`` as many rows as it would be if all of it were chance. The share of it
    that is ``alike`` in all rows grows with the square of their number; only what chance cannot explain is taken for that."""
    alike = min(1.0, max(0.0, alike - ALIKE_BY_CHANCE / math.sqrt(batches)))
    return 1 - alike + alike * times


def _of_the_rest(times: float, batches: float) -> float:
    """How uncertain the logarithm of an error is because only one row in ``times`` was seen: errors alike in all rows (see
    ``_grown``) may be there unseen. The most that they could add is taken for two deviations of the square, hence a 4th."""
    return math.log1p(min(1.0, ALIKE_BY_CHANCE / math.sqrt(batches)) * max(0.0, times - 1)) / 4


def _mean(values: list[torch.Tensor]) -> float:
    return float(torch.cat(values).mean())
