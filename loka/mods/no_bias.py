"""Biases go: they grow without converging and push values out of range, and each is a small tensor to pad and send."""

import torch
from torch import Tensor, nn

from loka.mods.contract import MODS, Place, why_not_this_type
from loka.nn.graph import Kind, Method, kind_of_module
from loka.nn.linear import LokaLinear

LARGE = 1.0  # a bias of one value that is no default of anybody's


@MODS.register("no_bias")
class NoBias:
    """Linear and LayerNorm without bias. Two kinds of layers keep theirs: prediction heads, where it holds the base rate, and
    those that read the model's inputs. There, since norm(x·wᵀ) is the same for x and 10·x, nobody would learn how large a
    feature is without the bias; and where no norm follows, no unit could begin at a value of its own. What comes behind a norm
    or a bias has a scale already.
    """

    default = True
    order = 2  # behind block_norm, which takes whole norms away
    replaces = False
    functions = frozenset[str]()

    def concerns(self, place: Place) -> bool:
        is_site_or_norm = kind_of_module(place.module) in (Kind.SITE, Kind.NORM)
        return is_site_or_norm and getattr(place.module, "bias", None) is not None

    def why_not(self, place: Place) -> str | None:
        if not isinstance(place.module, nn.Linear):
            return why_not_this_type(place.module, nn.LayerNorm)
        return why_not_this_type(place.module, nn.Linear, LokaLinear) or _why_not_site(place)

    def change(self, place: Place) -> tuple[str, str]:
        kind = type(place.module).__name__
        return f"{kind} with bias", f"{kind} without"

    def removes(self, place: Place) -> tuple[str, ...]:
        return ("bias",)

    def replace(self, place: Place) -> nn.Module:
        place.module.register_parameter("bias", None)
        return place.module


@torch.no_grad()
def _constant_of(module: nn.Module) -> float | None:
    """The one value of its bias, if that is large: a gate that begins closed, say. A small one is given to all layers alike."""
    bias = module.bias
    if not isinstance(bias, Tensor) or bias.is_meta or bias.numel() < 2:
        return None
    first = bias.flatten()[0]
    return float(first) if first.abs() >= LARGE and bool((bias == first).all()) else None


def _why_not_site(place: Place) -> str | None:
    block = place.found.of(place.name)
    if block.is_head:
        return "is a prediction head: " + ("it has one output" if block.out_features == 1 else "its output is the model's")
    if block.read_by:
        return f"its parameters are read by a call of {block.read_by}, not by the layer itself"
    if block.calls == 0:
        return "is never called, so it may serve a purpose of its own"
    if block.is_head is None and place.found.graph.method is Method.RUN:
        return "may be a prediction head: the model's output is of a class that is not looked into"
    if block.is_head is None:
        return "may be a prediction head: who reads its output shows only in a run, so pass example="
    if block.is_first:
        return "reads the model's inputs: without its bias a norm would hide how large they are"
    if block.is_first is None:
        return "may read the model's inputs: that shows only in a run, so pass example="
    if (constant := _constant_of(place.module)) is not None:
        return f"its bias is {constant:g} throughout, which was set on purpose"
    return None
