"""What drawn rows get wrong about outputs, by what the Probe saw of them on real ones: rows that are large or small as a whole,
and largest values that no quantile tells (``loka.numerics.fprop_errors``)."""

import math
from collections.abc import Iterable

import torch

from loka.core.recipe import Recipe
from loka.core.record import SiteRecord
from loka.measure.factors import Factors, as_looked_at, ratio, trusted
from loka.measure.parts import SiteTensors
from loka.numerics.fprop_errors import RECIPES, FpropErrors, fprop_errors, some_outputs

OF_A_LOOK = 0.1  # deviation of the logarithm of an error over a few rows
MOST_ROWS, MOST_VALUES = 512, 2**22  # of a sample, which are all drawn alike


class FpropCorrection:
    """Of one site, as ``Correction`` says."""

    def __init__(self, site: SiteRecord) -> None:
        statistic = site.statistics.get("fprop_errors")
        self._seen = statistic.tensors if statistic is not None and statistic.tensors["count"] > 0 else None
        self._drawn: list[FpropErrors] = []

    def add(self, tensors: SiteTensors) -> None:
        if self._seen is not None:
            some_RK = tensors.x[: min(MOST_ROWS, -(-MOST_VALUES // tensors.x.shape[1]))].float()
            self._drawn.append(fprop_errors(some_RK, tensors.x.abs().amax().float(), some_outputs(tensors.weights[0])))

    def factors(self, recipe: Recipe, samples: int) -> Factors:
        drawn, as_full = self._drawn[:samples], as_looked_at(recipe)
        if self._seen is None or not drawn or as_full not in RECIPES:
            return Factors()
        index, seen = RECIPES.index(as_full), self._seen
        looks, size = float(seen["count"]), _sum(errors.size for errors in drawn)
        of_values = ratio(
            float(seen["floored_W"][index]) / looks, _sum(errors.floored_W[index] for errors in drawn) / len(drawn)
        )
        of_squares = ratio(
            ratio(float(seen["squares_W"][index]), float(seen["size"])),
            ratio(_sum(errors.squares_W[index] for errors in drawn), size),
        )
        deviation = OF_A_LOOK / math.sqrt(looks)
        return Factors(trusted(of_values, deviation), trusted(math.sqrt(of_squares), deviation))


def _sum(values: Iterable[torch.Tensor]) -> float:
    return float(torch.stack(list(values)).sum())
