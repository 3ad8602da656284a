"""One fused block, a step at a time: how its input comes to be FP8, its forward kernel, and its backward kernels.

Axes:  M rows of the batch,  K features into the block,  N out of it,  B norm blocks.

Codes are e4m3. Forward saves the codes of what the norm returned, and of the input transposed, as wgrad reads it. Behind a
norm their scale is a constant; an input from elsewhere is cast with a scale a row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from loka.core.recipe import Scaling
from loka.kernels.operand import padded_size
from loka.kernels.triton.block import (
    BlockOutputs,
    Wanted,
    block_forward,
    norm_backward,
    norm_forward,
)
from loka.kernels.triton.casts import Target, cast_matrix, write_codes
from loka.kernels.triton.gemm import gemm
from loka.kernels.triton.tiles import NormBlocks, is_promoted
from loka.nn.fused_spec import BlockSpec, NormSpec


class WeightCodes(NamedTuple):
    """Codes of a weight and of its transpose, each with a scale a row."""

    codes_NK: Tensor
    scale_N: Tensor
    codes_KN: Tensor
    scale_K: Tensor


class InputCodes(NamedTuple):
    """A block's input: value = code · ``factor`` (· a scale a row). Transposed where wgrad will read it, else empty."""

    codes_MK: Tensor
    scale_M: Tensor | None
    codes_KM: Tensor
    scale_K: Tensor | None
    factor: float


class SavedBlock(NamedTuple):
    """What backward needs of a block; empty where it needs nothing."""

    normed_MN: Tensor
    rstd_BM: Tensor
    x_codes_KM: Tensor
    x_scale_K: Tensor | None


class SavedNorm(NamedTuple):
    """What backward needs of a norm that stands alone."""

    normed_MN: Tensor
    rstd_BM: Tensor


class ForwardResult(NamedTuple):
    y_MN: Tensor  # empty where only codes are wanted
    codes: InputCodes  # for the block behind
    saved: SavedBlock


class GradientNeeds(NamedTuple):
    """Which of a block's gradients are asked for."""

    x: bool
    weight: bool
    bias: bool


class Gradients(NamedTuple):
    x_MK: Tensor | None
    weight_NK: Tensor | None
    bias_N: Tensor | None


def cast_weight(weight_NK: Tensor) -> WeightCodes:
    """Both forms of a weight that a block reads."""
    n, k = weight_NK.shape
    return WeightCodes(*cast_matrix(weight_NK, _rowwise(n, k), _rowwise(k, n)))


def recast_weight(weight_NK: Tensor, held: WeightCodes) -> None:
    """``cast_weight`` into the codes that are there, without a copy."""
    n, k = weight_NK.shape
    write_codes(weight_NK, _rowwise(n, k), _rowwise(k, n), held)


def cast_input(x_MK: Tensor, *, transposed: bool) -> InputCodes:
    """How a matrix from anywhere enters a block; ``transposed`` where the block's weight will get a gradient."""
    m, k = x_MK.shape
    return InputCodes(*cast_matrix(x_MK, _rowwise(m, k), _rowwise(k, m) if transposed else Target.none()), factor=1.0)


def norm_input(x_MK: Tensor, norm: NormSpec, *, transposed: bool, saved: bool) -> tuple[InputCodes, SavedNorm]:
    """How a matrix enters a block through a norm that stands alone."""
    wanted = _wanted("none", codes=True, transposed=transposed, saved=saved)
    out = norm_forward(x_MK, norm.blocks, norm.eps, "none", wanted)
    return _handed_on(out, wanted, norm.blocks), SavedNorm(out.normed_MN, out.rstd_BM)


def norm_input_backward(dx_MN: Tensor, norm: NormSpec, saved: SavedNorm) -> Tensor:
    return norm_backward(dx_MN, saved.normed_MN, saved.rstd_BM, norm.blocks, "none", bias=False).dz_MN


