"""For the tests of check_plan: a tower whose plain self is the truth."""

from plans import batch, tower
from torch import Tensor, nn

import loka
from loka.core.plan import Plan
from loka.dispatch.check import CheckedPlan

BATCHES = [batch(60, seed) for seed in range(3)]
SITES = ("bottom", "top.0", "top.2")


def loss(model: nn.Module, x: Tensor) -> Tensor:
    """What the plain tower says is the truth, so that every error of a kernel is a loss."""
    truth = tower()(x).detach()
    return 1 + (model(x) - truth).square().mean() / truth.square().mean()


def check(plan: Plan, model: nn.Module | None = None, batches: list[Tensor] = BATCHES, **limits: object) -> CheckedPlan:
    limits = {"min_speedup": 0.0, "repeats": 1, **limits}  # emulated kernels are slow
    return loka.check_plan(model or tower(), plan, batches, loss=loss, **limits)  # type: ignore[arg-type]
