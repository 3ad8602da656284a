"""Fused blocks in a row under one autograd function, so that no 8-bit tensor ever crosses autograd.

Axes:  M rows of the batch,  K features into a block,  N out of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from loka.nn.fused_spec import ChainSpec
from loka.nn.fused_steps import (
    GradientNeeds,
    SavedBlock,
    SavedNorm,
    backward_block,
    cast_input,
    forward_block,
    norm_input,
    norm_input_backward,
)
from loka.nn.site import as_output, refuse_transforms, refuse_unseen_derivatives


class BlockTensors(NamedTuple):
    """What a block reads. The kernels multiply the weight's codes; the weight is there to receive its gradient."""

    weight_NK: Tensor
    bias_N: Tensor | None
    codes_NK: Tensor
    scale_N: Tensor
    codes_KN: Tensor
    scale_KN: Tensor  # one for all


class ServedTensors(NamedTuple):
    """What a block's forward reads."""

    bias_N: Tensor | None
    codes_NK: Tensor
    scale_N: Tensor


@dataclass(frozen=True)
class ChainNeeds:
    """Which gradients of a chain are asked for."""

    x: bool
    weights: tuple[bool, ...]
    biases: tuple[bool, ...]

    def in_front_of(self, block: int) -> bool:
        """Whether anything in front of ``block`` needs a gradient."""
        return self.x or any(self.weights[:block]) or any(self.biases[:block])

    def of(self, block: int) -> GradientNeeds:
        return GradientNeeds(self.in_front_of(block), self.weights[block], self.biases[block])


def run_chain(spec: ChainSpec, x_MK: Tensor, tensors: Sequence[BlockTensors], out_dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The outputs that ``spec`` names, in its order, differentiable once; x must have at least one row."""
    learned = [tensor for block in tensors for tensor in (block.weight_NK, block.bias_N) if tensor is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x_MK, *learned)):
        refuse_transforms()
        return _Chain.apply(x_MK, spec, out_dtype, *(tensor for block in tensors for tensor in block))
    refuse_unseen_derivatives(x_MK, *learned)
    return serve_chain(spec, x_MK, tensors, out_dtype)


def serve_chain(
    spec: ChainSpec, x_MK: Tensor, tensors: Sequence[BlockTensors | ServedTensors], out_dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """The same without gradients."""
    nothing = (False,) * len(tensors)
    outputs, _, _ = _forward(spec, x_MK, tensors, out_dtype, ChainNeeds(False, nothing, nothing))
    return outputs


def _forward(
    spec: ChainSpec,
    x_MK: Tensor,
    tensors: Sequence[BlockTensors | ServedTensors],
    out_dtype: torch.dtype,
    needs: ChainNeeds,
) -> tuple[tuple[Tensor, ...], list[SavedBlock], SavedNorm | None]:
    last, saved, outputs, saved_norm = len(tensors) - 1, [], {}, None
    if spec.entry is None:
        x = cast_input(x_MK, transposed=needs.weights[0])
    else:
        x, saved_norm = norm_input(x_MK, spec.entry, transposed=needs.weights[0], saved=needs.x)
    for index, (block, tensor) in enumerate(zip(spec.blocks, tensors, strict=True)):
        result = forward_block(
            block, x, tensor.codes_NK, tensor.scale_N, tensor.bias_N,
            high=out_dtype if index in spec.outputs else None,
            codes=index < last,
            transposed=index < last and needs.weights[index + 1],
            saved=needs.in_front_of(index + 1),
            bias_learns=needs.biases[index],
        )  # fmt: skip
        saved.append(result.saved)
        outputs[index], x = result.y_MN, result.codes
    return tuple(outputs[index] for index in spec.outputs), saved, saved_norm


class _Chain(torch.autograd.Function):
    """Inputs: x, the spec, the dtype of the outputs, and the ``BlockTensors`` of each block, flat."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, spec: ChainSpec, out_dtype: torch.dtype, *flat: Any) -> tuple[Tensor, ...]:
        size = len(BlockTensors._fields)
        tensors = [BlockTensors(*flat[first : first + size]) for first in range(0, len(flat), size)]
        needs_x, _, _, *of_flat = ctx.needs_input_grad
        needs = ChainNeeds(needs_x, tuple(of_flat[::size]), tuple(of_flat[1::size]))
        outputs, saved, saved_norm = _forward(spec, x_MK, tensors, out_dtype, needs)
        ctx.spec, ctx.needs, ctx.out_dtype, ctx.x_dtype = spec, needs, out_dtype, x_MK.dtype
        ctx.dtypes = tuple((t.weight_NK.dtype, None if t.bias_N is None else t.bias_N.dtype) for t in tensors)
        per_block = [(*block, t.codes_KN, t.scale_KN) for block, t in zip(saved, tensors, strict=True)]
        ctx.save_for_backward(*(tensor for block in per_block for tensor in block), *(saved_norm or ()))
        return tuple(as_output(output) for output in outputs)

    @staticmethod
    @once_differentiable  # codes have no derivative: a second backward would be wrong, so it is refused
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        spec: ChainSpec = ctx.spec
        needs: ChainNeeds = ctx.needs
        tensors, size = ctx.saved_tensors, len(SavedBlock._fields) + 2
        from_outputs = dict(zip(spec.outputs, grads, strict=True))
        of_blocks: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * len(spec.blocks)
        dy_MN = None
        for index in reversed(range(len(spec.blocks))):
            if not needs.in_front_of(index + 1):
                break
            *saved, codes_KN, scale_KN = tensors[index * size : (index + 1) * size]
            weight_dtype, bias_dtype = ctx.dtypes[index]
            gradients = backward_block(
                spec.blocks[index], _sum(dy_MN, from_outputs.get(index)), SavedBlock(*saved), spec.input_factor(index),
                codes_KN, scale_KN,
                needs=needs.of(index), x_dtype=ctx.x_dtype if index == 0 else ctx.out_dtype, weight_dtype=weight_dtype,
            )  # fmt: skip
            db_N = None if gradients.bias_N is None else gradients.bias_N.to(bias_dtype)
            of_blocks[index], dy_MN = (gradients.weight_NK, db_N), gradients.x_MK
        dx_MK = dy_MN if needs.x else None
        if dx_MK is not None and spec.entry is not None:
            dx_MK = norm_input_backward(dx_MK, spec.entry, SavedNorm(*tensors[-2:]))
        codes = (None,) * (len(BlockTensors._fields) - 2)
        return (dx_MK, None, None, *(grad for pair in of_blocks for grad in (*pair, *codes)))


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor:
    if a is None or b is None:
        (only,) = (tensor for tensor in (a, b) if tensor is not None)
        return only
    return a + b
