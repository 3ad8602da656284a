"""``check_plan``: the joint check of a plan on held-out batches, quality, gradients and end-to-end time, giving sites back.

Errors of sites add and cancel, and what wins at one site need not win in a model, so the whole is tried as it will run.
"""

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from loka.core.errors import InvalidInput, require_kind
from loka.core.gemm import Role
from loka.core.plan import Goal, Plan, SitePlan
from loka.core.progress import Progress, Silent
from loka.dispatch.apply import OnMissing
from loka.dispatch.give_back import too_costly, too_slow
from loka.dispatch.gradient_change import GradientChange
from loka.dispatch.loss_change import Loss, LossChange, losses
from loka.dispatch.no_trace import learned_by, without_a_trace
from loka.dispatch.plan_trial import Round, Trial
from loka.dispatch.swap import applied_to, refuse_applied_parts
from loka.nn.fast_path import without_fast_path
from loka.nn.unwrap import Example, unwrapped

# Relative to the loss. A model that trains by a plan pays up to twice what rounding costs one that did not train by it (0.015 %
# by this check came to 0.024 %), and 0.02 % is what it may pay.
MAX_LOSS_CHANGE = {Goal.TRAINING: 5e-5, Goal.SERVING: 2e-4}
LEAST_DIFFERENCE = 1e-6  # relative; two passes of a loss that differ by less are no error: sums in another order make less
_GIVEN_BACK = "given back by check_plan: "  # in front of the reason, in the plan


@dataclass(frozen=True)
class CheckedPlan:
    """The plan that passed, and what was found on the way."""

    plan: Plan
    baseline_loss: float
    rounds: tuple[Round, ...]
    alone: dict[str, LossChange]  # what each site did by itself when last tried; empty where the loss never was over its limit

    @property
    def given_back(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(site for one in self.rounds for site in one.gave_back))

    def __str__(self) -> str:
        return "\n".join((f"{self.rounds[-1]}; high precision has a loss of {self.baseline_loss:.5g}", *self._gave_back_why()))

    def _gave_back_why(self) -> list[str]:
        """A line for each reason."""
        planned = {site.site: site for site in self.plan.sites}
        names: dict[str, list[str]] = {}
        for name in self.given_back:
            why = planned[name].reason.removeprefix(_GIVEN_BACK)
            names.setdefault(why, []).append(f"{name}{_what_of_it(self.plan, planned[name])}")
        return [f"given back: {', '.join(together)}: {why}" for why, together in names.items()]


