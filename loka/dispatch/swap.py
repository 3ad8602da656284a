"""Putting modules in place of others, and back. What was applied to a model is remembered on it, and copied with it."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from loka.core.errors import InvalidInput
from loka.core.plan import Plan
from loka.dispatch.planned import PlannedLinear
from loka.nn.fused_block import FusedBlock
from loka.nn.held import refuse_held_in_lists
from loka.nn.left_linear import LeftLinear
from loka.nn.stand_in import give_back_attributes, why_not_stood_in_for
from loka.nn.unwrap import is_compiled_wrapper, unwrapped

# Hooks on calls. Those on state dicts are not carried over: a stand-in has its own.
_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"),
)
_REMEMBERED, _FROZEN = "_loka_applied", "_loka_frozen"


@dataclass
class Swap:
    """One module that stands in for another; both hold the same parameters."""

    original: nn.Module
    current: nn.Module


@dataclass
class AppliedPlan:
    """What ``apply_plan`` did: the sites that run as planned, and those that do not, with the reason.

    ``plan`` is the one that runs: what fell back or was given back since is in high precision in it.
    """

    plan: Plan
    fell_back: dict[str, str] = field(default_factory=dict)
    differences: tuple[str, ...] = ()  # from where the plan was measured, accepted by on_missing="high_precision"
    swaps: dict[str, list[Swap]] = field(default_factory=dict, repr=False)  # by site

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that run as planned, and not as they were."""
        return tuple(self.swaps)

    def module(self, site: str) -> nn.Module:
        """What runs ``site`` now."""
        return self.swaps[site][0].current

    def high_precision_calls(self) -> dict[str, int]:
        """By site the calls whose rows or dtype its kernels could not take, so that they ran in high precision. Waits for the
        device."""
        planned = {site: self.module(site) for site in self.sites}
        return {
            site: int(module.high_precision_calls)
            for site, module in planned.items()
            if isinstance(module, PlannedLinear) and int(module.high_precision_calls)
        }

    def __str__(self) -> str:
        lines = [self.plan.document.count_moved(self.swaps)]
        lines += [f"  not measured here: {difference}" for difference in self.differences]
        lines += [f"  fell back to high precision: {site}: {why}" for site, why in self.fell_back.items()]
        return "\n".join(lines)


def applied_to(model: nn.Module) -> AppliedPlan | None:
    """What was applied to ``model``, or None."""
    return unwrapped(model).__dict__.get(_REMEMBERED)


def required_applied(model: nn.Module) -> AppliedPlan:
    applied = applied_to(model)
    if applied is not None:
        return applied
    refuse_frozen(model)
    parts = [name for name, module in unwrapped(model).named_modules() if _REMEMBERED in vars(module)]
    if parts:
        raise InvalidInput(f"no plan is applied to this model, but to a part of it, {', '.join(parts)}: give that part")
    raise InvalidInput("no plan is applied to this model: loka.apply_plan(model, plan) does that")


def refuse_applied_parts(model: nn.Module) -> None:
    """A layer that a plan has replaced in a part of the model would be taken for the model's own, in high precision."""
    parts = [name for name, module in unwrapped(model).named_modules() if name and _REMEMBERED in vars(module)]
    if parts:
        raise InvalidInput(f"a plan is applied to a part of this model, {', '.join(parts)}: loka.restore that part first")


def require_replaceable(model: nn.Module, applied: AppliedPlan, sites: Iterable[str]) -> None:
    """Raise where a user has put on a stand-in what would be lost (pruning, a parametrization, a buffer, a module), or where
    the stand-in would go on running: by a forward put on it, or because it is held by another way than its name."""
    sites = list(sites)
    for site in sites:
        current = applied.module(site)
        if not set(current._parameters) <= {"weight", "bias"} or "weight" not in current._parameters:
            raise InvalidInput(
                f"{site} was pruned or parametrized since the plan was applied, which would be lost: remove that first, by "
                f"torch.nn.utils.prune.remove or parametrize.remove_parametrizations"
            )
        if reason := why_not_stood_in_for(current, own=("weight", "bias", "norm", "activation", "entry")):
            raise InvalidInput(f"{site} {reason}")
        if "forward" in vars(current):
            raise InvalidInput(
                f"{site} has got a forward of its own since the plan was applied, which would go on with the planned layer: "
                f"delete that first, by `del module.forward`, and wrap the layer again behind"
            )
    refuse_held_in_lists(model, [swap.current for site in sites for swap in applied.swaps[site]])


def refuse_frozen(model: nn.Module) -> None:
    if unwrapped(model).__dict__.get(_FROZEN):
        raise InvalidInput("this model was frozen for serving, for good: load your checkpoint into one that was not")


def remember(model: nn.Module, applied: AppliedPlan) -> None:
    model.__dict__[_REMEMBERED] = applied


def forget(model: nn.Module, *, frozen: bool = False) -> None:
    model.__dict__.pop(_REMEMBERED, None)
    if frozen:
        model.__dict__[_FROZEN] = True


def put_in(model: nn.Module, swaps: Iterable[Swap]) -> None:
    """Set each ``current`` in place of its ``original``, under all the names it has."""
    _replace(model, {id(swap.original): swap.current for swap in swaps})


def put_back(model: nn.Module, swaps: Iterable[Swap]) -> None:
    """Set each ``original`` back, with the mode and the users' attributes that its stand-in has now; sites also with its
    parameters and the users' hooks on calls."""
    swaps = list(swaps)
    for swap in swaps:
        if isinstance(swap.current, PlannedLinear | LeftLinear | FusedBlock):
            swap.original._parameters.update(swap.current._parameters)
            carry_hooks(swap.current, swap.original)
        give_back_attributes(swap.current, swap.original)
        swap.original.train(swap.current.training)
    _replace(model, {id(swap.current): swap.original for swap in swaps})


def carry_hooks(current: nn.Module, other: nn.Module) -> None:
    """Give the hooks that users put on ``current`` to the module that takes its place; their handles still remove them."""
    for name in _HOOKS:
        table = vars(current).get(name)
        if table:
            vars(other)[name] = table
            if name == "_backward_hooks":  # torch calls none without knowing of which of its two kinds they are
                vars(other)["_is_full_backward_hook"] = vars(current).get("_is_full_backward_hook")


def _replace(model: nn.Module, now: Mapping[int, nn.Module]) -> None:
    if now:
        _leave_room_to_compile()
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and id(child) in now:
                parent._modules[name] = now[id(child)]
                if is_compiled_wrapper(parent):
                    parent.__setstate__(parent.__getstate__())  # as if unpickled: it compiles what it holds, not what it held


def _leave_room_to_compile() -> None:
    """Whatever was compiled with these modules in it is compiled once more. Torch gives a function up for a lost cause after it
    was compiled again a few times (eight), so each time that is our doing adds one to its limits."""
    if dynamo := sys.modules.get("torch._dynamo"):  # not loaded unless somebody compiles
        dynamo.config.recompile_limit += 1
        dynamo.config.accumulated_recompile_limit += 1
