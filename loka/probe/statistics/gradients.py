"""The gradient of the weight, dw = Σ dyᵀx over the rows, and what its terms are.

How far rows cancel in it decides its error in 8 bits. A few hundred rows say too little of that, so dw itself, which is made
of all rows, is averaged.
"""

import torch
from torch import Tensor

from loka.core.moments import Covariance, State
from loka.core.statistics import Rule
from loka.probe.statistics.contract import STATISTICS, Rows, add_sums


@STATISTICS.register("gradients")
class Gradients:
    rule = Rule.SUM
    every = 1

    def observe(self, rows: Rows) -> State:
        """Sums: of |x|²·|dy|² and of the reference over the chosen rows; of dw over all, where the covariance is whole."""
        if rows.dy_RN is None or rows.reference_N is None:
            return {}
        count = rows.x_RK.shape[0]
        state = {
            "products": (_norms(rows.x_RK) * _norms(rows.dy_RN)).square().sum(),
            "reference_N": count * rows.reference_N,
            "count": _number(count),
        }
        if rows.covariance is not Covariance.FULL:
            return state
        is_known, (n, k) = rows.dw_NK is not None, (rows.dy_RN.shape[1], rows.x_RK.shape[1])
        return {
            **state,
            "dw_NK": rows.x_RK.new_zeros(n, k) if rows.dw_NK is None else rows.dw_NK,
            "m": _number(rows.m if is_known else 0),
            "steps": _number(is_known),
        }

    def absorb(self, state: State, rows: Rows, fade: float) -> State:
        return add_sums(state, self.observe(rows), fade)


def _number(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64, device="cpu")


def _norms(rows_RD: Tensor) -> Tensor:
    """In float64: the squares of small gradients leave FP32."""
    return torch.linalg.vector_norm(rows_RD, dim=1, dtype=torch.float64)
