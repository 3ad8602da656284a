"""What 8 bits would make of the gradients of a weight, sample after sample."""

import torch

from loka.core.moments import State
from loka.numerics.wgrad_errors import MOST_FEATURES, VALUES, SomeRows, features_looked_at, wgrad_errors
from loka.probe.statistics.contract import SLOWER

LEAST_OFTEN = 8  # one in so many samples is looked at; as often as errors of outputs, which need the same
TOGETHER = 16  # samples whose batches are looked at in one go: on a GPU that takes hardly longer than one


class WgradHistory:
    """Sums over batches; the newest wait, a few features of their rows, until there are enough to be looked at together."""

    def __init__(self) -> None:
        self._waiting: list[SomeRows] = []
        self._sums: State = {}
        self._fade = 1.0
        self.every = 1  # one in so many samples is to be added,
        self.features = MOST_FEATURES  # of its x and dy so many

    def add(self, some: SomeRows, fade: float) -> None:
        """``fade`` is what a sample fades by from one to the next."""
        if self._waiting and _shapes(self._waiting[0]) != _shapes(some):
            self._look()
        self.features = features_looked_at(len(some.x_RI))
        self.every = _how_often(len(some.x_RI) * min(self.features, max(some.x_RI.shape[1], some.dy_RJ.shape[1])))
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


def _shapes(some: SomeRows) -> list[torch.Size]:
    return [part.shape for part in some]


def _how_often(values: int) -> int:
    """So that VALUES are looked at in a sample on average; a power of two, so that it divides LEAST_OFTEN."""
    times = -(-values // VALUES)
    return min(LEAST_OFTEN, 1 << (times - 1).bit_length())
