"""Norms whose statistics stay inside one tile of the GEMM in front of them: LayerNorm and RMSNorm → BlockNorm."""

import torch
from torch import nn

from loka.mods.contract import MODS, Place, why_not_replaced, why_not_this_type
from loka.nn.block_norm import BlockNorm
from loka.nn.graph import Kind, kind_of_module


@MODS.register("block_norm")
class BlockNorms:
    """RMS over blocks of 256 features: it fuses into the GEMM, subtracts no mean, and bounds what comes out."""

    default = True
    order = 1
    replaces = True
    functions = frozenset({"layer_norm", "rms_norm"})

    def concerns(self, place: Place) -> bool:
        return kind_of_module(place.module) is Kind.NORM and not isinstance(place.module, BlockNorm)

    def why_not(self, place: Place) -> str | None:
        module = place.module
        if reason := why_not_this_type(module, nn.LayerNorm, nn.RMSNorm) or why_not_replaced(module):
            return reason
        shape = _normalized_shape(module)
        if len(shape) != 1:
            return f"normalizes the last {len(shape)} axes {shape} together, a BlockNorm the blocks of one axis"
        if not (eps := _eps(module)) > 0:
            return f"has an eps of {eps:g}: a BlockNorm's is above 0, or a row of zeros would be 0/0"
        return None

    def change(self, place: Place) -> tuple[str, str]:
        new = self.replace(place)
        blocks = f", {len(new.sizes)} blocks" if len(new.sizes) > 1 else ""
        return f"{type(place.module).__name__}({new.n_features})", f"BlockNorm({new.n_features}{blocks})"

    def removes(self, place: Place) -> tuple[str, ...]:
        return tuple(name for name, _ in place.module.named_parameters(recurse=False))

    def replace(self, place: Place) -> BlockNorm:
        return BlockNorm(_normalized_shape(place.module)[0], eps=_eps(place.module))


def _eps(module: nn.Module) -> float:
    """RMSNorm's default is the input's own rounding, here that of float32, as the statistics are."""
    eps = getattr(module, "eps", None)
    return torch.finfo(torch.float32).eps if eps is None else eps


def _normalized_shape(module: nn.Module) -> tuple[int, ...]:
    assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
    return tuple(module.normalized_shape)
