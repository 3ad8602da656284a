"""One fused block, a step at a time: how its input comes to be FP8, its forward kernel, and its backward kernels.

Axes:  M rows of the batch,  K features into the block,  N out of it,  B norm blocks.

Codes are e4m3. Behind a norm their scale is a constant; any other input, that from a block without a norm included, is cast
with a scale a row, and for wgrad with one for all. Forward saves the codes of the input transposed, as wgrad reads it, and what
the gradient of norm and activation is made from (see ``_saved_dtype``).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from loka.kernels.stepping import AdamStep
from loka.kernels.triton.block import CODES_DTYPE, BlockOutputs, Wanted, block_forward, norm_forward
from loka.kernels.triton.gemm import gemm
from loka.kernels.triton.gradient import GradientCodes, block_gradient, norm_gradient
from loka.kernels.triton.share import cast_by_rows, rewriting_by_rows, steps_by_rows
from loka.kernels.triton.tiles import NormBlocks, is_promoted
from loka.nn.fused_spec import BlockSpec, NormSpec


class WeightCodes(NamedTuple):
    """Codes of a weight with a scale a row, and of its transpose with one for all."""

    codes_NK: Tensor
    scale_N: Tensor
    codes_KN: Tensor
    scale_KN: Tensor


class InputCodes(NamedTuple):
    """A block's input: value = code · ``factor`` (· a scale a row). Its transposed codes are empty unless wgrad will read them:
    value = code · ``factor`` (· one scale for all)."""

    codes_MK: Tensor
    scale_M: Tensor | None
    codes_KM: Tensor
    scale_KM: Tensor | None
    factor: float


class SavedBlock(NamedTuple):
    """What backward needs of a block; empty where it needs nothing."""

    u_MN: Tensor
    rstd_BM: Tensor
    x_codes_KM: Tensor
    x_scale_KM: Tensor | None


class SavedNorm(NamedTuple):
    """What backward needs of a norm that stands alone."""

    u_MN: Tensor
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


def cast_weight(weight_NK: Tensor, *, transposed: bool = True) -> WeightCodes:
    """The forms of a weight that a block reads; the transposed one, which serving does not read, is empty unless asked for."""
    return WeightCodes(*cast_by_rows(weight_NK, transposed=transposed))


def recasting_weight(weight_NK: Tensor, held: WeightCodes, adam: AdamStep | None = None) -> Callable[[], None]:
    """A function that does ``cast_weight`` again, into the codes held; with ``adam``, for a weight that ``steps_too``, it makes
    that step first."""
    return rewriting_by_rows(weight_NK, held, adam)


def steps_too(weight_NK: Tensor) -> bool:
    return steps_by_rows(weight_NK.shape[1])


def cast_input(x_MK: Tensor, *, transposed: bool) -> InputCodes:
    """How a matrix from anywhere enters a block; ``transposed`` where the block's weight will get a gradient."""
    return InputCodes(*cast_by_rows(x_MK, transposed=transposed), factor=1.0)


def norm_input(x_MK: Tensor, norm: NormSpec, *, transposed: bool, saved: bool) -> tuple[InputCodes, SavedNorm]:
    """How a matrix enters a block through a norm that stands alone."""
    # Its codes are those of u: they are written once.
    wanted = Wanted(codes=not saved, transposed=transposed, saved=CODES_DTYPE if saved else None)
    out = norm_forward(x_MK, norm.blocks, norm.eps, "none", wanted)
    return _handed_on(out, wanted, norm.blocks), SavedNorm(out.u_MN, out.rstd_BM)


def norm_input_backward(dx_MN: Tensor, norm: NormSpec, saved: SavedNorm) -> Tensor:
    return norm_gradient(dx_MN, saved.u_MN, saved.rstd_BM, norm.blocks)


def forward_block(
    spec: BlockSpec, x: InputCodes, codes_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None, *,
    high: torch.dtype | None = None, codes: bool = False, transposed: bool = False, saved: bool = False,
    bias_learns: bool = False,
) -> ForwardResult:  # fmt: skip
    """The block in the forms asked for: ``high`` precision, ``codes``, ``transposed`` ones, and what backward needs, which
    is more where the bias learns."""
    saved_dtype = _saved_dtype(spec, bias_learns) if saved else None
    if spec.norm is None:
        wanted = Wanted(high or torch.bfloat16, saved=saved_dtype)
    else:  # without an activation the codes of y are those of u: they are written once
        is_u = spec.activation == "none" and saved_dtype is CODES_DTYPE
        wanted = Wanted(high, codes and not is_u, transposed, saved_dtype)
    m, n, k = x.codes_MK.shape[0], codes_NK.shape[0], spec.in_features
    if spec.blocks is not None and bias_N is None and is_promoted(k) and _is_for_cublas(x.codes_MK, n, k):
        z_MN = _product(x.codes_MK, x.scale_M, codes_NK, scale_N, (m, n, k), torch.bfloat16, x.factor, promoted=True)
        out = norm_forward(z_MN, spec.blocks, spec.eps, spec.activation, wanted)
    else:
        out = block_forward(
            x.codes_MK, x.scale_M, x.factor, codes_NK, scale_N, bias_N,
            m, k, spec.blocks, spec.eps, spec.activation, wanted,
        )  # fmt: skip
    if spec.blocks is not None:
        handed_on = _handed_on(out, wanted, spec.blocks)
    elif codes:
        handed_on = cast_input(out.y_MN, transposed=transposed)
    else:
        handed_on = InputCodes(out.codes_MN, None, out.codes_NM, None, factor=1.0)
    u_MN = out.y_MN if saved and spec.norm is None and spec.activation == "relu" else out.u_MN
    return ForwardResult(out.y_MN, handed_on, SavedBlock(u_MN, out.rstd_BM, x.codes_KM, x.scale_KM))


