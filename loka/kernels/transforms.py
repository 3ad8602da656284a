"""Transforms of a site: changes of its operands that make no difference in exact arithmetic, but do in 8 bits.

    center    y = (x−μ)·wᵀ + μ·wᵀ                              dw = dyᵀ·(x−μ) + (Σdy)⊗μ
    rescale   y = (x/s)·(w·s)ᵀ       dx = (dy·(w·s))/s         dw = (dyᵀ·(x/s))·s

A transform is part of a form: it is applied to the stored tensor before its cast and undone after the product, so no kernel
knows of it. A role that runs in high precision has none.
Axes:  M rows of the batch,  K in_features,  N out_features.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from loka.core.errors import InvalidInput
from loka.core.gemm import Role, TensorName
from loka.core.recipe import Transform


class TransformVectors(NamedTuple):
    """What a site's transform needs while it runs."""

    features_K: Tensor  # μ or s, from ``checked_vector``
    shift_N: Tensor | None = None  # center's μ·wᵀ, of the weight as it is now


def checked_vector(transform: Transform, vector_K: Tensor, k: int) -> Tensor:
    """``vector_K`` rounded to bf16 and kept in FP32: so it is the same vector in whatever dtype it is applied and undone."""
    if vector_K.shape != (k,):
        raise InvalidInput(f"{transform} of a site with {k} features takes a vector of as many, got {tuple(vector_K.shape)}")
    vector_K = vector_K.detach().to(torch.bfloat16).float()
    if not vector_K.isfinite().all():
        raise InvalidInput(f"{transform} takes finite values: probe the site again, its inputs were not finite")
    if transform is Transform.RESCALE and not (vector_K.frexp().mantissa == 0.5).all():
        raise InvalidInput("rescale takes positive powers of two, which change no bit of a mantissa: round them in log2")
    return vector_K


def center_shift(weight_NK: Tensor, features_K: Tensor) -> Tensor:
    """What ``center`` adds behind fprop's product, μ·wᵀ, in FP32 whatever the weight and autocast are."""
    with torch.autocast(weight_NK.device.type, enabled=False):
        return torch.mv(weight_NK.float(), features_K)


def changes(transform: Transform, name: TensorName) -> bool:
    """Whether a site's tensor enters its casts changed."""
    return transform is not Transform.NONE and (name is TensorName.X or (name, transform) == (TensorName.W, Transform.RESCALE))


def apply_to(name: TensorName, tensor: Tensor, transform: Transform, vectors: TransformVectors | None) -> Tensor:
    """The stored ``tensor`` (rows × features) as its cast shall see it."""
    if not changes(transform, name):
        return tensor
    assert vectors is not None, f"a form of {name} under {transform} needs its vector"
    features_K = _in_dtype_of(tensor, vectors.features_K)
    if transform is Transform.CENTER:
        return tensor - features_K
    return tensor / features_K if name is TensorName.X else tensor * features_K


def shifted_bias(bias_N: Tensor | None, vectors: TransformVectors, out_dtype: torch.dtype) -> Tensor:
    """A centered fprop's bias: b + μ·wᵀ."""
    assert vectors.shift_N is not None
    return (vectors.shift_N if bias_N is None else bias_N + vectors.shift_N).to(out_dtype)


def undo_behind(role: Role, out: Tensor, transform: Transform, vectors: TransformVectors, dy_sum_N: Tensor | None) -> Tensor:
    """The role's output, from the product of its changed operands. Nothing is left to undo in fprop: ``rescale`` cancels in the
    product, and what ``center`` adds back is in the bias."""
    if transform is Transform.RESCALE and role is not Role.FPROP:
        features_K = _in_dtype_of(out, vectors.features_K)
        return (out / features_K if role is Role.DGRAD else out * features_K).to(out.dtype)
    if transform is Transform.CENTER and role is Role.WGRAD:
        assert dy_sum_N is not None, "a centered wgrad needs Σdy"
        return torch.addr(out, dy_sum_N, vectors.features_K).to(out.dtype)
    return out


def _in_dtype_of(tensor: Tensor, features_K: Tensor) -> Tensor:
    """bf16 stays bf16, one pass of half the bytes; fp16 goes by way of FP32, for its range is too short for s."""
    return features_K.to(torch.bfloat16) if tensor.dtype is torch.bfloat16 else features_K
