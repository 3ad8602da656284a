"""How counts are handed to a model: as they are, or as logarithms."""

from enum import StrEnum

import torch
from torch import Tensor


class DenseForm(StrEnum):
    LOG = "log"  # sign(x)·log(1 + |x|): tame, and what most models get
    RAW = "raw"  # as counted: heavy-tailed over many binades

    def apply(self, count: Tensor) -> Tensor:
        """The form of ``count`` a model sees; NaN stays NaN."""
        return count if self is DenseForm.RAW else torch.copysign(torch.log1p(count.abs()), count)
