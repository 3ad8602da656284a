"""What a statistic is, and the registry of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from loka.core.gradient_rows import split_rows
from loka.core.moments import Covariance, State
from loka.core.registry import Registry
from loka.core.statistics import Rule, Statistic
from loka.numerics.wgrad_errors import SomeRows


@dataclass(frozen=True)
class Rows:
    """Rows of a site's calls in one step: x, and of the same rows dy where the site trains. FP32, finite, without gradients."""

    x_RK: Tensor
    dy_RN: Tensor | None
    covariance: Covariance
    m: int  # rows of all calls together,
    dw_NK: Tensor | None = None  # and Σ dyᵀx over them, the gradient of the weight; None where it is not this site's alone
    reference_N: Tensor | None = None  # by which dy is split, see loka.core.gradient_rows
    x_amax_R1: Tensor | None = None  # the largest magnitude of x in the call that a row is of
    weight_JK: Tensor | None = None  # some outputs' rows of the weight after the step; None where not due or made in every call
    w_amax: Tensor | None = None  # of all of the weight
    many: SomeRows | None = None  # more rows, with only a few of their features
    sample: int = 0  # how many samples of the site came before

    def tensors(self) -> list[Tensor]:
        """Those that are held."""
        held = (self.x_RK, self.dy_RN, self.dw_NK, self.reference_N, self.x_amax_R1, self.weight_JK, self.w_amax)
        return [tensor for tensor in (*held, *(self.many or ())) if tensor is not None]

    @cached_property
    def joint_RD(self) -> Tensor:
        """x, and u and e where there are gradients."""
        if self.dy_RN is None or self.reference_N is None:
            return self.x_RK
        u_RN, e_R = split_rows(self.dy_RN, self.reference_N)
        return torch.cat([self.x_RK, u_RN, e_R[:, None]], dim=1)


class Observer(Protocol):
    """One statistic. It waits for no device: rows may be looked at while the model trains on."""

    rule: Rule
    every: int  # one in so many of a site's samples is looked at

    def observe(self, rows: Rows) -> State:
        """The state of these rows; empty where they say nothing."""
        ...

    def absorb(self, state: State, rows: Rows, fade: float) -> State:
        """The state of these rows and those of ``state``, which count for ``fade`` times as much as they did.
        ``state`` may change in place."""
        ...


def add_sums(old: State, new: State, fade: float) -> State:
    """``new``, and ``fade`` times what was summed before."""
    return {name: torch.add(tensor, old[name], alpha=fade) for name, tensor in new.items()}


# Errors on real rows fade by ``fade**SLOWER``: what is wrong with drawn rows changes slowly, and takes many samples to see.
SLOWER = 0.1

STATISTICS: Registry[Observer] = Registry("statistic", "loka.probe.statistics")


def is_due(statistic: str, sample: int) -> bool:
    """Whether it is the statistic's turn at a site's sample; ``sample`` is how many came before."""
    return sample % STATISTICS.get(statistic).every == 0


def observe(rows: Rows) -> dict[str, Statistic]:
    """Every statistic that the rows have something to say about."""
    states = {name: observer.observe(rows) for name, observer in STATISTICS.items()}
    return {name: Statistic(STATISTICS.get(name).rule, state) for name, state in states.items() if state}


def absorb(known: Mapping[str, Statistic], rows: Rows, fade: float) -> dict[str, Statistic]:
    """What is ``known``, with what the rows say where it is a statistic's turn at this sample of the site's.

    ``fade`` is what a sample fades by from one to the next; a statistic that waited for its turn fades by all it missed.
    """
    due = {name: observer for name, observer in STATISTICS.items() if name in known and is_due(name, rows.sample)}
    states = {name: observer.absorb(known[name].tensors, rows, fade**observer.every) for name, observer in due.items()}
    return {**known, **{name: Statistic(due[name].rule, state) for name, state in states.items()}}
