"""What a plan does to the loss of a model as it is: the change that came out, and what rounding costs on average.

The errors d of a plan change the loss by g·d + ½·dᵀHd + …. The first term is of either sign, is large on few batches, and is no
cost: training, or the next batch, makes it another. The second is the price of noise. With all errors turned around the first
changes its sign and the second does not, so

    rounding = (loss(+d) + loss(−d)) / 2 − loss(0)

measures the second from few batches. Every error that a planned site made in the first pass is subtracted in the second pass
from what the site would give in high precision.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loka.core.errors import InvalidInput
from loka.nn.fused_block import FusedBlock
from loka.nn.kept_state import left_as_it_was, random_state_kept
from loka.nn.linear import has_rows, input_of
from loka.numerics.confidence import estimate_mean

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class LossChange:
    """Relative to the loss in high precision: 0.0002 is 0.02 %."""

    whole: float  # as it came out on these batches,
    surely: float  # the lower end of its 95 % interval over them,
    rounding: float  # and its even part

    @property
    def harm(self) -> float:
        """What a limit is held against: the price of rounding, or more where the loss has surely risen by more."""
        return max(self.surely, self.rounding) if math.isfinite(self.whole + self.rounding) else math.inf

    def __str__(self) -> str:
        return f"{self.rounding:.3%} of the loss ({self.whole:+.3%} on these batches)"


def losses(model: nn.Module, batches: Sequence[Any], loss: Loss) -> list[float]:
    """By batch, in eval mode. Every pass begins with the same model and random numbers: what a loss draws, such as negatives,
    is the same in each. Eager, since these passes are few and every plan would compile anew."""
    return [_loss_of(model, batch, loss) for batch in batches]


def _loss_of(model: nn.Module, batch: Any, loss: Loss) -> float:
    eager = torch.compiler.set_stance("force_eager")
    with left_as_it_was(model), random_state_kept(model), torch.no_grad(), eager:
        model.eval()
        return float(scalar(loss(model, batch)))


def scalar(value: object) -> Tensor:
    """What ``loss`` gave, if it is what it must be."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise InvalidInput(f"loss(model, batch) must be a tensor with one number, the mean over the batch; got {what}")
    return value


def losses_both_ways(
    model: nn.Module, planned: Sequence[nn.Module], batches: Sequence[Any], loss: Loss
) -> tuple[list[float], list[float]]:
    """The losses by batch with the errors of the modules in ``planned`` as they are, and with them turned around."""
    both = []
    for batch in batches:
        errors: Errors = {}
        with _hooked(planned, partial(_record, errors)):
            as_it_is = losses(model, [batch], loss)
        with _hooked(planned, partial(_turn_around, errors)):
            both.append((*as_it_is, *losses(model, [batch], loss)))
    return [one for one, _ in both], [other for _, other in both]


def change_of(planned: Sequence[float], mirrored: Sequence[float], high: Sequence[float]) -> LossChange:
    """From the losses by batch: of the plan, of the plan with its errors turned around, and in high precision."""
    scale = abs(sum(high) / len(high))
    changes = estimate_mean([(a - c) / scale for a, c in zip(planned, high, strict=True)])
    even = [((a + b) / 2 - c) / scale for a, b, c in zip(planned, mirrored, high, strict=True)]
    return LossChange(changes.mean, changes.low, sum(even) / len(even))


Hook = Callable[[nn.Module, Tensor, Tensor], Tensor | None]  # a site, what it gave, and what it would give in high precision
Errors = dict[nn.Module, deque[Tensor]]  # by site, in the order of its calls


@contextmanager
def _hooked(modules: Sequence[nn.Module], hook: Hook) -> Iterator[None]:
    def run(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], rounded: Tensor) -> Tensor | None:
        x = input_of(args, kwargs)
        return hook(module, rounded, _in_high_precision(module, x)) if has_rows(x) else None  # else it ran in high precision

    followers = {block for module in modules if isinstance(module, FusedBlock) for block in module.followers}
    handles = [module.register_forward_hook(run, with_kwargs=True) for module in modules if module not in followers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _record(errors: Errors, site: nn.Module, rounded: Tensor, exact: Tensor) -> None:
    errors.setdefault(site, deque()).append(rounded.float() - exact.float())


def _turn_around(errors: Errors, site: nn.Module, rounded: Tensor, exact: Tensor) -> Tensor | None:
    """Rounding in front of a router sends rows to other experts: a call of more or fewer rows than before is left rounded."""
    of_site = errors.get(site)
    error = of_site.popleft() if of_site else None
    return None if error is None or error.shape != exact.shape else (exact.float() - error).to(rounded.dtype)


def _in_high_precision(module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, FusedBlock):
        return module.chain_reference(x)
    assert isinstance(module, nn.Linear)
    return F.linear(x, module.weight, module.bias)
