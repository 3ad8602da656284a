"""What 8 bits would make of the gradients of a weight, sample after sample."""

import torch

from loka.core.moments import State
from loka.numerics.wgrad_errors import SomeRows, wgrad_errors
from loka.probe.statistics.contract import SLOWER

VALUES = 2**14  # of x, or of dy, that are looked at in a sample on average: few batches by many rows say more than many by few
LEAST_OFTEN = 8  # one in so many samples is looked at
TOGETHER = 16  # samples whose batches are looked at in one go: on a GPU that takes hardly longer than one


class WgradHistory:
    """Sums over batches; the newest wait, a few features of their rows, until there are enough to be looked at together."""

    def __init__(self) -> None:
        self._waiting: list[SomeRows] = []
        self._sums: State = {}
        self._fade = 1.0
        self.every = 1  # one in so many samples is to be added

    def add(self, some: SomeRows, fade: float) -> None:
        """``fade`` is what a sample fades by from one to the next."""
        if self._waiting and self._waiting[0].x_RI.shape != some.x_RI.shape:
            self._look()
        self.every = _how_often(max(some.x_RI.numel(), some.dy_RJ.numel()))
        self._fade = fade ** (SLOWER * self.every)
        self._waiting.append(some)
        if len(self._waiting) * self.every >= TOGETHER:
            self._look()

    def state(self) -> State:
        """Sums over all batches, empty where there were none: of ``WgradErrors``, of their rows, of how many times as many they
        are as were looked at, and of the batches."""
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


def _how_often(values: int) -> int:
    """A power of two, so that it divides LEAST_OFTEN."""
    times = -(-values // VALUES)
    return min(LEAST_OFTEN, 1 << (times - 1).bit_length())
