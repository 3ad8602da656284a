"""What a Probe learns about a site, as named states with a rule by which two of them become one.

A statistic is made of one batch's rows (``loka.probe.statistics``); batches, shards and runs are then all merged alike.
"""

from dataclasses import dataclass
from enum import StrEnum

from loka.core.marginals import merge_quantiles
from loka.core.matrix_normal import merge_matrix_normals
from loka.core.moments import Covariance, State, covariance_of, merge_moments


class Rule(StrEnum):
    """How two states of a statistic become one."""

    SUM = "sum"  # counts, histograms, and sums of what is averaged
    MOMENTS = "moments"  # see loka.core.moments
    QUANTILES = "quantiles"  # see loka.core.marginals
    MATRIX_NORMAL = "matrix normal"  # see loka.core.matrix_normal


@dataclass(frozen=True)
class Statistic:
    """One statistic of one site: its tensors and how they merge."""

    rule: Rule
    tensors: State

    @property
    def is_exact(self) -> bool:
        """Whether merging gives what one Probe over all rows would have; if not, it is close to that."""
        if self.rule is Rule.MOMENTS:
            return covariance_of(self.tensors) is not Covariance.LOW_RANK
        return self.rule is Rule.SUM

    def merge(self, other: "Statistic") -> "Statistic":
        if self.rule is Rule.MOMENTS:
            return Statistic(self.rule, merge_moments(self.tensors, other.tensors))
        if self.rule is Rule.QUANTILES:
            return Statistic(self.rule, merge_quantiles(self.tensors, other.tensors))
        if self.rule is Rule.MATRIX_NORMAL:
            return Statistic(self.rule, merge_matrix_normals(self.tensors, other.tensors))
        return Statistic(self.rule, {name: tensor + other.tensors[name] for name, tensor in self.tensors.items()})
