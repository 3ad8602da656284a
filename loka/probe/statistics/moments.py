"""Mean and covariance of x and of dy's two parts together: how features go with each other, and gradients with them."""

from loka.core.moments import State, add_rows, moments_of
from loka.core.statistics import Rule
from loka.probe.statistics.contract import STATISTICS, Rows


@STATISTICS.register("moments")
class JointMoments:
    rule = Rule.MOMENTS
    every = 1

    def observe(self, rows: Rows) -> State:
        return moments_of(rows.joint_RD, rows.covariance)

    def absorb(self, state: State, rows: Rows, fade: float) -> State:
        return add_rows(state, rows.joint_RD, fade)
