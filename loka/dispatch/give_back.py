"""Which sites ``check_plan`` gives back where the whole plan costs too much of the loss, or is too slow."""

import math
from collections.abc import Callable, Mapping, Sequence

from loka.core.plan import SitePlan
from loka.dispatch.loss_change import LossChange

SLOW_SHARE = 4  # where a plan is too slow one in so many sites goes at once: a compiled model compiles again every time


def too_costly(sites: Sequence[SitePlan], alone: Mapping[str, LossChange], whole: LossChange, limit: float) -> tuple[str, ...]:
    """The sites whose forward passes go, worst first. Those that stay save most for what they cost, together ``limit`` at most.

    A site costs what it does by itself, times what the whole costs over the sum of all sites by themselves, if that is above 1.
    """
    costs = {site.site: max(0.0, alone[site.site].harm) for site in sites}
    worst_first = sorted(costs, key=lambda name: -costs[name])
    if broken := [name for name in worst_first if math.isinf(costs[name])]:
        return tuple(broken)
    total = sum(costs.values())
    share = max(1.0, whole.harm / total) if total else math.inf
    if math.isinf(share):
        return (worst_first[0],)
    saved = {site.site: _saved_by_forward_us(site) for site in sites}

    def filled(by: Callable[[str], float]) -> set[str]:
        kept, room = set(), limit
        for name in sorted(costs, key=by):
            if share * costs[name] <= room:
                kept.add(name)
                room -= share * costs[name]
        return kept

    # What saves most for its cost first, or what saves most: one large site may be worth more than all that are cheap.
    ways = filled(lambda name: costs[name] / max(saved[name], 1e-9)), filled(lambda name: -saved[name])
    kept = max(ways, key=lambda names: sum(saved[name] for name in names))
    return tuple(name for name in worst_first if name not in kept) or (worst_first[0],)


def too_slow(sites: Sequence[SitePlan]) -> tuple[str, ...]:
    """The sites that save least."""
    by_gain = sorted(sites, key=lambda site: site.baseline_us - site.time_us)
    return tuple(site.site for site in by_gain[: math.ceil(len(sites) / SLOW_SHARE)])


def _saved_by_forward_us(site: SitePlan) -> float:
    """How much more the site saves than with a finer forward pass. A block may run the norm in front too, so each is taken
    from its own baseline."""
    saved_then_us = site.finer[0].baseline_us - site.finer[0].time_us if site.finer else 0.0
    return site.baseline_us - site.time_us - saved_then_us
