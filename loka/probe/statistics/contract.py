"""What a statistic is, and the registry of them."""

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from loka.core.moments import Covariance, State
from loka.core.registry import Registry
from loka.core.statistics import Rule, Statistic
from loka.probe import statistics


@dataclass(frozen=True)
class Rows:
    """Rows of one call of a site: x, and of the same rows dy where the site trains. FP32, finite, without gradients."""

    x_RK: Tensor
    dy_RN: Tensor | None
    covariance: Covariance

    @cached_property
    def joint_RD(self) -> Tensor:
        return self.x_RK if self.dy_RN is None else torch.cat([self.x_RK, self.dy_RN], dim=1)


class Observer(Protocol):
    """One statistic: the state of one batch of rows, and how two states merge."""

    rule: Rule

    def observe(self, rows: Rows) -> State: ...


def _import_statistics() -> None:
    for module in pkgutil.iter_modules(statistics.__path__, f"{statistics.__name__}."):
        importlib.import_module(module.name)


STATISTICS: Registry[Observer] = Registry("statistic", discover=_import_statistics)


def observe(rows: Rows) -> dict[str, Statistic]:
    """Every statistic of one batch of rows."""
    return {name: Statistic(observer.rule, observer.observe(rows)) for name, observer in STATISTICS.items()}
