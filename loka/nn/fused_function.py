"""Fused blocks in a row under one autograd function, so that no 8-bit tensor ever crosses autograd.

Axes:  M rows of the batch,  K features into a block,  N out of it,  B norm blocks,  G groups of rows in backward.

Forward hands e4m3 codes from block to block, and saves codes: of what each norm returned, and of each input transposed,
as wgrad reads it. Behind a norm their scale is a constant; the input of the chain is cast with a scale a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from loka.core.recipe import Scaling
from loka.kernels.operand import padded_size
from loka.kernels.triton.block import BlockOutputs, Wanted, block_backward, block_forward, norm_forward, spread_blocks
from loka.kernels.triton.casts import Target, cast_matrix
from loka.kernels.triton.gemm import grouped_gemm
from loka.kernels.triton.tiles import NormBlocks
from loka.nn.fused_spec import ChainSpec, NormSpec


class WeightCodes(NamedTuple):
    """e4m3 codes of a weight with a scale a row; transposed, its columns lie in the order of dz's (``spread_blocks``)."""

    codes_NK: Tensor
    scale_N: Tensor
    codes_KN: Tensor
    scale_K: Tensor


class BlockTensors(NamedTuple):
    """What a block reads. The kernels multiply the weight's codes; the weight is there to receive its gradient."""

    weight_NK: Tensor
    bias_N: Tensor | None
    codes_NK: Tensor
    scale_N: Tensor
    codes_KN: Tensor
    scale_K: Tensor


class InputCodes(NamedTuple):
    """A block's input in e4m3: value = code · ``factor`` (· a scale a row). Transposed where wgrad will read it, else empty."""

    codes_MK: Tensor
    scale_M: Tensor | None
    codes_KM: Tensor
    scale_K: Tensor | None
    factor: float


class Saved(NamedTuple):
    """What backward needs of a block; empty where nothing does."""

    normed_MN: Tensor
    rstd_BM: Tensor
    x_codes_KM: Tensor
    x_scale_K: Tensor | None


class SavedNorm(NamedTuple):
    """What backward needs of the norm at a chain's entry."""

    normed_MK: Tensor
    rstd_BM: Tensor


@dataclass(frozen=True)
class Needs:
    """Which gradients are asked for."""

    x: bool
    weights: tuple[bool, ...]
    biases: tuple[bool, ...]

    def input_of(self, block: int) -> bool:
        """Whether anything in front of ``block`` needs a gradient."""
        return self.x or any(self.weights[:block]) or any(self.biases[:block])


def cast_weight(weight_NK: Tensor, blocks: NormBlocks) -> WeightCodes:
    """Both forms of a weight that a block behind ``blocks`` reads."""
    n, k = weight_NK.shape
    spread_NK = spread_blocks(weight_NK, blocks)
    plain, transposed = _rowwise(n, k), _rowwise(k, spread_NK.shape[0])
    if spread_NK is weight_NK:
        return WeightCodes(*cast_matrix(weight_NK, plain, transposed))
    codes_NK, scale_N, _, _ = cast_matrix(weight_NK, plain, Target.none())
    _, _, codes_KN, scale_K = cast_matrix(spread_NK, Target.none(), transposed)
    return WeightCodes(codes_NK, scale_N, codes_KN, scale_K)


