"""What 8 bits make of the gradient of a weight, dw = dyᵀ·x, by every FP8 recipe, on rows as they are.

The error of dw depends on how far rows cancel in it, and on values that come again and again. A distribution of single rows
says too little of both. So the error is measured on rows of real batches, by the Probe, and on drawn ones, and the difference
says how wrong drawn rows are. In a wide layer some features and outputs stand for all; in a long batch some rows do, beside the
dw of all of them. Several batches are cast and multiplied together, which ``quantize`` and ``mere_floored`` cannot; tests
compare the results with theirs, batch by batch.

Axes:  B batches,  R rows,  K in_features,  N out_features,  I some of the K,  J some of the N,  F of either,  W recipes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from loka.core.recipe import Format, Recipe, Scaling
from loka.numerics.formats import info
from loka.numerics.metrics import FLOOR
from loka.numerics.scaling import STATIC_SCALE

MOST_FEATURES, FEWEST_FEATURES = 64, 32  # of x and of dy
VALUES = 2**14  # of either, in a batch: for more, fewer features are looked at; if too many are left, the Probe skips batches
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
    """Some features of some rows of x and dy, and the largest magnitudes of all; dw of the whole batch; and how many ``times``
    as many rows the batch has."""

    x_RI: Tensor
    dy_RJ: Tensor
    x_amax: Tensor
    dy_amax: Tensor
    dw_JI: Tensor
    times: Tensor


class WgradErrors(NamedTuple):
    """By batch: ``mere_floored`` of each recipe; ``squares``, its Σ error²; ``alike``, the part of that which both halves of
    the rows have in common, and so is not by chance; and ``size``, Σ dw².

    ``mere_floored`` is that of the whole batch if errors are all by chance. Sums of squares are divided by Σ |x|²·|dy|² over
    the rows, which Σ dw² would be without products of different rows: so batches of small gradients count like others. All are
    0 where a batch has no gradient.
    """

    floored_WB: Tensor
    squares_WB: Tensor
    alike_WB: Tensor
    size_B: Tensor


def some_rows(x_RK: Tensor, dy_RN: Tensor) -> SomeRows:
    """Evenly spaced features of all rows of a batch."""
    most = features_looked_at(len(x_RK))
    x_RI, dy_RJ = (values[:, :: feature_stride(values.shape[1], most)].contiguous() for values in (x_RK, dy_RN))
    return of_batch(x_RI, dy_RJ, x_RK.abs().amax(), dy_RN.abs().amax(), None, len(x_RK))


def of_batch(x_RI: Tensor, dy_RJ: Tensor, x_amax: Tensor, dy_amax: Tensor, dw_JI: Tensor | None, batch_rows: int) -> SomeRows:
    """Some rows of a batch of ``batch_rows``; without the batch's dw they are taken for the whole batch."""
    times = torch.full_like(x_amax, 1.0 if dw_JI is None else batch_rows / len(x_RI))
    return SomeRows(x_RI, dy_RJ, x_amax, dy_amax, dy_RJ.mT @ x_RI if dw_JI is None else dw_JI, times)


def some_of_gradient(dw_NK: Tensor, most: int) -> Tensor:
    """The part of dw between the features and the outputs that are looked at, ``most`` of each; a view."""
    outputs, features = dw_NK.shape
    return dw_NK[:: feature_stride(outputs, most), :: feature_stride(features, most)]


