"""``check_plan``: the joint check of a plan on held-out batches, quality, gradients and end-to-end time, giving sites back.

Errors of sites add and cancel, and what wins at one site need not win in a model, so the whole is tried as it will run.
"""

import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel

from loka.core.errors import InvalidInput, require_kind
from loka.core.gemm import Role
from loka.core.plan import Goal, Plan, SitePlan
from loka.core.progress import Progress, Silent
from loka.dispatch.apply import OnMissing, apply_plan, restore
from loka.dispatch.give_back import too_costly, too_slow
from loka.dispatch.gradient_change import GradientChange, Gradients, gradient_change
from loka.dispatch.loss_change import Loss, LossChange, change_of, losses, losses_both_ways, scalar
from loka.dispatch.swap import AppliedPlan, applied_to, put_back, put_in, refuse_applied_parts
from loka.nn.adamw import is_cast_in_step
from loka.nn.fast_path import without_fast_path
from loka.nn.kept_state import left_as_it_was, random_state_kept
from loka.nn.site_device import device_of_sites
from loka.nn.unwrap import Example, unwrapped
from loka.nn.weight_casts import holders_behind_steps
from loka.numerics.confidence import estimate_mean

# Relative to the loss. A model that trains by a plan pays up to twice what rounding costs one that did not train by it (0.015 %
# by this check came to 0.024 %), and 0.02 % is what it may pay.
MAX_LOSS_CHANGE = {Goal.TRAINING: 5e-5, Goal.SERVING: 2e-4}
LEAST_DIFFERENCE = 1e-6  # relative; two passes of a loss that differ by less are no error: sums in another order make less
MAX_GRADIENT_CHANGE = 0.7  # ten layers of a Wukong in e4m3 came to 0.14, narrow ones come to more; a lost gradient is off by 1
GRADIENT_BATCHES = 2
MOST_TIMED = 4  # times as often as asked for, while a speed-up is not known to be enough or too little
_GIVEN_BACK = "given back by check_plan: "  # in front of the reason, in the plan


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
    learned = _learned_by(model, loss, held_out) if is_training else frozenset()  # serving never asks for gradients
    trial = _Trial(model, held_out, loss, plan.document.goal, repeats, min_speedup, on_missing, example, learned)
    as_it_runs = without_fast_path() if is_training else nullcontext()  # a trained model is judged in eval mode
    with progress or Silent() as shown, _without_a_trace(model, learned), _room_to_compile(model), as_it_runs:
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


@dataclass(frozen=True)
class _Trial:
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
        with _without_a_trace(self.model, self.learned), torch.enable_grad():
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
        with _without_a_trace(self.model, self.learned):
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
                _drop_gradients(self.learned)
                for holder in holders:
                    holder.recast_after_step()
        return 1e6 * (self._now() - start) / len(self.batches)

    def _now(self) -> float:
        device = device_of_sites(self.model)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()


@dataclass
class _Alone:
    """What planned sites do by themselves, each tried once with the kernels it runs on, and which of them are given back."""

    trial: _Trial
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


def _learned_by(model: nn.Module, loss: Loss, batches: Iterable[Any]) -> frozenset[Tensor]:
    """The parameters of ``model``, and what else ``loss`` reaches on any batch: embeddings in front of the model, say."""
    found = set(model.parameters())
    with _without_a_trace(model), torch.compiler.set_stance("force_eager"), torch.enable_grad():
        model.train()
        for batch in batches:
            value = scalar(loss(model, batch))
            if value.grad_fn is None:
                raise InvalidInput(
                    "loss(model, batch) has no gradient: it must not detach, or be computed under no_grad, and some parameter "
                    "must require one"
                )
            found |= _leaves_of(value.grad_fn)
    return frozenset(found)


def _leaves_of(root: Node | None) -> set[Tensor]:
    """The tensors that a backward pass from ``root`` adds gradients to."""
    todo, seen, leaves = [root], set(), set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [node for node, _ in node.next_functions]
        if type(node).__name__ == "AccumulateGrad":
            leaves.add(node.variable)  # pyrefly: ignore[missing-attribute]
    return leaves


def _name_in_front(tensor: Tensor) -> str:
    """A name for what is no parameter of the model: like a parameter's, of a "module" that says what it is."""
    return f"the tensor of {tuple(tensor.shape)} in front of the model.{id(tensor)}"


def _values(tensor: Tensor) -> Tensor | None:
    """A copy of its gradient, if it has one; of a sparse one the values, whose places are the batch's."""
    if tensor.grad is None:
        return None
    return tensor.grad.coalesce().values().clone() if tensor.grad.is_sparse else tensor.grad.clone()


def _drop_gradients(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.grad = None


def _send_nothing(model: nn.Module) -> None:
    """Other ranks may train, or not be as far: they would take what is checked here for their own steps."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            if module.static_graph and not module._static_graph_delay_allreduce_enqueued:
                raise InvalidInput(
                    "DistributedDataParallel sends the gradients of a static graph's first step in any case: call check_plan "
                    "behind a training step, or with the module inside"
                )
            module.require_backward_grad_sync = module.require_forward_param_sync = False


@contextmanager
def _without_a_trace(model: nn.Module, learned: Iterable[Tensor] = ()) -> Iterator[None]:
    """Gradients, what modules hold (buffers, mode, attributes), and random numbers are after the block what they were before.
    DistributedDataParallel sends nothing within it.

    ``learned`` are tensors with gradients beside the model's own parameters.
    """
    gradients = {parameter: parameter.grad for parameter in (*model.parameters(), *learned)}
    tables = [table for parameter in gradients if (table := parameter._post_accumulate_grad_hooks)]
    hooks = [dict(table) for table in tables]
    _drop_gradients(gradients)
    for table in tables:
        table.clear()  # of optimizers that step within backward
    try:
        with left_as_it_was(model), random_state_kept(model):
            _send_nothing(model)
            yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for table, before in zip(tables, hooks, strict=True):
            table.update(before)