def backward_block(
    spec: BlockSpec, dy_MN: Tensor, saved: SavedBlock, x_factor: float, codes_KN: Tensor, scale_KN: Tensor,
    *, needs: GradientNeeds, x_dtype: torch.dtype, weight_dtype: torch.dtype,
) -> Gradients:  # fmt: skip
    """The gradients asked for; the bias's is float32. ``x_factor`` is the constant part of the input's scale, ``scale_KN`` the
    scale of all of the weight's transposed codes."""
    (m, n), k = dy_MN.shape, spec.in_features
    dz = block_gradient(
        dy_MN, saved.u_MN, saved.rstd_BM, spec.blocks, spec.activation,
        rows=needs.x, transposed=needs.weight, bias=needs.bias, x_factor=x_factor,
    )  # fmt: skip
    dx_MK = dw_NK = None
    if needs.weight:
        dw_NK = _weight_gradient(dz, saved, (n, k, m), weight_dtype)
    if needs.x:
        dx_MK = _product(dz.codes_MN, dz.scale_M, codes_KN, scale_KN, (m, k, n), x_dtype, promoted=is_promoted(n))
    return Gradients(dx_MK, dw_NK, dz.bias_N if needs.bias else None)


def _weight_gradient(dz: GradientCodes, saved: SavedBlock, sizes: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """dzᵀ·x of ``sizes`` (n, k, m), always summed in full: a fast sum over a batch is biased, and a bias adds up over steps."""
    n, k, m = sizes
    dz_scale, one = dz.wgrad_scales[:, :1]
    if not _is_for_cublas(dz.codes_NM, k, m):
        return gemm(dz.codes_NM, saved.x_codes_KM, dz_scale, saved.x_scale_KM, n, k, m, out_dtype=dtype, promoted=True)
    x_scale = one if saved.x_scale_KM is None else saved.x_scale_KM.reshape(1)
    return torch._scaled_mm(
        dz.codes_NM[:, :m], saved.x_codes_KM[:, :m].t(), dz_scale, x_scale, out_dtype=dtype, use_fast_accum=False
    )


def _is_for_cublas(codes: Tensor, n: int, k: int) -> bool:
    """Whether cuBLAS takes the product. For full sums it is faster than a kernel of ours, a separate pass for the norm
    included: 114 µs against 158 at 2048×8192×4096 on an H200."""
    return _has_cublas(codes) and n % 16 == 0 and k % 16 == 0


def _has_cublas(codes: Tensor) -> bool:
    return codes.is_cuda


def _product(
    a_codes: Tensor, a_scale: Tensor | None, b_codes: Tensor, b_scale: Tensor, sizes: tuple[int, int, int],
    out_dtype: torch.dtype, factor: float = 1.0, *, promoted: bool,
) -> Tensor:  # fmt: skip
    """a·bᵀ·``factor`` of ``sizes`` (m, n, k), a with a scale a row or none, b with one a row or one for all; in full where
    ``promoted``."""
    m, n, k = sizes
    if not promoted or not _is_for_cublas(a_codes, n, k):
        assert a_scale is not None
        return gemm(a_codes, b_codes, a_scale, b_scale, m, n, k, out_dtype=out_dtype, promoted=promoted, b_factor=factor)
    if a_scale is None:
        scale_m = torch.full((m, 1), factor, dtype=torch.float32, device=a_codes.device)
    else:
        scale_m = factor * a_scale.reshape(m, 1)
    scale_n = b_scale.reshape(1, -1).expand(1, n).contiguous()
    return torch._scaled_mm(a_codes[:, :k], b_codes[:, :k].t(), scale_m, scale_n, out_dtype=out_dtype, use_fast_accum=False)


def _saved_dtype(spec: BlockSpec, bias_learns: bool) -> torch.dtype | None:
    """How u is saved; None where backward needs none of it.

    Behind a norm codes are exact enough for dgrad and wgrad, whose operands are rounded to codes anyway. The gradient of a
    bias sums dz as it is, and would have an error up to 1.4 times as large: there u is bf16. Without a norm only the slope of
    the activation is needed: relu's is in y too, and hard-swish's in a u of any size, which has no constant scale.
    """
    if spec.norm is not None:
        return torch.bfloat16 if bias_learns else CODES_DTYPE
    return torch.bfloat16 if spec.activation == "hard_swish" else None


def _handed_on(out: BlockOutputs, wanted: Wanted, blocks: NormBlocks) -> InputCodes:
    """The codes that a norm's bound let the kernel write."""
    codes_MN = out.codes_MN if wanted.codes else out.u_MN
    codes_NM = out.codes_NM[:, : codes_MN.shape[0]] if wanted.transposed else out.codes_NM  # past M lies what nobody may read
    return InputCodes(codes_MN, None, codes_NM, None, blocks.code_scale)
