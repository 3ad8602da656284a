"""A number over the time of a run, remembered in few places."""

import math

import torch
from torch import Tensor

LONGEST = 256


class History:
    """Numbers at even intervals from the first on. When there are too many, every second one is dropped, and half as
    many are taken from then on.

    They stay on their device until they are asked for: the host does not wait.
    """

    def __init__(self) -> None:
        self._values: list[Tensor] = []
        self._seen, self._stride = 0, 1

    def add(self, value: Tensor) -> None:
        if self._seen % self._stride == 0:
            self._values.append(value)
        self._seen += 1
        if len(self._values) > LONGEST:
            self._values = self._values[::2]
            self._stride *= 2

    def numbers(self) -> tuple[float, ...]:
        """Those that are finite: of a model that diverged, up to where it did."""
        return tuple(filter(math.isfinite, torch.stack(self._values).tolist())) if self._values else ()
