"""One batch of a click stream, and the schema that every batch of a data set follows.

Axes:  B examples,  D dense features,  F one-hot features,  G bags,  S ids in a bag,  L steps of the sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

PADDING = -1  # fills bags and sequences that are shorter than their tensor


@dataclass(frozen=True)
class FeatureSchema:
    """What a model must know of its input before it sees any: how many features of each kind, and how many ids each has."""

    n_dense: int
    onehot_sizes: tuple[int, ...]
    multihot_sizes: tuple[int, ...] = ()
    bag_length: int = 0  # S, the same for every bag
    sequence_size: int = 0  # how many ids the sequence draws from; 0 where there is no sequence
    sequence_length: int = 0


@dataclass(frozen=True)
class Batch:
    """Features and labels of B examples, on one device. A missing dense value is NaN."""

    dense_BD: Tensor  # float32
    onehot_BF: Tensor  # int64
    label_B: Tensor  # float32, 0 or 1
    multihot_BGS: Tensor | None = None  # int64, PADDING where a bag is shorter
    sequence_BL: Tensor | None = None  # int64, oldest first, PADDING in front where a history is shorter
    times_BL: Tensor | None = None  # float32, seconds before the example's own time; 0 at PADDING
    teacher_logit_B: Tensor | None = None  # float32, the log-odds that labels were drawn from, if known: the best prediction

    def __len__(self) -> int:
        return self.label_B.shape[0]

    def __getitem__(self, examples: slice) -> "Batch":
        """Some of the examples, sharing memory with the whole."""
        return self._each(lambda tensor: tensor[examples])

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def _each(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        def optional(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else function(tensor)

        return Batch(
            function(self.dense_BD),
            function(self.onehot_BF),
            function(self.label_B),
            optional(self.multihot_BGS),
            optional(self.sequence_BL),
            optional(self.times_BL),
            optional(self.teacher_logit_B),
        )
