"""A plan tried in the whole model: its loss, its gradients, the time of a step."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loka.core.plan import Goal, Plan
from loka.dispatch.apply import OnMissing, apply_plan, restore
from loka.dispatch.gradient_change import GradientChange, Gradients, gradient_change
from loka.dispatch.loss_change import Loss, LossChange, change_of, losses_both_ways
from loka.dispatch.no_trace import drop_gradients, without_a_trace
from loka.dispatch.swap import AppliedPlan, put_back, put_in
from loka.nn.adamw import is_cast_in_step
from loka.nn.site_device import device_of_sites
from loka.nn.unwrap import Example, unwrapped
from loka.nn.weight_casts import holders_behind_steps
from loka.numerics.confidence import estimate_mean

MAX_GRADIENT_CHANGE = 0.7  # ten layers of a Wukong in e4m3 came to 0.14, narrow ones come to more; a lost gradient is off by 1
GRADIENT_BATCHES = 2
MOST_TIMED = 4  # times as often as asked for, while a speed-up is not known to be enough or too little


@dataclass(frozen=True)
class Round:
    """One trial of the whole plan. ``gave_back`` are the sites that went to high precision after it, if any: where the loss had
    decided, their forward pass alone if that is worth it, perhaps to a finer 8-bit format first."""

    sites: int
    change: LossChange
    gradients: GradientChange | None  # None where the loss had decided already, and in serving, which has none
    speedup: float | None  # of a step, over high precision; None where loss or gradients had decided already
    gave_back: tuple[str, ...] = ()

    def __str__(self) -> str:
        gradients = f", gradients at most {self.gradients.error:.0%} off" if self.gradients else ""
        speedup = "" if self.speedup is None else f", {self.speedup:.2f}× as fast"
        sites = "1 site" if self.sites == 1 else f"{self.sites} sites"
        return f"{sites} by the plan: loss {self.change.whole:+.4%}, rounding {self.change.rounding:.4%}{gradients}{speedup}"


@dataclass(frozen=True)
class Trial:
    """What ``check_plan`` tries plans on, and how. Between trials the model has none."""

    model: nn.Module
    batches: list[Any]
    loss: Loss
    goal: Goal
    repeats: int
    min_speedup: float
    on_missing: OnMissing
    example: Example | None
    learned: frozenset[Tensor]  # what a backward pass gives gradients to

    def alone(self, plan: Plan, site: str, high: list[float]) -> LossChange:
        """The change of loss with ``site`` alone in low precision."""
        with self._running(plan.with_alone(site)) as applied:
            return self._change(applied, high)

    def gradients_alone(self, plan: Plan, site: str) -> GradientChange:
        """The change of gradients with ``site`` alone in low precision."""
        with self._running(plan.with_alone(site)) as applied:
            return self._gradients(applied)

    def whole(self, plan: Plan, high: list[float], max_loss_change: float) -> Round:
        """The plan as it will run: its loss; if that is good, its gradients; if they are too, its time. A compiled model runs
        compiled for the latter two."""
        with self._running(plan) as applied:
            change = self._change(applied, high)
            if applied.sites and not change.harm <= max_loss_change:
                return Round(len(applied.sites), change, None, None)
            gradients = self._gradients(applied) if self.goal is Goal.TRAINING and applied.sites else None
            if gradients is not None and gradients.error > MAX_GRADIENT_CHANGE:
                return Round(len(applied.sites), change, gradients, None)
            return Round(len(applied.sites), change, gradients, self._speedup(applied))

    def _gradients(self, applied: AppliedPlan) -> GradientChange:
        """How far they are from high precision's in the model as it trains: compiled if it is, with the same random numbers."""

        def pairs() -> Iterator[tuple[Gradients, Gradients]]:
            for batch in self.batches[:GRADIENT_BATCHES]:
                planned = self._gradients_of(batch)
                with self._in_high_precision(applied):
                    high = self._gradients_of(batch)
                yield planned, high

        return gradient_change(pairs())

    def _gradients_of(self, batch: Any) -> Gradients:
        """Copies, since a replayed CUDA graph writes the next gradients to where these lie. What a pass changes in the model,
        such as batch statistics, is undone before the next."""
        with without_a_trace(self.model, self.learned), torch.enable_grad():
            self.model.train()
            self.loss(self.model, batch).backward()
            return self._named_gradients()

    def _named_gradients(self) -> Gradients:
        names: dict[Tensor, str] = {parameter: name for name, parameter in unwrapped(self.model).named_parameters()}
        gradients = {names.get(tensor) or _name_in_front(tensor): _values(tensor) for tensor in self.learned}
        return {name: values for name, values in gradients.items() if values is not None}

    def _speedup(self, applied: AppliedPlan) -> float:
        """Of a step by the plan over one in high precision, taken in turns."""
        if not applied.sites:
            return 1.0
        planned_us, plain_us = [], []
        with without_a_trace(self.model, self.learned):
            self._time_both(applied)  # warms up
            for _ in range(MOST_TIMED):
                for _ in range(self.repeats):
                    planned, plain = self._time_both(applied)
                    planned_us.append(planned)
                    plain_us.append(plain)
                if self._is_clear([plain / planned for plain, planned in zip(plain_us, planned_us, strict=True)]):
                    break
        return statistics.median(plain_us) / statistics.median(planned_us)

    def _time_both(self, applied: AppliedPlan) -> tuple[float, float]:
        """A step by the plan and one in high precision, in µs."""
        planned_us = self._pass_us()
        with self._in_high_precision(applied):
            return planned_us, self._pass_us()

    def _is_clear(self, speedups: list[float]) -> bool:
        """Whether they tell enough from too little; a single one tells what it can."""
        known = estimate_mean(speedups)
        return len(speedups) == 1 or not known.low < self.min_speedup < known.high

    @contextmanager
    def _in_high_precision(self, applied: AppliedPlan) -> Iterator[None]:
        """The model without the plan for a while; what it has compiled stays."""
        swaps = [swap for of_site in applied.swaps.values() for swap in of_site]
        inner = unwrapped(self.model)
        put_back(inner, swaps)
        try:
            yield
        finally:
            put_in(inner, swaps)

    def _change(self, applied: AppliedPlan, high: list[float]) -> LossChange:
        modules = [applied.module(site) for site in applied.sites]
        return change_of(*losses_both_ways(self.model, modules, self.batches, self.loss), high)

    @contextmanager
    def _running(self, plan: Plan) -> Iterator[AppliedPlan]:
        applied = apply_plan(self.model, plan, on_missing=self.on_missing, example=self.example)
        try:
            yield applied
        finally:
            restore(self.model)

    def _pass_us(self) -> float:
        """The time of a step, over one pass through the batches."""
        is_training = self.goal is Goal.TRAINING
        self.model.train(is_training)
        holders = holders_behind_steps(self.model, in_step=is_cast_in_step) if is_training else []
        start = self._now()
        for batch in self.batches:
            with torch.set_grad_enabled(is_training):
                value = self.loss(self.model, batch)
            if is_training:
                value.backward()
                drop_gradients(self.learned)
                for holder in holders:
                    holder.recast_after_step()
        return 1e6 * (self._now() - start) / len(self.batches)

    def _now(self) -> float:
        device = device_of_sites(self.model)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()


def _name_in_front(tensor: Tensor) -> str:
    """A name for what is no parameter of the model: like a parameter's, of a "module" that says what it is."""
    return f"the tensor of {tuple(tensor.shape)} in front of the model.{id(tensor)}"


def _values(tensor: Tensor) -> Tensor | None:
    """A copy of its gradient, if it has one; of a sparse one the values, whose places are the batch's."""
    if tensor.grad is None:
        return None
    return tensor.grad.coalesce().values().clone() if tensor.grad.is_sparse else tensor.grad.clone()
