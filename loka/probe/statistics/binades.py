"""How the values of x and dy lie over the binades: how much range a format must have to hold them.

v is counted at e where 2^e ≤ |v| < 2^(e+1), for e from LOWEST on; both ends gather what is beyond them, the last count is
that of zeros.
"""

import torch
from torch import Tensor

from loka.core.moments import State
from loka.core.statistics import Rule
from loka.probe.statistics.contract import STATISTICS, Rows, add_sums

LOWEST, BINADES = -48, 80
_BIAS = 127
VALUES = 2**16  # of a tensor, at most; of more, evenly spaced rows, which lie in the order of the calls and of the batch


@STATISTICS.register("binades")
class Binades:
    rule = Rule.SUM
    every = 4  # what a format must hold moves slowly, and so many values tell it at once

    def observe(self, rows: Rows) -> State:
        state = {"x_B": counts_by_binade(rows.x_RK)}
        return state if rows.dy_RN is None else {**state, "dy_B": counts_by_binade(rows.dy_RN)}

    def absorb(self, state: State, rows: Rows, fade: float) -> State:
        return add_sums(state, self.observe(rows), fade)


def counts_by_binade(values_RD: Tensor) -> Tensor:
    """In float64, in which sums of counts are exact."""
    values_V = values_RD[:: -(-values_RD.numel() // VALUES)].flatten()
    exponent_V = (values_V.view(torch.int32) >> 23 & 0xFF) - _BIAS  # as FP32 has it
    bin_V = exponent_V.sub_(LOWEST).clamp_(0, BINADES - 1).masked_fill_(values_V == 0, BINADES)
    if values_V.device.type == "cpu":
        counts_B = torch.bincount(bin_V, minlength=BINADES + 1)
    else:  # where bincount would ask for the largest bin, and wait
        counts_B = (bin_V[:, None] == torch.arange(BINADES + 1, device=bin_V.device)).sum(0)
    return counts_B.double()


def share_below(counts_B: Tensor, binades: int) -> float:
    """Which share of the nonzero values is more than ``binades`` under the largest."""
    nonzero_B = counts_B[:BINADES]
    if not nonzero_B.any():
        return 0.0
    largest = int(nonzero_B.nonzero().max())
    return float(nonzero_B[: max(0, largest - binades)].sum() / nonzero_B.sum())