def run_chain(spec: ChainSpec, x_MK: Tensor, tensors: Sequence[BlockTensors], out_dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The outputs that ``spec`` names, in its order, differentiable once; x must have at least one row."""
    learned = [tensor for block in tensors for tensor in (block.weight_NK, block.bias_N) if tensor is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x_MK, *learned)):
        return _Chain.apply(x_MK, spec, out_dtype, *(tensor for block in tensors for tensor in block))
    nothing = (False,) * len(tensors)
    outputs, _, _ = _forward(spec, x_MK, tensors, out_dtype, Needs(False, nothing, nothing))
    return outputs


def _forward(
    spec: ChainSpec, x_MK: Tensor, tensors: Sequence[BlockTensors], out_dtype: torch.dtype, needs: Needs
) -> tuple[tuple[Tensor, ...], list[Saved], SavedNorm | None]:
    m, last = x_MK.shape[0], len(tensors) - 1
    x, saved_norm = _enter(spec.entry, x_MK, needs)
    saved, outputs = [], {}
    for index, (block, tensor) in enumerate(zip(spec.blocks, tensors, strict=True)):
        wanted = _wanted(
            block.activation,
            high=out_dtype if index in spec.outputs else None,
            codes=index < last,
            transposed=index < last and needs.weights[index + 1],
            saved=needs.input_of(index + 1),
        )
        out = block_forward(
            x.codes_MK, x.scale_M, x.factor, tensor.codes_NK, tensor.scale_N, tensor.bias_N,
            m, block.in_features, block.blocks, block.norm.eps, block.activation, wanted,
        )  # fmt: skip
        saved.append(Saved(out.normed_MN, out.rstd_BM, x.codes_KM, x.scale_K))
        outputs[index] = out.y_MN
        x = _handed_on(out, wanted, m, block.blocks)
    return tuple(outputs[index] for index in spec.outputs), saved, saved_norm


def _enter(entry: NormSpec | None, x_MK: Tensor, needs: Needs) -> tuple[InputCodes, SavedNorm | None]:
    m, k = x_MK.shape
    if entry is None:
        transposed = _rowwise(k, m) if needs.weights[0] else Target.none()
        return InputCodes(*cast_matrix(x_MK, _rowwise(m, k), transposed), factor=1.0), None
    wanted = _wanted("none", codes=True, transposed=needs.weights[0], saved=needs.x)
    out = norm_forward(x_MK, entry.blocks, entry.eps, "none", wanted)
    return _handed_on(out, wanted, m, entry.blocks), SavedNorm(out.normed_MN, out.rstd_BM)


def _wanted(activation: str, *, codes: bool, transposed: bool, saved: bool, high: torch.dtype | None = None) -> Wanted:
    """Without an activation the codes of y are those of the normed values that are saved: they are written once."""
    return Wanted(high, codes and not (saved and activation == "none"), transposed, saved)


def _handed_on(out: BlockOutputs, wanted: Wanted, m: int, blocks: NormBlocks) -> InputCodes:
    codes_KM = out.codes_NM[:, :m] if wanted.transposed else out.codes_NM  # what lies behind is not to be read
    return InputCodes(out.codes_MN if wanted.codes else out.normed_MN, None, codes_KM, None, blocks.code_scale)


class _Chain(torch.autograd.Function):
    """Inputs: x, the spec, the dtype of the outputs, and the ``BlockTensors`` of each block, flat."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, spec: ChainSpec, out_dtype: torch.dtype, *flat: Any) -> tuple[Tensor, ...]:
        size = len(BlockTensors._fields)
        tensors = [BlockTensors(*flat[first : first + size]) for first in range(0, len(flat), size)]
        needs_x, _, _, *of_flat = ctx.needs_input_grad
        needs = Needs(needs_x, tuple(of_flat[::size]), tuple(of_flat[1::size]))
        outputs, saved, saved_norm = _forward(spec, x_MK, tensors, out_dtype, needs)
        ctx.spec, ctx.needs, ctx.out_dtype = spec, needs, out_dtype
        ctx.m, ctx.x_dtype = x_MK.shape[0], x_MK.dtype
        ctx.dtypes = tuple((t.weight_NK.dtype, None if t.bias_N is None else t.bias_N.dtype) for t in tensors)
        per_block = [(*block, t.codes_KN, t.scale_K) for block, t in zip(saved, tensors, strict=True)]
        ctx.save_for_backward(*(tensor for block in per_block for tensor in block), *(saved_norm or ()))
        return outputs

    @staticmethod
    @once_differentiable  # codes have no derivative: a second backward would be wrong, so it is refused
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        spec: ChainSpec = ctx.spec
        needs: Needs = ctx.needs
        tensors, size = ctx.saved_tensors, len(Saved._fields) + 2
        from_outputs = dict(zip(spec.outputs, grads, strict=True))
        learned: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * len(spec.blocks)
        dy_MN = None
        for index in reversed(range(len(spec.blocks))):
            if not needs.input_of(index + 1):
                break
            block, needs_x, leaves = spec.blocks[index], needs.input_of(index), index == 0 and spec.entry is None
            weight_dtype, bias_dtype = ctx.dtypes[index]
            *of_saved, codes_KN, scale_K = tensors[index * size : (index + 1) * size]
            saved = Saved(*of_saved)
            dy_MN = _sum(dy_MN, from_outputs.get(index))
            dz = block_backward(
                dy_MN, saved.normed_MN, saved.rstd_BM, block.blocks, block.activation,
                plain=needs_x, transposed=needs.weights[index], bias=needs.biases[index],
            )  # fmt: skip
            dw_NK = db_N = None
            if needs.weights[index]:
                dw_NK = grouped_gemm(
                    dz.codes_NM, saved.x_codes_KM, dz.scale_GN, saved.x_scale_K, block.blocks.features, block.in_features,
                    out_dtype=weight_dtype, b_factor=_input_factor(spec, index),
                )  # fmt: skip
            if needs.biases[index]:
                db_N = dz.bias_N.to(bias_dtype)
            learned[index] = dw_NK, db_N
            if needs_x:
                dy_MN = grouped_gemm(
                    dz.codes_MN, codes_KN, dz.scale_BM, scale_K, ctx.m, block.in_features,
                    out_dtype=ctx.x_dtype if leaves else ctx.out_dtype,
                )  # fmt: skip
        dx_MK = dy_MN if needs.x else None
        if dx_MK is not None and spec.entry is not None:
            dx_MK = _norm_backward(dx_MK, SavedNorm(*tensors[-2:]), spec.entry.blocks, ctx.x_dtype)
        codes = (None,) * (len(BlockTensors._fields) - 2)
        return (dx_MK, None, None, *(grad for pair in learned for grad in (*pair, *codes)))


def _input_factor(spec: ChainSpec, index: int) -> float:
    norm = spec.entry if index == 0 else spec.blocks[index - 1].norm
    return 1.0 if norm is None else norm.blocks.code_scale


def _norm_backward(dy_MN: Tensor, saved: SavedNorm, blocks: NormBlocks, dtype: torch.dtype) -> Tensor:
    """The gradient of a norm that no kernel of a block holds: dz = rstd·(dy − u·mean(dy·u)), the mean over u's own block."""
    u_MN = saved.normed_MK[:, : blocks.features].float() * blocks.code_scale
    dy_MN = dy_MN.float()
    parts, block, col = [], 0, 0
    for count, width in ((blocks.wider, blocks.width + 1), (blocks.count - blocks.wider, blocks.width)):
        u, dy = (tensor[:, col : col + count * width].unflatten(1, (count, width)) for tensor in (u_MN, dy_MN))
        rstd = saved.rstd_BM[block : block + count].t()[:, :, None]
        parts.append((rstd * (dy - u * (dy * u).mean(2, keepdim=True))).flatten(1))
        block, col = block + count, col + count * width
    return torch.cat(parts, 1).to(dtype)


def _rowwise(outer: int, contraction: int) -> Target:
    return Target(Scaling.ROWWISE.value, outer, padded_size(contraction, 16), 1.0)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor:
    if a is None or b is None:
        (only,) = (tensor for tensor in (a, b) if tensor is not None)
        return only
    return a + b
