"""What 8 bits would make of the gradients of a weight, sample after sample."""

import torch

from loka.core.moments import State
from loka.numerics.wgrad_errors import SomeRows, some_rows, wgrad_errors
from loka.probe.statistics.contract import SLOWER, Rows

TOGETHER = 16  # samples that are looked at in one go: on a GPU that takes hardly longer than one


class WgradHistory:
    """Sums over samples; the newest wait, a few features of their rows, until there are enough to be looked at together."""

    def __init__(self) -> None:
        self._waiting: list[SomeRows] = []
        self._sums: State = {}
        self._fade = 1.0

    def add(self, rows: Rows, fade: float) -> None:
        if rows.dy_RN is None:
            return
        some = some_rows(rows.x_RK, rows.dy_RN, rows.dw_NK, rows.m)
        if self._waiting and self._waiting[0].x_RI.shape != some.x_RI.shape:
            self._look()
        self._fade = fade**SLOWER
        self._waiting.append(some)
        if len(self._waiting) == TOGETHER:
            self._look()

    def state(self) -> State:
        """Sums over all samples, empty where there were none: of ``WgradErrors``, of the rows of batches, of how many times as
        many they are as were looked at, and of the samples."""
        if self._waiting:
            self._look()
        return self._sums

    def _look(self) -> None:
        errors = wgrad_errors(self._waiting)
        count, times_B = len(self._waiting), torch.stack([some.times for some in self._waiting]).double()
        weight_B = self._fade ** torch.arange(count - 1, -1, -1, dtype=torch.float64, device=errors.size_B.device)
        weight_B = weight_B * (errors.size_B > 0)  # without a gradient there is no error
        new = {
            "floored_W": errors.floored_WB @ weight_B,
            "squares_W": errors.squares_WB @ weight_B,
            "alike_W": errors.alike_WB @ weight_B,
            "size": errors.size_B @ weight_B,
            "rows": len(self._waiting[0].x_RI) * times_B @ weight_B,
            "times": times_B @ weight_B,
            "count": weight_B.sum(),
        }
        faded = self._fade**count
        self._sums = {name: value + faded * self._sums[name] for name, value in new.items()} if self._sums else new
        self._waiting = []
