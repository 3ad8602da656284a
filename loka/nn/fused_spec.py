"""What a fused block computes, read off the modules it is made of, or why the fused kernels cannot compute it."""

from dataclasses import dataclass

import torch
from torch import nn

from loka.kernels.device import device_of
from loka.kernels.providers.triton import READS, missing_triton
from loka.kernels.triton.tiles import WIDEST_TILE, NormBlocks
from loka.nn.block_norm import BlockNorm
from loka.numerics.formats import format_of, is_format

# By exact type: a subclass may compute something else.
_ACTIVATIONS: dict[type, str] = {nn.Hardswish: "hard_swish", nn.ReLU: "relu", nn.Identity: "none", type(None): "none"}


@dataclass(frozen=True)
class NormSpec:
    """A BlockNorm as the kernels see it."""

    blocks: NormBlocks
    eps: float


@dataclass(frozen=True)
class BlockSpec:
    """activation(norm(x·wᵀ + b)) of ``in_features`` features, or without a norm."""

    in_features: int
    norm: NormSpec | None
    activation: str

    @property
    def blocks(self) -> NormBlocks | None:
        return None if self.norm is None else self.norm.blocks

    @property
    def eps(self) -> float:
        return 0.0 if self.norm is None else self.norm.eps


@dataclass(frozen=True)
class ChainSpec:
    """Blocks in a row. ``entry`` is a norm in front of them; ``outputs`` are the blocks whose y leaves in high precision."""

    blocks: tuple[BlockSpec, ...]
    entry: NormSpec | None = None
    outputs: tuple[int, ...] = (0,)

    def input_factor(self, block: int) -> float:
        """The constant scale of a block's input: that of the norm in front of it, or 1 where rows have scales of their own."""
        norm = self.entry if block == 0 else self.blocks[block - 1].norm
        return 1.0 if norm is None else norm.blocks.code_scale


def norm_spec(norm: nn.Module) -> NormSpec | str:
    """The norm as the kernels see it, or why they do not compute it."""
    if type(norm) is not BlockNorm:
        return f"{type(norm).__name__} is no BlockNorm, whose statistics lie in one tile: apply the Mod block_norm"
    if norm.sizes[0] > WIDEST_TILE:
        return f"its norm has blocks of {norm.sizes[0]} features, and a tile holds {WIDEST_TILE}: use BlockNorm(…, block=256)"
    return NormSpec(NormBlocks(norm.n_features, norm.block), norm.eps)


def block_spec(in_features: int, norm: nn.Module | None, activation: nn.Module | None) -> BlockSpec | str:
    """The block as the kernels see it, or why they do not compute it."""
    spec = None if norm is None else norm_spec(norm)
    if isinstance(spec, str):
        return spec
    kind = _ACTIVATIONS.get(type(activation))
    if kind is None:
        known = ", ".join(module.__name__ for module in (nn.Hardswish, nn.ReLU, nn.Identity))
        return f"the activation {type(activation).__name__} is not one the kernels know ({known}): for SiLU, apply hard_swish"
    return BlockSpec(in_features, spec, kind)


def why_not_here(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the fused kernels cannot run a model of ``dtype`` on ``device``, or None."""
    if reason := missing_triton(device_of(device)):
        return reason
    if not is_format(dtype) or format_of(dtype) not in READS:
        return f"reads {', '.join(READS)}, not {dtype}"
    return None
