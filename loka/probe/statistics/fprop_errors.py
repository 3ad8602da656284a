"""What 8 bits would make of the outputs: sums over samples, by which ``loka measure`` corrects what it finds on drawn rows."""

import torch

from loka.core.moments import State
from loka.core.statistics import Rule
from loka.numerics.fprop_errors import fprop_errors, which_rows
from loka.probe.statistics.contract import SLOWER, STATISTICS, Rows, add_sums


@STATISTICS.register("fprop_errors")
class SeenFpropErrors:
    rule = Rule.SUM
    every = 8  # the rows of one sample give many errors already

    def observe(self, rows: Rows) -> State:
        if rows.weight_JK is None or rows.w_amax is None or rows.x_amax_R1 is None:
            return {}
        some_S = which_rows(rows.x_RK, rows.sample // self.every)
        errors = fprop_errors(rows.x_RK[some_S], rows.x_amax_R1[some_S], rows.weight_JK, rows.w_amax)
        # Rows without a y besides 0, or with errors that are no numbers, do not count.
        counts = (errors.size > 0) & errors.size.isfinite() & errors.squares_W.isfinite().all()
        new = {**errors._asdict(), "rows": torch.full_like(errors.size, len(some_S)), "count": torch.ones_like(errors.size)}
        return {name: torch.where(counts, value, 0.0) for name, value in new.items()}

    def absorb(self, state: State, rows: Rows, fade: float) -> State:
        new = self.observe(rows)
        return add_sums(state, new, fade**SLOWER) if new else state