def check_plan(
    model: nn.Module,
    plan: Plan,
    batches: Iterable[Any],
    *,
    loss: Loss,
    max_loss_change: float | None = None,
    min_speedup: float = 1.0,
    on_missing: OnMissing = "error",
    example: Example | None = None,
    repeats: int = 5,
    progress: Progress | None = None,
) -> CheckedPlan:
    """Try ``plan`` in ``model`` on held-out ``batches``, and give sites back until the whole passes.

    It passes three tests, in this order; where one fails, sites go, and the rest is tried again.

    - Loss: rounding costs at most ``max_loss_change`` of it, relatively (0.02 % for serving, 0.005 % for training, where it
      grows), and the loss on these batches has not surely risen by more (see ``loka.dispatch.loss_change``). The sites go that
      save least for what they harm by themselves: fprop alone where that is worth it, to a finer 8-bit format first.
    - Gradients, in training: no module's are off by more than 70 % of their size, nor those of what lies in front of the model,
      in the model as it is compiled. This sees that they arrive; how exact they are is the plan's limit at each role. The site
      goes whose gradients are furthest off by itself.
    - Time: a step (forward, backward and the casts of weights for a training plan, forward for serving) is at least
      ``min_speedup`` times as fast, timed ``repeats`` times over the batches; two and more go on up to four times as often
      while their 95 % interval leaves that open. A quarter of the sites goes, those that the plan expects to save least.

    ``loss(model, batch)`` is a scalar. One batch says nothing of how far the loss spreads between batches, so that what it has
    risen by counts from two on. ``on_missing`` and ``example`` are ``apply_plan``'s. The model is left as it was,
    without a plan. ``progress``, such as ``loka.core.progress.for_this_output()``, shows every round and every site that is
    tried by itself; without it the call is silent.
    """
    require_kind(plan, Plan, "the plan", "load it with loka.Plan.load(run)")
    if applied_to(model) is not None:
        raise InvalidInput("check_plan applies the plan itself: loka.restore(model) first")
    refuse_applied_parts(model)
    held_out = _listed(batches)
    if not held_out:
        raise InvalidInput("there is nothing to check on: give at least one held-out batch")
    if repeats < 1:
        raise InvalidInput(f"repeats must be at least 1, got {repeats}")
    for name, value in (("max_loss_change", max_loss_change), ("min_speedup", min_speedup)):
        if value is not None and math.isnan(value):
            raise InvalidInput(f"{name} must be a number, got {value}")
    if max_loss_change is not None and max_loss_change < 0:
        raise InvalidInput(f"max_loss_change must be at least 0, got {max_loss_change}")
    is_training = plan.document.goal is Goal.TRAINING
    if is_training and torch.is_inference_mode_enabled():
        raise InvalidInput("a training plan is checked by gradients: call check_plan outside of torch.inference_mode()")
    limit = MAX_LOSS_CHANGE[plan.document.goal] if max_loss_change is None else max_loss_change
    learned = learned_by(model, loss, held_out) if is_training else frozenset()  # serving never asks for gradients
    trial = Trial(model, held_out, loss, plan.document.goal, repeats, min_speedup, on_missing, example, learned)
    as_it_runs = without_fast_path() if is_training else nullcontext()  # a trained model is judged in eval mode
    with progress or Silent() as shown, without_a_trace(model, learned), _room_to_compile(model), as_it_runs:
        high, again = losses(model, held_out, loss), list[float]()
        if not _runs(model, lambda: again.extend(losses(model, held_out, loss))):  # nothing that a plan does would show
            raise InvalidInput(
                "loss(model, batch) called neither the model that it was given nor a layer of it: it must run it"
            )
        baseline_loss = statistics.fmean(high)
        for number, of_batch in enumerate(high, start=1):
            if not math.isfinite(of_batch):
                raise InvalidInput(
                    f"the loss of batch {number} of {len(high)} is {of_batch} in high precision: look for NaN in that batch, "
                    f"or whether it is empty, and leave it out"
                )
        if baseline_loss == 0:
            raise InvalidInput("the loss in high precision is 0 on these batches: no change is relative to that")
        _require_repeatable(high, again, max(limit, LEAST_DIFFERENCE) * abs(baseline_loss))
        rounds: list[Round] = []
        alone = _Alone(trial, high, shown)
        while True:
            planned = [site for site in plan.sites if plan.document.moves(site)]
            tried = trial.whole(plan, high, limit)
            shown.say(str(tried))
            if tried.speedup is not None and (not planned or tried.speedup >= min_speedup):
                return CheckedPlan(plan, baseline_loss, (*rounds, tried), alone.changes)
            if tried.speedup is not None:
                plan, gone = _without_slow(plan, planned, tried.speedup)
            elif tried.gradients is not None:
                plan, gone = alone.without_worst_gradients(plan, planned, tried.gradients)
            else:
                plan, gone = alone.without_costly_forwards(plan, planned, tried.change, limit)
            rounds.append(replace(tried, gave_back=(*gone, *_gone_with(gone, planned, plan))))
            shown.say(f"given back: {', '.join(rounds[-1].gave_back)}")


def _listed(batches: Iterable[Any]) -> list[Any]:
    try:
        several = None if isinstance(batches, Mapping | Tensor | str) else iter(batches)
    except TypeError:
        several = None
    if several is None:
        raise InvalidInput(
            f"batches must be several, in a list or a loader, got one {type(batches).__name__}: put it into a list"
        )
    return list(several)


def _runs(model: nn.Module, call: Callable[[], object]) -> bool:
    """Whether ``call`` calls the model or one of its linear layers."""
    root, called = unwrapped(model), []
    watched = [module for module in root.modules() if module is root or isinstance(module, nn.Linear)]
    handles = [module.register_forward_pre_hook(lambda *_: called.append(None)) for module in watched]
    try:
        call()
    finally:
        for handle in handles:
            handle.remove()
    return bool(called)


def _gone_with(gone: Collection[str], before: Iterable[SitePlan], plan: Plan) -> list[str]:
    """The sites that went back beside those ``gone``: blocks that do not pay without the one in front."""
    moved = {site.site for site in plan.sites if plan.document.moves(site)}
    return [site.site for site in before if site.site not in moved and site.site not in gone]


