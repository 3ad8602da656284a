"""Linear → BlockNorm → activation, or without the norm, as one module on the fused FP8 kernels, alone or in a chain.

Where the kernels cannot run (see ``why_reference``) the same module computes the same in high precision.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from loka.core.errors import InvalidInput, require_kind
from loka.kernels.stepping import AdamStep
from loka.nn.block_norm import BlockNorm
from loka.nn.block_reference import block_reference
from loka.nn.fused_function import BlockTensors, run_chain
from loka.nn.fused_spec import BlockSpec, ChainSpec, block_spec, norm_spec, why_not_here
from loka.nn.fused_steps import WeightCodes, cast_weight, recasting_weight, steps_too
from loka.nn.linear import as_read, output_dtype, own_weight, require_input
from loka.nn.stand_in import take_over
from loka.nn.weight_casts import (
    drop_casts,
    has_own_weight,
    holds_casts_of,
    holds_current_casts,
    keep_current,
    refresh_after_load,
    refuse_replicas,
    rewrite_casts,
    state_without_casts,
    store_casts,
    stored_cast,
    versions_kept_if_unwritten,
)


class FusedBlock(nn.Module):
    """activation(norm(x·wᵀ + b)) with the parameters and ``state_dict`` of the linear layer it is made from.

    A BlockNorm in front, ``entry``, is applied to x and hands it on in FP8.
    A norm or activation that has parameters of its own, which no fused kernel takes, keeps them under its own name.
    """

    weight: Tensor
    why_reference: str | None  # why the block runs in high precision; None where it runs on the fused kernels

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        norm: nn.Module | None,
        activation: nn.Module | None,
        entry: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        if isinstance(norm, BlockNorm) and norm.n_features != self.out_features:
            raise InvalidInput(f"the linear gives {self.out_features} features, the norm behind it takes {norm.n_features}")
        self.weight, self.bias = weight, bias
        self.norm, self.activation, self.entry = norm, activation, entry
        self.spec = block_spec(self.in_features, norm, activation)
        self.followers: tuple[FusedBlock, ...] = ()  # what link_blocks makes this block run as well
        self.follows = False
        _require_fit((self,), entry)
        self.chain = _chain_spec((self,), entry, (0,))
        self.refresh_weight_casts()
        self.register_load_state_dict_post_hook(refresh_after_load)
        keep_current(self)

    @classmethod
    def from_modules(
        cls, linear: nn.Linear, norm: nn.Module | None, activation: nn.Module | None, entry: nn.Module | None = None
    ) -> "FusedBlock":
        """A block that shares the very parameters of ``linear``, so that its optimizer goes on as it was."""
        require_kind(linear, nn.Linear, "linear", "norm and activation come behind it")
        bias = linear._parameters.get("bias")
        block = cls(own_weight(linear), bias if isinstance(bias, nn.Parameter) else None, norm, activation, entry)
        take_over(linear, block)
        return block.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        if self.follows:  # the block in front has done this one's work
            return input
        (y,) = _run(self.chain, (self, *self.followers), self.entry, (len(self.followers),), input)
        return y

    @torch.inference_mode(False)  # a cast made in that mode could not be written again outside of it
    def refresh_weight_casts(self) -> None:
        """Cast the weight again, into the buffers that are there, if the kernels can run where it lies now."""
        unable = (part for part in (self.spec, None if self.entry is None else norm_spec(self.entry)) if isinstance(part, str))
        self.why_reference = next(unable, None) or why_not_here(self.weight.device, self.weight.dtype)
        if self.why_reference is None:
            store_casts(self, cast_weight(self.weight.detach())._asdict())
        else:
            drop_casts(self)

    def recast_after_step(self) -> None:
        """The same after a step of an optimizer."""
        if self.why_reference is not None:
            return
        if holds_casts_of(self, self.weight):
            weight_NK = self.weight.detach()
            rewrite_casts(self, weight_NK, lambda: recasting_weight(weight_NK, self._held_codes()))
        else:
            self.refresh_weight_casts()

    def can_step(self) -> bool:
        return self.why_reference is None and steps_too(self.weight) and holds_casts_of(self, self.weight)

    def step_and_recast(self, adam: AdamStep) -> None:
        weight_NK = self.weight.detach()
        rewrite_casts(self, weight_NK, lambda: recasting_weight(weight_NK, self._held_codes(), adam), adam)

    def tensors(self) -> BlockTensors | None:
        """What the fused kernels read; None where they cannot run on the weight that is there now, or where it is
        made in every call."""
        if self.why_reference is not None or not has_own_weight(self):
            return None
        if holds_current_casts(self):
            codes = None if self.why_reference else self._held_codes()  # why_reference is new if casts were just made again
        else:
            codes = None if why_not_here(self.weight.device, self.weight.dtype) else cast_weight(self.weight.detach())
        return None if codes is None else BlockTensors(self.weight, self.bias, *codes)

    def reference(self, x: Tensor) -> Tensor:
        """The block in high precision, without the norm in front of it."""
        return block_reference(x, self.weight, self.bias, self.norm, self.activation)

    def chain_reference(self, x: Tensor) -> Tensor:
        """All that a call of this block computes, in high precision: the norm in front, the block, and those behind it."""
        x = x if self.entry is None else self.entry(x)
        for block in (self, *self.followers):
            x = block.reference(x)
        return x

    def extra_repr(self) -> str:
        how = "fused" if self.why_reference is None else f"in high precision: {self.why_reference}"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, {how}"

    def _held_codes(self) -> WeightCodes:
        return WeightCodes(*(stored_cast(self, name) for name in WeightCodes._fields))

    def _apply(self, fn: Any, recurse: bool = True) -> "FusedBlock":
        """8-bit codes are made anew."""
        super()._apply(fn, recurse)
        with versions_kept_if_unwritten(self):
            self.refresh_weight_casts()
        return self

    def _replicate_for_data_parallel(self) -> NoReturn:
        refuse_replicas()

    def __getstate__(self) -> dict[str, Any]:
        return state_without_casts(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.refresh_weight_casts()
        keep_current(self)


class FusedChain(nn.Module):
    """Blocks in a row that hand each other FP8. A BlockNorm in front (``entry``) hands it to the first of them.

    ``outputs`` are the blocks whose result leaves in high precision, for a residual say: one gives a tensor, more a tuple.
    """

    def __init__(self, blocks: Sequence[FusedBlock], *, entry: BlockNorm | None = None, outputs: Sequence[int] = (-1,)) -> None:
        super().__init__()
        _require_fit(blocks, entry)
        if not outputs or not all(-len(blocks) <= output < len(blocks) for output in outputs):
            raise InvalidInput(f"outputs must name some of {len(blocks)} blocks by their index, got {tuple(outputs)}")
        named = [output % len(blocks) for output in outputs]
        if len(set(named)) < len(named) or len(blocks) - 1 not in named:
            raise InvalidInput(
                f"outputs must name each block once, and the last of {len(blocks)} among them, got {tuple(outputs)}: leave out "
                f"blocks that nobody reads"
            )
        self.entry = entry
        self.blocks = nn.ModuleList(blocks)
        self.outputs = tuple(named)
        self.chain = _chain_spec(blocks, entry, self.outputs)

    @property
    def why_reference(self) -> str | None:
        """Why the chain does not run as one: then each block runs by itself, fused where it can."""
        return _why_not_chained(self._blocks(), self.entry)

    def forward(self, input: Tensor) -> Tensor | tuple[Tensor, ...]:
        outputs = _run(self.chain, self._blocks(), self.entry, self.outputs, input)
        return outputs[0] if len(outputs) == 1 else outputs

    def _blocks(self) -> tuple[FusedBlock, ...]:
        return tuple(self.blocks)  # pyrefly: ignore[bad-return]


def link_blocks(blocks: Sequence[FusedBlock]) -> None:
    """Chain blocks where they are: the first then runs them all, the others pass on what they are given.

    Parameters keep their names. Only for blocks that each read nothing but the one in front of them, in every call.
    """
    first, *others = blocks
    _require_fit(blocks, first.entry)
    if any(block.follows or block.followers for block in blocks):
        raise InvalidInput("a block is linked already: link each chain once, with all of its blocks")
    first.followers = tuple(others)
    first.chain = _chain_spec(blocks, first.entry, (len(others),))
    for block in others:
        block.follows = True


def _run(
    spec: ChainSpec | None, blocks: Sequence[FusedBlock], entry: nn.Module | None, outputs: tuple[int, ...], x: Tensor
) -> tuple[Tensor, ...]:
    """The outputs asked for: by one chain of kernels, or by the blocks one after another, each fused if it can be by itself."""
    if has_own_weight(blocks[0]):
        require_input(x, blocks[0].weight)
    tensors = [block.tensors() if x.numel() > 0 else None for block in blocks]
    able = [of_block for of_block in tensors if of_block is not None]
    if spec is not None and len(able) == len(blocks) and _why_not_chained(blocks, entry) is None:
        return _run_fused(spec, able, x)
    x = x if entry is None else entry(x)
    results = []
    for block, of_block in zip(blocks, tensors, strict=True):
        alone = _chain_spec((block,), None, (0,))
        x = block.reference(x) if alone is None or of_block is None else _run_fused(alone, [of_block], x)[0]
        results.append(x)
    return tuple(results[index] for index in outputs)


def _run_fused(spec: ChainSpec, tensors: list[BlockTensors], x: Tensor) -> tuple[Tensor, ...]:
    results = run_chain(spec, rows_read(spec, x), tensors, output_dtype(x))
    return tuple(result.reshape(*x.shape[:-1], result.shape[-1]) for result in results)


def rows_read(spec: ChainSpec, x: Tensor) -> Tensor:
    """The matrix that a chain reads of its input. Autocast leaves what a norm reads as it is."""
    return (as_read(x) if spec.entry is None else x).reshape(-1, x.shape[-1])


def _chain_spec(blocks: Sequence[FusedBlock], entry: nn.Module | None, outputs: tuple[int, ...]) -> ChainSpec | None:
    """The chain as the kernels see it; None where they cannot compute all of it."""
    specs = tuple(block.spec for block in blocks if isinstance(block.spec, BlockSpec))
    entry_spec = None if entry is None else norm_spec(entry)
    if len(specs) < len(blocks) or isinstance(entry_spec, str):
        return None
    return ChainSpec(specs, entry_spec, outputs)


def _why_not_chained(blocks: Sequence[FusedBlock], entry: nn.Module | None) -> str | None:
    entry_spec = None if entry is None else norm_spec(entry)
    if isinstance(entry_spec, str):
        return entry_spec
    return next((block.why_reference for block in blocks if block.why_reference), None)


def _require_fit(blocks: Sequence[FusedBlock], entry: nn.Module | None) -> None:
    if not blocks:
        raise InvalidInput("a chain needs at least one block")
    for index, block in enumerate(blocks):
        require_kind(block, FusedBlock, f"block {index} of the chain", "make it with FusedBlock.from_modules")
    if (blocks[0].entry is not None and blocks[0].entry is not entry) or any(block.entry is not None for block in blocks[1:]):
        raise InvalidInput("a block of the chain has a norm of its own in front: give the chain that norm, as its entry")
    given = entry.n_features if isinstance(entry, BlockNorm) else blocks[0].in_features
    for index, block in enumerate(blocks):
        if block.in_features != given:
            raise InvalidInput(f"block {index} of the chain reads {block.in_features} features, but gets {given}")
        given = block.out_features