def features_looked_at(rows: int) -> int:
    """How many features to look at, at most, with so many rows: the number of values is limited, and rows tell more."""
    return min(MOST_FEATURES, max(FEWEST_FEATURES, VALUES // max(1, rows)))


def feature_stride(features: int, most: int) -> int:
    """One feature in so many is looked at."""
    return max(1, -(-features // most))


def wgrad_errors(batches: Sequence[SomeRows]) -> WgradErrors:
    """The errors of batches of equally many rows. Nobody waits for a device, and several batches take no more operations."""
    x_BRI, dy_BRJ, x_amax_B, dy_amax_B, dw_BJI, times_B = (torch.stack(parts) for parts in zip(*batches, strict=True))
    x_unit_B11, dy_unit_B11 = _unit(x_amax_B), _unit(dy_amax_B)
    x_BRI, dy_BRJ, dw_BJI = x_BRI / x_unit_B11, dy_BRJ / dy_unit_B11, dw_BJI / x_unit_B11 / dy_unit_B11
    of_x = {
        Scaling.TENSORWISE: x_amax_B[:, None, None] / x_unit_B11,
        Scaling.STATIC: STATIC_SCALE * info(Format.E4M3).max / x_unit_B11,
    }
    of_dy = {Scaling.TENSORWISE: dy_amax_B[:, None, None] / dy_unit_B11}
    x_in = {form: _cast(x_BRI, *form, of_x) for form in {(recipe.b_format, recipe.b_scaling) for recipe in RECIPES}}
    dy_in = {form: _cast(dy_BRJ, *form, of_dy) for form in {(recipe.a_format, recipe.a_scaling) for recipe in RECIPES}}
    operands = [(dy_in[of.a_format, of.a_scaling], x_in[of.b_format, of.b_scaling]) for of in RECIPES]
    rows = x_BRI.shape[1]
    halves = [slice(0, rows // 2), slice(rows // 2, rows)]
    errors = []  # of dw over each half of the rows
    for half in halves:
        exact_BJI = dy_BRJ[:, half].mT @ x_BRI[:, half]
        errors.append(torch.stack([torch.baddbmm(exact_BJI, dy[:, half].mT, x[:, half], beta=-1) for dy, x in operands]))
    error_WBJI = errors[0] + errors[1]
    alike_WB = (errors[0] * errors[1]).sum((2, 3)) * (rows**2 / max(1, (rows // 2) * (rows - rows // 2)))
    uncancelled_B = (_norm(x_BRI, 2) * _norm(dy_BRJ, 2)).square().sum(1)
    weight_B = torch.where(uncancelled_B > 0, 1 / uncancelled_B, 0.0).double()
    return WgradErrors(
        _floored(error_WBJI * times_B.sqrt()[:, None, None], dw_BJI).double(),
        _norm(error_WBJI, (2, 3)).double().square() * weight_B,
        alike_WB.double() * weight_B,
        _norm(dw_BJI, (1, 2)).double().square() * weight_B / times_B,
    )


def _floored(error_WBJI: Tensor, dw_BJI: Tensor) -> Tensor:
    """As ``mere_floored`` with the rms of each column."""
    rms_B1I = _norm(dw_BJI, 1)[:, None] / math.sqrt(dw_BJI.shape[1])
    floor_BJI = torch.maximum(dw_BJI.abs(), FLOOR * rms_B1I)
    ratio_WBI = torch.where(rms_B1I > 0, error_WBJI.abs() / floor_BJI, 0.0).mean(2)
    return ratio_WBI.sum(2) / (rms_B1I > 0).sum((1, 2)).clamp(min=1)


def _norm(values: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    return torch.linalg.vector_norm(values, dim=dim)


def _unit(amax_B: Tensor) -> Tensor:
    """A power of two near the largest magnitude, as a unit in which squares of small gradients do not underflow in FP32."""
    _, exponent_B = torch.frexp(amax_B)
    return torch.ldexp(torch.ones_like(amax_B), exponent_B)[:, None, None]


def _cast(values_BRF: Tensor, format: Format, scaling: Scaling, covered: Mapping[Scaling, Tensor]) -> Tensor:
    """The values as their 8-bit codes give them back. ``scaling`` is that of the transposed tensor, whose rows are features.
    ``covered`` holds the magnitude that one scale for all is to cover."""
    amax, (largest, dtype) = covered.get(scaling), (info(format).max, info(format).dtype)
    amax = _amax_of_blocks(values_BRF, scaling) if amax is None else amax
    scale = torch.where(amax > 0, amax, 1.0) / largest
    codes_BRF = (values_BRF / scale).clamp_(-largest, largest).to(dtype)
    return codes_BRF.float().mul_(scale)


def _amax_of_blocks(values_BRF: Tensor, scaling: Scaling) -> Tensor:
    if scaling is Scaling.ROWWISE:
        return values_BRF.abs().amax(1, keepdim=True)
    rows = values_BRF.shape[1]
    amax_BPF = F.pad(values_BRF, (0, 0, 0, -rows % _BLOCK)).unflatten(1, (-1, _BLOCK)).abs().amax(2)
    if scaling is Scaling.BLOCK_128X128:  # the few features all lie in one block
        amax_BPF = amax_BPF.amax(2, keepdim=True)
    return amax_BPF.repeat_interleave(_BLOCK, dim=1)[:, :rows]
