"""Whether a block may absorb the norm and activation around its site: nothing else may run through them."""

from collections.abc import Sequence

from torch import nn

from loka.core.plan import SitePlan
from loka.nn.blocks import FoundBlocks, find_blocks
from loka.nn.graph import Kind
from loka.nn.unwrap import Example


def why_not_absorbed(model: nn.Module, sites: Sequence[SitePlan], example: Example | None) -> dict[str, str]:
    """Of the planned blocks among ``sites`` those that the model's data flow does not allow, with the reason."""
    blocks = [site for site in sites if site.block is not None]
    if not blocks:
        return {}
    found = find_blocks(model, example)
    refused = {site.site: why for site in blocks if (why := _why_not(found, site))}
    for site in blocks:
        producer = site.block.producer if site.block else None
        if site.site not in refused and producer is not None and (why := _why_not_fed(found, site.site, producer)):
            refused[site.site] = why
    return refused


def _why_not(found: FoundBlocks, site: SitePlan) -> str | None:
    assert site.block is not None
    block = found.of(site.site)
    if block.calls is None:
        return f"cannot be followed through the model: pass example=(…), forward's arguments ({found.how})"
    around = (
        ("behind", site.block.norm, block.norm and block.norm.module),
        ("behind", site.block.activation, block.activation and block.activation.module),
        ("in front of", site.block.entry, block.entry and block.entry.module),
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


def _why_not_fed(found: FoundBlocks, site: str, producer: str) -> str | None:
    """A chain runs all of its blocks at the first: each must be read by the next alone, once."""
    front, behind = found.of(producer), found.of(site)
    alone = len(front.consumers) == 1 and front.consumers[0].kind is Kind.SITE and not front.consumers[0].through
    if not alone or front.consumers[0].name != site or front.calls != behind.calls:
        return f"is planned to take FP8 from {producer} alone, and here it does not"
    return None
