"""How the values of x and dy lie over the binades: how much range a format must have to hold them.

v is counted at e where 2^e ≤ |v| < 2^(e+1), for e from LOWEST on; both ends gather what is beyond them, the last count is
that of zeros.
"""

import torch
from torch import Tensor

from loka.core.moments import State
from loka.core.statistics import Rule
from loka.probe.statistics.contract import STATISTICS, Rows

LOWEST, BINADES = -48, 80
VALUES = 2**16  # of a tensor, at most: rows are chosen at random, so any of them stand for all


@STATISTICS.register("binades")
class Binades:
    rule = Rule.SUM
    every = 1

    def observe(self, rows: Rows) -> State:
        state = {"x_B": counts_by_binade(rows.x_RK)}
        return state if rows.dy_RN is None else {**state, "dy_B": counts_by_binade(rows.dy_RN)}


def counts_by_binade(values_RD: Tensor) -> Tensor:
    """In float64, in which sums of counts are exact."""
    values = values_RD[: max(1, VALUES // values_RD.shape[1])].flatten()
    index = (torch.frexp(values).exponent - 1 - LOWEST).clamp(0, BINADES - 1)
    index = torch.where(values == 0, BINADES, index).long()
    return torch.bincount(index, minlength=BINADES + 1).double()


def share_below(counts_B: Tensor, binades: int) -> float:
    """Which share of the nonzero values is more than ``binades`` under the largest."""
    nonzero_B = counts_B[:BINADES]
    if not nonzero_B.any():
        return 0.0
    largest = int(nonzero_B.nonzero().max())
    return float(nonzero_B[: max(0, largest - binades)].sum() / nonzero_B.sum())
