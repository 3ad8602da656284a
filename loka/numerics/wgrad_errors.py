"""What 8 bits make of the gradient of a weight, dw = dyᵀ·x, by every FP8 recipe, on rows as they are.

The error of dw hangs on how far rows cancel in it, and on values that come again and again, of which a distribution of single
rows says too little. So it is measured on rows of real batches, by the Probe, and on as many drawn ones: by what these two
differ, drawn rows are wrong. Of a wide layer some features and outputs stand for all.

Axes:  B batches,  R rows,  K in_features,  N out_features,  I some of the K,  J some of the N,  F of either,  W recipes.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from loka.core.recipe import Format, Recipe, Scaling
from loka.numerics.formats import info
from loka.numerics.metrics import FLOOR
from loka.numerics.scaling import STATIC_SCALE

MOST_FEATURES = 64  # of x and of dy
MOST_ROWS = 2048
_BLOCK = 128

RECIPES = (
    Recipe(Format.E4M3, Scaling.TENSORWISE, Format.E4M3, Scaling.TENSORWISE),
    Recipe(Format.E4M3, Scaling.ROWWISE, Format.E4M3, Scaling.ROWWISE),
    Recipe(Format.E4M3, Scaling.BLOCK_1X128, Format.E4M3, Scaling.BLOCK_128X128),
    Recipe(Format.E4M3, Scaling.TENSORWISE, Format.E4M3, Scaling.STATIC),
    Recipe(Format.E5M2, Scaling.TENSORWISE, Format.E4M3, Scaling.TENSORWISE),
    Recipe(Format.E5M2, Scaling.ROWWISE, Format.E4M3, Scaling.ROWWISE),
)


class SomeRows(NamedTuple):
    """Some features of rows of x and of dy, and the largest magnitudes of all."""

    x_RI: Tensor
    dy_RJ: Tensor
    x_amax: Tensor
    dy_amax: Tensor


class WgradErrors(NamedTuple):
    """By batch: ``mere_floored`` of each recipe, its Σ error², and Σ dw². Both sums are next to what Σ dw² would be if rows did
    not cancel, so that batches of small gradients count like others; all are 0 where a batch has no gradient."""

    floored_WB: Tensor
    squares_WB: Tensor
    size_B: Tensor


def some_rows(x_RK: Tensor, dy_RN: Tensor) -> SomeRows:
    """Evenly spaced features."""
    x_RK, dy_RN = x_RK[:MOST_ROWS], dy_RN[:MOST_ROWS]
    return SomeRows(_some(x_RK), _some(dy_RN), _amax(x_RK), _amax(dy_RN))


def wgrad_errors(batches: Sequence[SomeRows]) -> WgradErrors:
    """Of batches of equally many rows. Nobody waits for a device, and for several batches it takes no more operations."""
    x_BRI, dy_BRJ, x_amax_B, dy_amax_B = (torch.stack(parts) for parts in zip(*batches, strict=True))
    x_unit_B, dy_unit_B = (torch.where(amax_B > 0, amax_B, 1.0) for amax_B in (x_amax_B, dy_amax_B))
    x_BRI, dy_BRJ = x_BRI / x_unit_B[:, None, None], dy_BRJ / dy_unit_B[:, None, None]  # squares of gradients may leave FP32
    x_of = {form: _cast(x_BRI, *form, x_unit_B) for form in {(of.b_format, of.b_scaling) for of in RECIPES}}
    dy_of = {form: _cast(dy_BRJ, *form, dy_unit_B) for form in {(of.a_format, of.a_scaling) for of in RECIPES}}
    dw_BJI = dy_BRJ.mT @ x_BRI
    errors = [
        torch.baddbmm(dw_BJI, dy_of[of.a_format, of.a_scaling].mT, x_of[of.b_format, of.b_scaling], beta=-1) for of in RECIPES
    ]
    uncancelled_B = (_norm(x_BRI, 2) * _norm(dy_BRJ, 2)).square().sum(1)
    weight_B = torch.where(uncancelled_B > 0, 1 / uncancelled_B, 0.0).double()
    return WgradErrors(
        torch.stack([_floored(error_BJI, dw_BJI) for error_BJI in errors]).double(),
        torch.stack([_norm(error_BJI, (1, 2)) for error_BJI in errors]).double().square() * weight_B,
        _norm(dw_BJI, (1, 2)).double().square() * weight_B,
    )


def _floored(error_BJI: Tensor, dw_BJI: Tensor) -> Tensor:
    """As ``mere_floored`` with the rms of each column."""
    rms_B1I = _norm(dw_BJI, 1)[:, None] / math.sqrt(dw_BJI.shape[1])
    floor_BJI = torch.maximum(dw_BJI.abs(), FLOOR * rms_B1I)
    ratio_BI = torch.where(rms_B1I > 0, error_BJI.abs() / floor_BJI, 0.0).mean(1)
    return ratio_BI.sum(1) / (rms_B1I > 0).sum((1, 2)).clamp(min=1)


def _some(values_RF: Tensor) -> Tensor:
    return values_RF[:, :: -(-values_RF.shape[1] // MOST_FEATURES)].contiguous()


def _amax(values_RF: Tensor) -> Tensor:
    return values_RF.abs().amax()


def _norm(values: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    return torch.linalg.vector_norm(values, dim=dim)


def _cast(values_BRF: Tensor, format: Format, scaling: Scaling, unit_B: Tensor) -> Tensor:
    """What 8-bit codes of the values stand for, both in units of the largest of all. ``scaling`` is that of the transposed
    tensor, whose rows are features."""
    scale = _covered(values_BRF, scaling, unit_B) / info(format).max
    codes_BRF = (values_BRF / scale).clamp(-info(format).max, info(format).max).to(info(format).dtype)
    return codes_BRF.float() * scale


def _covered(values_BRF: Tensor, scaling: Scaling, unit_B: Tensor) -> Tensor:
    """The largest magnitude that each value's scale covers."""
    if scaling is Scaling.TENSORWISE:
        return torch.ones_like(unit_B)[:, None, None]
    if scaling is Scaling.STATIC:
        return (STATIC_SCALE * info(Format.E4M3).max / unit_B)[:, None, None]
    if scaling is Scaling.ROWWISE:
        amax_BPF = values_BRF.abs().amax(1, keepdim=True)
        return torch.where(amax_BPF > 0, amax_BPF, 1.0)
    rows = values_BRF.shape[1]
    amax_BPF = F.pad(values_BRF, (0, 0, 0, -rows % _BLOCK)).unflatten(1, (-1, _BLOCK)).abs().amax(2)
    if scaling is Scaling.BLOCK_128X128:  # all of the few features lie in one
        amax_BPF = amax_BPF.amax(2, keepdim=True)
    return torch.where(amax_BPF > 0, amax_BPF, 1.0).repeat_interleave(_BLOCK, dim=1)[:, :rows]
