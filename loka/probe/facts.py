"""What the model's data flow says about a site, in the Record's words."""

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import nn

from loka.nn.blocks import Block, FoundBlocks, find_blocks
from loka.nn.graph import Kind
from loka.probe.watch import Watch


def blocks_of(model: nn.Module, seen: Watch) -> FoundBlocks:
    """The blocks of ``model``, from one run on the batch that was seen, or traced where it cannot be run again."""
    if seen.example is None:
        return find_blocks(model)
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    dtype = seen.example_autocast
    try:
        with torch.autocast(device, dtype) if dtype else nullcontext():
            return find_blocks(model, seen.example)
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


def notes_of(block: Block) -> tuple[str, ...]:
    unsure = ("it is not known whether it is a head",) if block.is_head is None else ()
    return (*block.notes, *unsure)
