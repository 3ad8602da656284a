"""What drawn rows get wrong about the errors of outputs, by what the Probe measured on real rows: rows that are large or small
as a whole, and largest values that no quantile tells (``loka.numerics.fprop_errors``)."""

import math
from collections.abc import Iterable

import torch

from loka.core.recipe import Recipe
from loka.core.site_record import SiteRecord
from loka.measure.factors import Factors, as_looked_at, ratio, trusted
from loka.measure.parts import SiteTensors
from loka.numerics.fprop_errors import RECIPES, FpropErrors, fprop_errors, some_outputs

OF_A_ROW = 0.8  # deviation of the logarithm of one row's error
MOST_ROWS, MOST_VALUES = 512, 2**22  # of a sample: its rows are all drawn alike


class FpropCorrection:
    """Of one site, as ``Correction`` says."""

    def __init__(self, site: SiteRecord) -> None:
        statistic = site.statistics.get("fprop_errors")
        self._seen = None if statistic is None else statistic.tensors
        if self._seen and (len(self._seen["floored_W"]) != len(RECIPES) or not self._seen["count"] > 0):
            self._seen = None  # of another version, which looked at other recipes, or of nothing
        self._drawn: list[FpropErrors] = []

    def add(self, tensors: SiteTensors) -> None:
        if self._seen is not None:
            some_RK = tensors.x[: min(MOST_ROWS, -(-MOST_VALUES // tensors.x.shape[1]))].float()
            weight_NK = tensors.weights[0]
            amaxes = [tensor.abs().amax().float() for tensor in (tensors.x, weight_NK)]
            self._drawn.append(fprop_errors(some_RK, amaxes[0], some_outputs(weight_NK), amaxes[1]))

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
            float(seen["squares_W"][index]) * size, _sum(errors.squares_W[index] for errors in drawn) * float(seen["size"])
        )
        deviation = OF_A_ROW / math.sqrt(float(seen["rows"]))
        return Factors(trusted(of_values, deviation), trusted(math.sqrt(of_squares), deviation))


def _sum(values: Iterable[torch.Tensor]) -> float:
    return float(torch.stack(list(values)).sum())
