"""Weights over time: each sampled step a snapshot of every weight, learned as a matrix normal."""

from collections.abc import Mapping

from torch import nn

from loka.core.matrix_normal import WIDEST, fits, matrix_normal_elements, observe_weight
from loka.core.moments import State
from loka.core.statistics import Rule, Statistic


class WeightsOverTime:
    """Follows the weights of ``sites``, except those that are too wide for it."""

    def __init__(self, sites: Mapping[str, nn.Linear]) -> None:
        self._states: dict[str, State | None] = {
            name: None for name, site in sites.items() if fits(site.out_features, site.in_features)
        }
        self._sites = sites

    @property
    def bytes(self) -> int:
        """What it will take, in FP32."""
        sites = (self._sites[name] for name in self._states)
        return 4 * sum(matrix_normal_elements(site.out_features, site.in_features) for site in sites)

    def observe(self) -> None:
        for name, state in self._states.items():
            self._states[name] = observe_weight(state, self._sites[name].weight)

    def statistic(self, name: str) -> dict[str, Statistic]:
        """Under its name in a Record; nothing for a site that is not followed."""
        state = self._states.get(name)
        return {} if state is None else {"weights": Statistic(Rule.MATRIX_NORMAL, state)}

    def notes(self, name: str) -> tuple[str, ...]:
        return () if name in self._states else (f"wider than {WIDEST}: its weight is not followed over time",)
