"""Weights over time: each sampled step a snapshot of every weight, learned as a matrix normal."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from loka.core.matrix_normal import WIDEST, fits, matrix_normal_elements, observe_weight
from loka.core.moments import State
from loka.core.statistics import Rule, Statistic
from loka.nn.kept_state import left_as_it_was


def weight_of(site: nn.Linear) -> Tensor:
    """The weight, without gradients. One that is parametrized is made when it is read, which may change what it is made from
    (a spectral norm goes on iterating): that is put back."""
    if (weight_NK := site._parameters.get("weight")) is not None:
        return weight_NK.detach()
    with torch.no_grad(), left_as_it_was(site):
        return site.weight.detach()


def plain_weight(site: nn.Linear) -> nn.Parameter | None:
    """The weight where it is a parameter that lies as N×K: not one that is made in every call, or packed."""
    weight_NK = site._parameters.get("weight")
    return weight_NK if weight_NK is not None and weight_NK.shape == (site.out_features, site.in_features) else None


def weight_learns(site: nn.Linear) -> bool:
    """Whether the weight, or what it is made from, is trained."""
    return any(parameter.requires_grad for name, parameter in site.named_parameters() if name != "bias")


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
            self._states[name] = observe_weight(state, weight_of(self._sites[name]))

    def statistic(self, name: str) -> dict[str, Statistic]:
        """Under its name in a Record; nothing for a site that is not followed."""
        state = self._states.get(name)
        return {} if state is None else {"weights": Statistic(Rule.MATRIX_NORMAL, state)}

    def notes(self, name: str) -> tuple[str, ...]:
        return () if name in self._states else (f"wider than {WIDEST}: its weight is not followed over time",)
