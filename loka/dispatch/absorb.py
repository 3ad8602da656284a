"""Whether a block may absorb the norm and activation around its site: nothing else may run through them."""

from collections.abc import Sequence

from torch import nn

from loka.core.plan import BlockPlan, SitePlan
from loka.nn.blocks import FoundBlocks, find_blocks
from loka.nn.graph import Kind
from loka.nn.unwrap import Example


def why_not_absorbed(model: nn.Module, sites: Sequence[SitePlan], example: Example | None) -> dict[str, str]:
    """Of the planned blocks among ``sites`` those that the model's data flow does not allow, with the reason."""
    planned = {site.site: site.block for site in sites if site.block is not None}
    if not planned:
        return {}
    found = find_blocks(model, example)
    refused = {site: why for site, plan in planned.items() if (why := _why_not(found, site, plan))}
    for site, plan in planned.items():
        if site not in refused and plan.producer is not None:
            why = _why_not_fed(found, site, plan.producer, planned.get(plan.producer))
            refused |= {} if why is None else {site: why}
    return refused


def _why_not(found: FoundBlocks, site: str, plan: BlockPlan) -> str | None:
    block = found.of(site)
    if block.calls is None:
        return f"cannot be followed through the model: pass example=(…), forward's arguments ({found.how})"
    is_behind_norm = block.norm is not None and plan.norm is None  # a norm that stays where it is
    around = (
        ("behind", plan.norm, block.norm_module),
        ("behind", plan.activation, None if is_behind_norm else block.activation_module),
        ("in front of", plan.entry, block.entry and block.entry.module),
    )
    for where, planned, here in around:
        if planned is None:
            continue
        if planned != here:
            return f"is planned with {planned} {where} it, and here it is {here or 'another, or something else reads it'}"
        calls = len(found.graph.calls_of(planned))
        if calls != block.calls:
            return f"cannot absorb {planned}, which runs {where} other layers too: give each layer a module of its own"
    return None


def _why_not_fed(found: FoundBlocks, site: str, producer: str, plan: BlockPlan | None) -> str | None:
    """A chain runs all of its blocks at the first: each must be read by the next alone, once, with nothing between them.
    ``plan`` is the producer's."""
    front, behind = found.of(producer), found.of(site)
    followers = ((front.norm, plan.norm), (front.activation, plan.activation)) if plan else ()
    between = [follower.kind for follower, absorbed in followers if follower is not None and absorbed is None]
    if between:
        return f"is planned to take FP8 from {producer}, and here {' and '.join(between)} is between them"
    alone = len(front.consumers) == 1 and front.consumers[0].kind is Kind.SITE and not front.consumers[0].through
    if not alone or front.consumers[0].name != site or front.calls != behind.calls:
        return f"is planned to take FP8 from {producer} alone, and here it does not"
    return None
