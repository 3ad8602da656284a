"""What 8 bits would make of the outputs: sums over samples, by which ``loka measure`` corrects what it finds on drawn rows."""

import torch

from loka.core.moments import State
from loka.core.statistics import Rule
from loka.numerics.fprop_errors import fprop_errors, some_rows
from loka.probe.statistics.contract import SLOWER, STATISTICS, Rows, add_sums


@STATISTICS.register("fprop_errors")
class SeenFpropErrors:
    rule = Rule.SUM
    every = 8  # rows of one sample already are many errors

    def observe(self, rows: Rows) -> State:
        if rows.weight_JK is None or rows.x_amax is None:
            return {}
        errors = fprop_errors(some_rows(rows.x_RK, rows.sample // self.every), rows.x_amax, rows.weight_JK)
        is_number = errors.size.isfinite() & errors.squares_W.isfinite().all()  # as of a weight that diverged it is not
        sums = {"floored_W": errors.floored_W, "squares_W": errors.squares_W, "size": errors.size}
        return {**{name: torch.where(is_number, value, 0.0) for name, value in sums.items()}, "count": is_number.double()}

    def absorb(self, state: State, rows: Rows, fade: float) -> State:
        new = self.observe(rows)
        return add_sums(state, new, fade**SLOWER) if new else state
