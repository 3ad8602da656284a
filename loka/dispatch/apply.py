"""``apply_plan``: run a model's planned sites on their kernels, in place; ``restore`` undoes it."""

from typing import Literal

from torch import nn

from loka.core.errors import InvalidInput, KernelUnavailable, require_kind
from loka.core.plan import Goal, Plan, SitePlan
from loka.dispatch.absorb import why_not_absorbed
from loka.dispatch.bind import bind_block, bind_site, link_chains, why_not_bound
from loka.dispatch.differences import (
    REMEASURE,
    environment_differences,
    linear_sites,
    refuse_other_model,
    refuse_sharded,
)
from loka.dispatch.swap import (
    AppliedPlan,
    Swap,
    applied_to,
    carry_hooks,
    forget,
    put_back,
    put_in,
    refuse_applied_parts,
    refuse_frozen,
    remember,
    require_replaceable,
    required_applied,
)
from loka.nn.fast_path import passed_by
from loka.nn.fused_block import FusedBlock
from loka.nn.held import refuse_held_in_lists
from loka.nn.unwrap import Example, unwrapped
from loka.nn.weight_casts import leave_as_it_is

OnMissing = Literal["error", "high_precision"]


def apply_plan(model: nn.Module, plan: Plan, *, on_missing: OnMissing = "error", example: Example | None = None) -> AppliedPlan:
    """Put the kernels of ``plan`` into ``model``, in place: same parameters, same ``state_dict``, same optimizer.

    Everything is checked before anything is touched. A plan measured on another device or with other versions, or one whose
    kernels are missing here, is an error that names what differs; with ``on_missing="high_precision"`` it is applied as far as
    it goes, and the result lists what fell back. Another model's plan is always an error. ``example``, the arguments of one
    forward call, is needed only for blocks in a model that cannot be traced without.
    """
    if on_missing not in ("error", "high_precision"):
        raise InvalidInput(f"on_missing must be 'error' or 'high_precision', got {on_missing!r}")
    require_kind(plan, Plan, "the plan", "load it with loka.Plan.load(run)")
    model = unwrapped(model)
    refuse_frozen(model)
    if applied_to(model) is not None:
        raise InvalidInput("a plan is applied to this model already: loka.restore(model) first, then apply the other")
    refuse_applied_parts(model)
    refuse_sharded(model)
    refuse_other_model(linear_sites(model), plan)
    differences = environment_differences(model, plan)
    if differences and on_missing == "error":
        raise KernelUnavailable(
            f"this plan was not measured here: {'; '.join(differences)}. Its times and errors need not hold: {REMEASURE}, or "
            f'in Python pass on_missing="high_precision" to run it anyway where its kernels can run'
        )
    runs, swaps, fell_back = _bind(model, plan, on_missing, example)
    applied = AppliedPlan(runs, fell_back, tuple(differences), swaps)
    every = [swap for of_site in swaps.values() for swap in of_site]
    refuse_held_in_lists(model, [swap.original for swap in every])
    put_in(model, every)
    remember(model, applied)
    return applied


def restore(model: nn.Module) -> None:
    """Put the user's own modules back, with the weights as they are now."""
    model = unwrapped(model)
    applied = required_applied(model)
    require_replaceable(model, applied, applied.sites)
    swaps = [swap for of_site in applied.swaps.values() for swap in of_site]
    put_back(model, swaps)
    for swap in swaps:
        carry_hooks(swap.current, swap.original)  # of what blocks absorbed, too
        leave_as_it_is(swap.current)
    forget(model)


def give_back(model: nn.Module, site: str, reason: str) -> None:
    """Return one site of an applied plan to high precision. A block's whole chain is bound again without it."""
    model = unwrapped(model)
    applied = required_applied(model)
    chain = [name for name in _chain_of(applied.plan, site) if name in applied.swaps]
    require_replaceable(model, applied, chain)
    of_chain = {name: applied.swaps.pop(name) for name in chain}
    before = [swap for of_site in of_chain.values() for swap in of_site]
    put_back(model, before)
    applied.plan = applied.plan.giving_back({site: reason})
    again = {planned.site: planned for planned in applied.plan.sites if planned.site in chain and planned.block is not None}
    linears = {name: linear for name, (first, *_) in of_chain.items() if isinstance(linear := first.original, nn.Linear)}
    swaps = {name: bind_block(model, linears[name], planned) for name, planned in again.items()}
    bound = {name: of_site for name, of_site in swaps.items() if not isinstance(of_site, str)}
    assert len(bound) == len(swaps)  # each of them ran until now
    now = {swap.original: swap.current for of_site in bound.values() for swap in of_site}
    for swap in before:
        carry_hooks(swap.current, now.get(swap.original, swap.original))
        leave_as_it_is(swap.current)
    _link(applied.plan, bound)
    put_in(model, [swap for of_site in bound.values() for swap in of_site])
    applied.swaps.update(bound)
    remember(model, applied)


Swaps = dict[str, list[Swap]]


def _bind(model: nn.Module, plan: Plan, on_missing: OnMissing, example: Example | None) -> tuple[Plan, Swaps, dict[str, str]]:
    """The stand-ins of every site that can run as planned, made beside the model; and why the others cannot."""
    modules = linear_sites(model)
    planned = [site for site in plan.sites if plan.document.moves(site)]
    bypassed = passed_by(model) if plan.document.goal is Goal.SERVING else {}
    missing = {
        site.site: why for site in planned if (why := bypassed.get(site.site) or why_not_bound(modules[site.site], site, plan))
    }
    missing |= why_not_absorbed(model, [site for site in planned if site.site not in missing], example)
    swaps: Swaps = {}
    for site in planned:
        if site.site in missing:
            continue
        made = _make(model, modules[site.site], site, plan)
        if isinstance(made, str):
            missing[site.site] = made
        else:
            swaps[site.site] = made
    if missing and on_missing == "error":
        reasons = "; ".join(f"{site or 'the layer'} {why}" for site, why in list(missing.items())[:3])
        more = f"; and {len(missing) - 3} more sites" if len(missing) > 3 else ""
        raise KernelUnavailable(
            f"the plan cannot run here as it is: {reasons}{more}. Where a kernel is missing, {REMEASURE}; to plan without "
            f"those sites, name them in make_plan(…, keep=…); or in Python pass "
            f'on_missing="high_precision" to run them in high precision'
        )
    runs = plan.giving_back(missing) if missing else plan
    # What stood behind one of them may be worth nothing by itself.
    missing |= {site.site: site.reason for site in runs.sites if site.site in swaps and not plan.document.moves(site)}
    swaps = {site: of_site for site, of_site in swaps.items() if site not in missing}
    _link(runs, swaps)
    return runs, swaps, missing


def _make(model: nn.Module, module: nn.Linear, site: SitePlan, plan: Plan) -> list[Swap] | str:
    return bind_site(module, site, plan) if site.block is None else bind_block(model, module, site)


def _link(plan: Plan, swaps: Swaps) -> None:
    blocks = {name: block for name, (first, *_) in swaps.items() if isinstance(block := first.current, FusedBlock)}
    link_chains(plan, blocks)


def _chain_of(plan: Plan, site: str) -> list[str]:
    """The sites that are linked with ``site``, itself among them, first to last."""
    front = {s.site: s.block.producer for s in plan.sites if s.block and s.block.producer}
    behind = {producer: name for name, producer in front.items()}
    first = site
    while first in front:
        first = front[first]
    chain = [first]
    while chain[-1] in behind:
        chain.append(behind[chain[-1]])
    return chain
