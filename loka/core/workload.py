"""A Workload: everything LoKA needs to run somebody's model, and nothing of how they train it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """A model, batches to run it on, and the loss of one batch.

    ``batches`` is iterated anew by every stage: a list, a DataLoader or the like, no iterator. ``loss(model, batch)``
    is a scalar that can be differentiated; it moves the batch to the model's device where that is needed.
    """

    model: "nn.Module"
    batches: Iterable[Any]
    loss: "Callable[[nn.Module, Any], Tensor]"
