"""A block as ``measure`` runs it: built from what the Record says of it, and the calls whose times a Survey holds."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from loka.core.gemm import SiteShape
from loka.core.recipe import Format
from loka.measure.adam_steps import AdamSteps
from loka.measure.timing import TimedCall
from loka.nn.block_norm import BlockNorm
from loka.nn.block_reference import block_epilogue, block_reference
from loka.nn.fused_block import FusedBlock
from loka.nn.fused_spec import NormSpec, norm_spec
from loka.nn.fused_steps import cast_input, norm_input, norm_input_backward
from loka.numerics.formats import torch_dtype


@dataclass(frozen=True)
class BlockShape:
    """All that decides what a block computes and how long it takes; norm and activation by their class."""

    site: SiteShape
    dtype: Format
    weight_dtype: Format
    has_bias: bool
    norm: str | None
    activation: str | None
    needs_dx: bool = True  # in training
    needs_dw: bool = True
    entry_block: int | None = None  # of a BlockNorm in front of it that may hand it FP8
    cast_in_step: bool = False  # as a SiteRecord says it of the weight,
    norm_block: int | None = None  # and of a BlockNorm; its defaults where it says nothing
    norm_eps: float | None = None

    def __str__(self) -> str:
        entry = None if self.entry_block is None else f"BlockNorm(block={self.entry_block})"
        return " → ".join(part for part in (entry, f"linear {self.site}", self.norm, self.activation) if part)


def build_block(shape: BlockShape, weight_NK: Tensor, bias_N: Tensor | None, device: torch.device) -> FusedBlock | str:
    """The block around copies of its parameters; or why there is none. What is no BlockNorm is as it is made by default."""
    norm = _block_norm(shape) if shape.norm == BlockNorm.__name__ else _built(shape.norm, shape.site.n)
    activation = _built(shape.activation, None)
    for part in (norm, activation):
        if isinstance(part, str):
            return part
    linear = nn.Linear(shape.site.k, shape.site.n, bias=bias_N is not None, device="meta")
    stored = torch_dtype(shape.weight_dtype)
    linear.weight = nn.Parameter(weight_NK.detach().to(stored, copy=True))
    if bias_N is not None:
        linear.bias = nn.Parameter(bias_N.detach().to(stored, copy=True))
    return FusedBlock.from_modules(linear, norm, activation).to(device)  # pyrefly: ignore[bad-argument-type]


def _block_norm(shape: BlockShape) -> BlockNorm:
    made = BlockNorm(shape.site.n)
    return BlockNorm(shape.site.n, shape.norm_block or made.block, shape.norm_eps or made.eps)


def _built(kind: str | None, n_features: int | None) -> nn.Module | str | None:
    if kind is None:
        return None
    found = getattr(nn, kind, None)
    if found is None:
        return f"{kind}, which follows it, is no class of torch.nn: no fused kernel computes it"
    try:
        return found() if n_features is None else found(n_features)
    except TypeError:  # such as GroupNorm and Threshold
        return f"{kind}, which follows it, has settings that a Record does not hold: no fused kernel computes it"


def random_block(shape: BlockShape, device: torch.device) -> FusedBlock | str:
    """The block with normal weights."""
    n, k = shape.site.n, shape.site.k
    weight_NK = torch.randn(n, k, device=device) * k**-0.5
    return build_block(shape, weight_NK, torch.zeros(n, device=device) if shape.has_bias else None, device)


def autocast_for(block: FusedBlock, dtype: torch.dtype) -> AbstractContextManager[object]:
    """How a model that runs in ``dtype`` calls a block whose weights are stored in another."""
    return torch.autocast(block.weight.device.type, dtype, enabled=block.weight.dtype is not dtype)


def block_calls(shape: BlockShape, block: FusedBlock, *, copies: int) -> dict[str, TimedCall]:
    """What is timed of a block, fused and as torch compiles it, by name. Turns rotate over ``copies`` of the block."""
    device, dtype, site = block.weight.device, torch_dtype(shape.dtype), shape.site
    blocks = [_copy(block).requires_grad_(shape.needs_dw) for _ in range(copies)]
    x_MK = torch.randn(site.m, site.k, device=device, dtype=dtype)
    dy_MN = 1e-3 * torch.randn(site.m, site.n, device=device, dtype=dtype)
    z_MN = torch.randn(site.m, site.n, device=device, dtype=dtype)
    compiled = torch.compile(block_reference, dynamic=False, fullgraph=True)
    epilogue = torch.compile(block_epilogue, dynamic=False, fullgraph=True)

    def baseline(x: Tensor, copy: FusedBlock) -> Tensor:
        return compiled(x, copy.weight, copy.bias, copy.norm, copy.activation)

    def fused(x: Tensor, copy: FusedBlock) -> Tensor:
        return copy(x)

    def forward(turn: int, run: Callable[[Tensor, FusedBlock], Tensor]) -> object:
        with torch.no_grad(), autocast_for(block, dtype):
            return run(x_MK, blocks[turn % copies])

    def training(turn: int, run: Callable[[Tensor, FusedBlock], Tensor]) -> object:
        copy = blocks[turn % copies]
        x = x_MK.detach().requires_grad_(shape.needs_dx)
        with autocast_for(block, dtype):
            y_MN = run(x, copy)
        asked = [*([x] if shape.needs_dx else []), *(copy.parameters() if shape.needs_dw else [])]
        return torch.autograd.grad(y_MN, asked, dy_MN.to(y_MN.dtype))

    def cast(turn: int, transposed: bool) -> object:
        return cast_input(x_MK, transposed=transposed) if block.why_reference is None else x_MK  # which it reads as it is

    def epilogue_forward(turn: int) -> object:
        with torch.no_grad():
            return epilogue(z_MN, block.norm, block.activation)

    def epilogue_training(turn: int) -> object:
        z = z_MN.detach().requires_grad_()
        y_MN = epilogue(z, block.norm, block.activation)
        return torch.autograd.grad(y_MN, z, dy_MN.to(y_MN.dtype))

    calls: dict[str, TimedCall] = {
        "input_cast": partial(cast, transposed=False),
        "training_cast": partial(cast, transposed=shape.needs_dw),
        "forward": partial(forward, run=fused),
        "training": partial(training, run=fused),
        **_weight_calls(shape, blocks),
        "baseline_forward": partial(forward, run=baseline),
        "baseline_training": partial(training, run=baseline),
    }
    if block.norm is not None or block.activation is not None:  # else there is nothing to time
        calls |= {"epilogue_forward": epilogue_forward, "epilogue_training": epilogue_training}
    if shape.entry_block is not None and block.why_reference is None:
        calls |= _entry_calls(shape, shape.entry_block, x_MK)
    return calls


def _weight_calls(shape: BlockShape, blocks: Sequence[FusedBlock]) -> dict[str, TimedCall]:
    """The cast of the weight, once a step: after it, or within it; then a step that casts nothing is timed too."""
    if not (shape.cast_in_step and blocks[0].can_step()):
        return {"weight_cast": lambda turn: blocks[turn % len(blocks)].recast_after_step()}
    steps = AdamSteps(blocks[0].weight.detach(), len(blocks))
    return {
        "weight_cast": lambda turn: blocks[turn % len(blocks)].step_and_recast(steps.of(turn)),
        "step_without_cast": steps.by_torch,
    }


def _entry_calls(shape: BlockShape, entry_block: int, x_MK: Tensor) -> dict[str, TimedCall]:
    """The norm in front of a block: into FP8 by our kernels, and as torch compiles it."""
    norm = BlockNorm(shape.site.k, entry_block)
    spec, compiled = norm_spec(norm), torch.compile(norm.forward, dynamic=False, fullgraph=True)
    if not isinstance(spec, NormSpec):
        return {}  # no kernel computes it
    dx_MK = 1e-3 * torch.randn_like(x_MK)

    def entry_forward(turn: int) -> object:
        return norm_input(x_MK, spec, transposed=False, saved=False)

    def entry_training(turn: int) -> object:
        codes, saved = norm_input(x_MK, spec, transposed=shape.needs_dw, saved=shape.needs_dx)
        return norm_input_backward(dx_MK, spec, saved) if shape.needs_dx else codes

    def entry_baseline_forward(turn: int) -> object:
        with torch.no_grad():
            return compiled(x_MK)

    def entry_baseline_training(turn: int) -> object:
        x = x_MK.detach().requires_grad_(shape.needs_dx)
        y_MK = compiled(x)
        return torch.autograd.grad(y_MK, x, dx_MK.to(y_MK.dtype)) if shape.needs_dx else y_MK

    return {
        "entry_forward": entry_forward,
        "entry_training": entry_training,
        "entry_baseline_forward": entry_baseline_forward,
        "entry_baseline_training": entry_baseline_training,
    }


def _copy(block: FusedBlock) -> FusedBlock:
    bias = None if block.bias is None else nn.Parameter(block.bias.detach().clone())
    return FusedBlock(nn.Parameter(block.weight.detach().clone()), bias, block.norm, block.activation)
