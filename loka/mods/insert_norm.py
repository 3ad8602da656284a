"""Linear → activation becomes Linear → BlockNorm → activation, which brings the layer behind it under BlockNorm's bound."""

from collections import OrderedDict

from torch import nn

from loka.mods.contract import MODS, Place, why_not_this_type
from loka.nn.block_norm import BlockNorm
from loka.nn.blocks import Block
from loka.nn.graph import Kind

# |f(x)| ≤ |x|, so that BlockNorm's bound holds behind them. What is bounded by itself, such as a gate's sigmoid, needs no norm.
ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.SiLU, nn.Hardswish, nn.GELU, nn.Mish)


@MODS.register("insert_norm")
class InsertNorm:
    """A BlockNorm in front of an activation that reads a linear layer, unless prediction heads alone read the result.

    The activation makes room for both: neither has parameters, so the names in a ``state_dict`` stay what they were.
    """

    default = False  # it changes the model more than the others
    order = 3  # around what the others put there
    replaces = True
    functions = frozenset[str]()

    def concerns(self, place: Place) -> bool:
        is_uncalled = not place.found.graph.calls_of(place.name)
        return isinstance(place.module, ACTIVATIONS) and (is_uncalled or bool(_blocks_in_front(place)))

    def why_not(self, place: Place) -> str | None:
        if reason := why_not_this_type(place.module, *ACTIVATIONS):
            return reason
        blocks, graph = _blocks_in_front(place), place.found.graph
        if not graph.calls_of(place.name):
            return "is not called, as far as can be seen: pass example=, with which forward runs all that is to be changed"
        widths = sorted({block.out_features for block in blocks})
        if any(block.is_head for block in blocks):
            return f"stands behind the prediction head {next(block.site for block in blocks if block.is_head)}"
        if len(widths) > 1:
            return f"serves layers of widths {', '.join(map(str, widths))}: give each an activation of its own"
        if place.name in graph.read_past:
            return "works in place, and forward goes on with what it was given: go on with what it gives"
        sites = {block.site for block in blocks}
        in_front = [graph.calls[read].name for call in graph.calls_of(place.name) for read in graph.calls[call].reads]
        others = [name for name in in_front if name not in sites]
        if others:
            return f"serves {others[0]} as well as {blocks[0].site}: give each an activation of its own"
        if heads := _only_heads_behind(place, blocks):
            # Every example would come to the head with the same length, and a click model says by length how sure it is:
            # DCNv2 lost 3 % of log-loss so, and 0.5 % with its other layers normed (tiny, synthetic stream, 300 steps).
            return f"is read by {' and '.join(heads)} alone, which stays in high precision: it needs no bound"
        return None

    def change(self, place: Place) -> tuple[str, str]:
        block = _blocks_in_front(place)[0]
        return f"behind {block.site}", f"BlockNorm({block.out_features}) inserted"

    def removes(self, place: Place) -> tuple[str, ...]:
        return ()

    def replace(self, place: Place) -> nn.Module:
        norm = BlockNorm(_blocks_in_front(place)[0].out_features)
        return nn.Sequential(OrderedDict(norm=norm, activation=place.module))


def _only_heads_behind(place: Place, blocks: list[Block]) -> list[str]:
    """The prediction heads that read the activation, if nothing else does."""
    readers = [consumer for block in blocks for consumer in block.consumers]
    heads = [r.name for r in readers if r.kind is Kind.SITE and place.found.of(r.name).is_head]
    return [f"the prediction head {name}" for name in dict.fromkeys(heads)] if len(heads) == len(readers) else []


def _blocks_in_front(place: Place) -> list[Block]:
    """Those without a norm that end in this activation."""
    return [block for block in place.found if block.norm is None and block.activation and block.activation.module == place.name]
