"""What the model's data flow says about a site, in the Record's words."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce

import torch
from torch import nn

from loka.core.site_record import UNKNOWN_READER
from loka.nn.adamw import is_cast_in_step
from loka.nn.blocks import Block, Consumer, FoundBlocks, any_of, find_blocks
from loka.nn.graph import Kind
from loka.nn.left_linear import LeftLinear
from loka.nn.linear import LokaLinear, why_not_swapped
from loka.nn.site_device import device_of_sites
from loka.nn.unwrap import Example, arguments_of
from loka.probe.watch import Run

logger = logging.getLogger("loka")


def blocks_of(model: nn.Module, seen: Run, example: Example | None) -> FoundBlocks:
    """The blocks of ``model``, from one run on the example or the batch that was seen, or traced where it cannot be run."""
    given = seen.given if example is None else arguments_of(example)
    if given is None:
        return find_blocks(model)
    device = device_of_sites(model).type
    try:
        with torch.autocast(device, seen.autocast) if seen.autocast else nullcontext():
            return find_blocks(model, given)
    except Exception as error:  # the user's model may not run twice on one batch; a trace knows less, and says so
        if example is not None:
            logger.warning(
                "the model does not run on the example that the Probe was given: %s: %s", type(error).__name__, error
            )
        return find_blocks(model)


def producers_of(found: FoundBlocks) -> Mapping[str, str]:
    """Site → the site whose block it alone reads, with nothing in between; both are called equally often."""
    producers: dict[str, list[str]] = {}
    for block in found:
        if block.is_whole and len(block.consumers) == 1:
            (consumer,) = block.consumers
            if consumer.kind is Kind.SITE and not consumer.through and found.of(consumer.name).calls == block.calls:
                producers.setdefault(consumer.name, []).append(block.site)
    return {site: of_site[0] for site, of_site in producers.items() if len(of_site) == 1}


def cast_in_steps(sites: Mapping[str, nn.Linear]) -> set[str]:
    """The sites whose weight its optimizer casts in the pass that steps it, which it never does for a weight of two sites."""
    weights = {name: site._parameters.get("weight") for name, site in sites.items()}
    readers = Counter(map(id, weights.values()))
    return {
        name for name, weight in weights.items() if weight is not None and readers[id(weight)] == 1 and is_cast_in_step(weight)
    }


def merged(flows: Sequence[FoundBlocks]) -> FoundBlocks:
    """What holds in every run of a model that branches: a site has a norm, an activation or a single reader only if it has the
    same one in all runs that call it. A norm or an activation that runs elsewhere too is behind no site."""
    by_site = [{block.site: block for block in flow} for flow in flows]
    blocks = [reduce(_both, [known[site] for known in by_site if site in known]) for site in by_site[0]]
    followers = Counter(module for block in blocks for module in _modules_behind(block))
    shared = {module for module, sites in followers.items() if sites > 1}
    shared |= {
        module
        for flow in flows
        for block in flow
        for module in _modules_behind(block)
        if block.calls is not None and len(flow.graph.calls_of(module)) != block.calls
    }
    uncovered = dict.fromkeys(uncovered for flow in flows for uncovered in flow.uncovered)
    return FoundBlocks(tuple(_without(block, shared) for block in blocks), flows[0].graph, tuple(uncovered))


def _both(one: Block, other: Block) -> Block:
    read_by = one.read_by or other.read_by
    if one.calls == 0 or other.calls == 0:
        return replace(other if one.calls == 0 else one, read_by=read_by)
    alike = one.norm == other.norm and one.activation == other.activation
    both = replace(
        one,
        consumers=tuple(dict.fromkeys((*one.consumers, *other.consumers))),
        is_head=any_of((one.is_head, other.is_head)),
        calls=None if one.calls is None or other.calls is None else max(one.calls, other.calls),
        entry=one.entry if one.entry == other.entry else None,
        read_by=read_by,
    )
    return both if alike else _alone(both)


def _without(block: Block, shared: set[str]) -> Block:
    found = next((module for module in _modules_behind(block) if module in shared), None)
    return block if found is None else replace(_alone(block), shared=found)


def _modules_behind(block: Block) -> list[str]:
    return [follower.module for follower in (block.norm, block.activation) if follower and follower.module is not None]


def _alone(block: Block) -> Block:
    """The site by itself: what follows is not always the same, so who reads its output is unknown."""
    return replace(block, norm=None, activation=None, consumers=(*block.consumers, Consumer(Kind.UNKNOWN, UNKNOWN_READER)))


def why_stays(module: nn.Linear, block: Block, *, was_called: bool, is_inside_torch: bool, was_run: bool) -> str | None:
    """Why nothing can stand in for the layer, or should: heads stay in high precision, so what may be one does too. Inside a
    module of torch's own nothing is a head."""
    if not isinstance(module, LokaLinear | LeftLinear) and (reason := why_not_swapped(module)):
        return reason
    is_unknown = block.is_head is None and block.calls != 0
    if is_unknown and was_run:
        return (
            "may be a prediction head: forward returns its output in an object of a class that is not looked into, or not at "
            "all. Return it in a tuple, a dict or a dataclass"
        )
    if is_unknown or (was_called and block.calls == 0 and not is_inside_torch):
        return (
            "may be a prediction head: who reads its output shows only in a run of forward, which failed or was not seen. "
            "Give the Probe forward's arguments, Probe(model, example=…), and a model that has no forward one of its own"
        )
    return None