def forward_block(
    spec: BlockSpec, x: InputCodes, codes_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None,
    *, high: torch.dtype | None = None, codes: bool = False, transposed: bool = False, saved: bool = False,
) -> ForwardResult:  # fmt: skip
    """The block in the forms asked for: ``high`` precision, ``codes``, ``transposed`` ones, and what backward needs."""
    wanted = _wanted(spec.activation, high=high, codes=codes, transposed=transposed, saved=saved)
    out = block_forward(
        x.codes_MK, x.scale_M, x.factor, codes_NK, scale_N, bias_N,
        x.codes_MK.shape[0], spec.in_features, spec.blocks, spec.norm.eps, spec.activation, wanted,
    )  # fmt: skip
    return ForwardResult(
        out.y_MN, _handed_on(out, wanted, spec.blocks), SavedBlock(out.normed_MN, out.rstd_BM, x.codes_KM, x.scale_K)
    )


def backward_block(
    spec: BlockSpec, dy_MN: Tensor, saved: SavedBlock, x_factor: float, codes_KN: Tensor, scale_K: Tensor,
    *, needs: GradientNeeds, x_dtype: torch.dtype, weight_dtype: torch.dtype,
) -> Gradients:  # fmt: skip
    """The gradients asked for; the bias's is float32. ``x_factor`` is the constant part of the input's scale."""
    m, n, k = dy_MN.shape[0], spec.blocks.features, spec.in_features
    dz = norm_backward(dy_MN, saved.normed_MN, saved.rstd_BM, spec.blocks, spec.activation, bias=needs.bias)
    codes_MN, scale_M, codes_NM, scale_N = cast_matrix(
        dz.dz_MN, _rowwise(m, n) if needs.x else Target.none(), _rowwise(n, m) if needs.weight else Target.none(), dz.amax
    )
    dx_MK = dw_NK = None
    if needs.weight:
        dw_NK = _product(codes_NM, scale_N, saved.x_codes_KM, saved.x_scale_K, (n, k, m), weight_dtype, x_factor)
    if needs.x:
        dx_MK = _product(codes_MN, scale_M, codes_KN, scale_K, (m, k, n), x_dtype)
    return Gradients(dx_MK, dw_NK, dz.bias_N if needs.bias else None)


def _product(
    a_codes: Tensor, a_scale: Tensor, b_codes: Tensor, b_scale: Tensor | None, sizes: tuple[int, int, int],
    out_dtype: torch.dtype, b_factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """a·bᵀ of ``sizes`` (m, n, k). Where a long contraction asks for full sums, cuBLAS is the faster, if it takes the shape."""
    m, n, k = sizes
    if is_promoted(k) and n % 16 == 0 and k % 16 == 0:
        scale_n = a_scale.new_full((n, 1), b_factor) if b_scale is None else b_factor * b_scale
        a, b = a_codes[:, :k], b_codes[:, :k].t()
        out = torch._scaled_mm(a, b, a_scale, scale_n.t(), out_dtype=torch.bfloat16, use_fast_accum=False)
        return out.to(out_dtype)
    return gemm(a_codes, b_codes, a_scale, b_scale, m, n, k, out_dtype=out_dtype, promoted=is_promoted(k), b_factor=b_factor)


def _wanted(activation: str, *, codes: bool, transposed: bool, saved: bool, high: torch.dtype | None = None) -> Wanted:
    """Without an activation the codes of y are those of the normed values that are saved: they are written once."""
    return Wanted(high, codes and not (saved and activation == "none"), transposed, saved)


def _handed_on(out: BlockOutputs, wanted: Wanted, blocks: NormBlocks) -> InputCodes:
    codes_MN = out.codes_MN if wanted.codes else out.normed_MN
    codes_NM = out.codes_NM[:, : codes_MN.shape[0]] if wanted.transposed else out.codes_NM  # behind lies what nobody may read
    return InputCodes(codes_MN, None, codes_NM, None, blocks.code_scale)


def _rowwise(outer: int, contraction: int) -> Target:
    return Target(Scaling.ROWWISE.value, outer, padded_size(contraction, 16), 1.0)
