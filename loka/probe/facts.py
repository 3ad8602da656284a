"""What the model's data flow says about a site, in the Record's words."""

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import nn

from loka.nn.blocks import Block, FoundBlocks, find_blocks
from loka.nn.graph import Kind
from loka.nn.linear import LokaLinear, why_not_swapped
from loka.nn.unwrap import Example, arguments_of
from loka.probe.watch import Watch


def blocks_of(model: nn.Module, seen: Watch, example: Example | None) -> FoundBlocks:
    """The blocks of ``model``, from one run on the example or the batch that was seen, or traced where it cannot be run."""
    given = seen.example if example is None else arguments_of(example)
    if given is None:
        return find_blocks(model)
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    dtype = seen.example_autocast
    try:
        with torch.autocast(device, dtype) if dtype else nullcontext():
            return find_blocks(model, given)
    except Exception:  # the user's model may not run twice on one batch; a trace knows less, and says so
        return find_blocks(model)


def producers_of(found: FoundBlocks) -> Mapping[str, str]:
    """Site → the site whose block is read by it alone, with nothing in between."""
    producers: dict[str, str] = {}
    for block in found:
        if len(block.consumers) == 1:
            (consumer,) = block.consumers
            if consumer.kind is Kind.SITE and not consumer.through:
                producers[consumer.name] = block.site
    return producers


def why_stays(module: nn.Linear, block: Block) -> str | None:
    """Why nothing can stand in for the layer, or should: a head would stay, so what may be one does too."""
    if not isinstance(module, LokaLinear) and (reason := why_not_swapped(module)):
        return reason
    if block.is_head is None and block.calls != 0:
        return (
            "may be a prediction head: who reads its output shows only in a run of forward, which failed or was not seen. "
            "Give the Probe forward's arguments: Probe(model, example=…)"
        )
    return None
