"""A step of Adam on one weight, for casters that make it and write the weight's codes in one pass."""

import math
from typing import NamedTuple

from torch import Tensor


class AdamStep(NamedTuple):
    """All tensors lie on the weight's device; ``gradient`` and both averages have its shape, and are FP32 as it is."""

    gradient: Tensor
    average: Tensor
    square: Tensor  # the average of squares
    step: Tensor  # the number of this step, counted from 1
    settings: Tensor  # what ``settings_of`` returns
    found_inf: Tensor | None  # where it is 1, nothing is changed

    def places(self) -> tuple[int, ...]:
        return tuple(-1 if tensor is None else tensor.data_ptr() for tensor in self)


def settings_of(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> tuple[float, ...]:
    """What kernels read, in their order. For each β also 1 − β and log β: computed in FP32 from β, both would lose digits."""
    of_betas = ((beta, 1 - beta, math.log(beta) if beta else -math.inf) for beta in betas)
    return lr, weight_decay, eps, *(value for three in of_betas for value in three)
