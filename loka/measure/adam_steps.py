"""Steps of Adam on weights that are there to be timed: what a cast adds to a step is what a step with it takes longer.

torch steps all weights of a model at once, and one alone would leave most of a GPU idle: it gets all copies of a weight in the
turn of the first. Casters step them one by one.
"""

from functools import cached_property

import torch
from torch import Tensor

from loka.kernels.stepping import AdamStep, settings_of

BETAS, EPS = (0.9, 0.999), 1e-8


class AdamSteps:
    """Of ``copies`` FP32 weights of one shape; with a learning rate of 0, which leaves them where they are."""

    def __init__(self, weight_NK: Tensor, copies: int) -> None:
        self._copies = copies
        self._settings = torch.tensor(settings_of(0.0, BETAS, EPS, 0.0), dtype=torch.float32, device=weight_NK.device)
        self._gradients, self._averages, self._squares = (
            [torch.randn_like(weight_NK).square_() for _ in range(copies)] for _ in range(3)
        )
        self._steps = [torch.ones((), device=weight_NK.device) for _ in range(copies)]

    def of(self, turn: int) -> AdamStep:
        """The step of the weight whose turn it is."""
        index = turn % self._copies
        tensors = (self._gradients[index], self._averages[index], self._squares[index], self._steps[index])
        return AdamStep(*tensors, self._settings, found_inf=None)

    @cached_property
    def _weights(self) -> list[Tensor]:
        """Their own: a weight that torch has stepped would count as one whose casts are old."""
        return [torch.zeros_like(gradient_NK) for gradient_NK in self._gradients]

    def by_torch(self, turn: int) -> None:
        if turn % self._copies:
            return
        torch._fused_adamw_(
            self._weights, self._gradients, self._averages, self._squares, [], self._steps,
            lr=0.0, beta1=BETAS[0], beta2=BETAS[1], weight_decay=0.0, eps=EPS, amsgrad=False, maximize=False,
        )  # fmt: skip
