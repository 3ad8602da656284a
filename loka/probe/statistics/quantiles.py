"""The quantiles of every feature of x, and of dy's two parts: tails, exact zeros, values that occur again and again."""

from loka.core.marginals import LEVELS, fade_quantiles, merge_quantiles, quantiles_of
from loka.core.moments import State
from loka.core.statistics import Rule
from loka.probe.statistics.contract import STATISTICS, Rows


@STATISTICS.register("quantiles")
class Quantiles:
    rule = Rule.QUANTILES
    every = 2  # merging them takes longer than all else

    def observe(self, rows: Rows) -> State:
        return quantiles_of(rows.joint_RD, LEVELS[rows.covariance])

    def absorb(self, state: State, rows: Rows, fade: float) -> State:
        return merge_quantiles(fade_quantiles(state, fade), self.observe(rows))