def _without_slow(plan: Plan, planned: Sequence[SitePlan], speedup: float) -> tuple[Plan, tuple[str, ...]]:
    """The plan without the sites that save least, and which those are."""
    gone = too_slow(planned)
    why = f"the whole plan ran {speedup:.2f}× as fast as high precision, and this site saves little"
    return plan.giving_back(dict.fromkeys(gone, f"{_GIVEN_BACK}{why}")), gone


def _what_of_it(plan: Plan, site: SitePlan) -> str:
    """Of a site that was given back, in words: all, or its forward pass, and to what."""
    forward = site.kernels[Role.FPROP].kernel
    if site.rounds_forward or forward != plan.document.high_precision:
        return f" (forward to {forward})"
    return " (forward alone)" if site.is_low_precision else ""


@dataclass
class _Alone:
    """What planned sites do by themselves, each tried once with the kernels it runs on, and which of them are given back."""

    trial: Trial
    high: list[float]
    shown: Progress = field(default_factory=Silent)
    changes: dict[str, LossChange] = field(default_factory=dict)
    gradients: dict[str, GradientChange] = field(default_factory=dict)
    moved: set[str] = field(default_factory=set)  # sites that run on other kernels than when their loss was tried

    def without_worst_gradients(
        self, plan: Plan, planned: Sequence[SitePlan], off: GradientChange
    ) -> tuple[Plan, tuple[str, ...]]:
        """The plan without the site whose gradients by itself are furthest off, and which that is."""
        unknown = [site.site for site in planned if site.site not in self.gradients]
        self.gradients |= {name: self.trial.gradients_alone(plan, name) for name in self._each(unknown)}
        worst = max((site.site for site in planned), key=lambda name: self.gradients[name].error)
        by_itself = self.gradients[worst]
        why = (
            f"the plan puts gradients of {off.module} off by {off.error:.0%} of their size, and this site by itself "
            f"those of {by_itself.module} by {by_itself.error:.0%}"
        )
        return plan.giving_back({worst: f"{_GIVEN_BACK}{why}"}), (worst,)

    def without_costly_forwards(
        self, plan: Plan, planned: Sequence[SitePlan], whole: LossChange, limit: float
    ) -> tuple[Plan, tuple[str, ...]]:
        """The plan without the forward passes that cost too much of the loss, and the sites that those are of."""
        rounding = [site for site in planned if site.rounds_forward] or planned
        unknown = [site.site for site in rounding if site.site not in self.changes or site.site in self.moved]
        self.changes |= {name: self.trial.alone(plan, name, self.high) for name in self._each(unknown)}
        self.moved -= set(unknown)
        gone = too_costly(rounding, self.changes, whole, limit)
        what = f"the whole plan did {whole.rounding:.3%} ({whole.whole:+.3%})"
        reasons = {name: f"{_GIVEN_BACK}alone it costs {self.changes[name]}, and {what}" for name in gone}
        self.moved |= set(gone)
        for name in gone:
            self.gradients.pop(name, None)
        return plan.giving_back_forward(reasons), gone

    def _each(self, sites: list[str]) -> Iterator[str]:
        """The sites, shown as they are tried."""
        self.shown.start(len(sites))
        for name in sites:
            yield name
            self.shown.advance(f"{name} by itself")


def _room_to_compile(model: nn.Module) -> AbstractContextManager[object]:
    """Every round of a compiled model compiles it again, and torch gives up after a few."""
    is_compiled = hasattr(model, "_orig_mod") or any(module._compiled_call_impl is not None for module in model.modules())
    if not is_compiled:
        return nullcontext()
    import torch._dynamo  # not loaded unless somebody compiles

    return torch._dynamo.config.patch(recompile_limit=4096, accumulated_recompile_limit=65536)


def _require_repeatable(high: Sequence[float], again: Sequence[float], tolerance: float) -> None:
    for first, second in zip(high, again, strict=True):
        if not abs(second - first) <= tolerance:
            raise InvalidInput(
                f"the loss of one batch is {first:.6g} and then {second:.6g} with nothing changed: no plan could be told from "
                f"that. Let loss(model, batch) seed what it draws, or draw it by torch's own generator, which is put back, and "
                f"leave the batch as it is"
            )
