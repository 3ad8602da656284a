"""What 8 bits make of a layer's output, y = x·wᵀ, by every recipe, on rows as they are.

The distributions of single features, and how features go together, do not say all about rows: in a row that is small as a
whole, every feature is small. So the error is measured on real rows, by the Probe, and on drawn ones, and the difference says
how wrong drawn rows are. Some rows and some outputs stand for all; features are all looked at, since what counts is how they
cancel.

Axes:  R rows,  S some of them,  K in_features,  N out_features,  J some of the N,  W recipes.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from loka.core.marginals import GOLDEN
from loka.core.recipe import Format, Recipe, Scaling
from loka.numerics.formats import info
from loka.numerics.metrics import FLOOR
from loka.numerics.scaling import STATIC_SCALE, amax, expand_scale, scale_from_amax

MOST_OUTPUTS = 32
MOST_ROWS, FEWEST_ROWS = 64, 4
MOST_VALUES = 2**19  # of x: in wide layers fewer rows are looked at

RECIPES = (
    Recipe(Format.E4M3, Scaling.TENSORWISE, Format.E4M3, Scaling.TENSORWISE),
    Recipe(Format.E4M3, Scaling.ROWWISE, Format.E4M3, Scaling.ROWWISE),
    Recipe(Format.E4M3, Scaling.BLOCK_1X128, Format.E4M3, Scaling.BLOCK_128X128),
    Recipe(Format.E4M3, Scaling.STATIC, Format.E4M3, Scaling.TENSORWISE),
    Recipe(Format.E4M3, Scaling.STATIC, Format.E4M3, Scaling.ROWWISE),
    Recipe(Format.INT8, Scaling.TENSORWISE, Format.INT8, Scaling.TENSORWISE),
    Recipe(Format.INT8, Scaling.TENSORWISE, Format.INT8, Scaling.ROWWISE),
    Recipe(Format.INT8, Scaling.ROWWISE, Format.INT8, Scaling.ROWWISE),
)


class FpropErrors(NamedTuple):
    """For each recipe its ``mere_floored`` and Σ error²; and Σ y²."""

    floored_W: Tensor
    squares_W: Tensor
    size: Tensor


def some_outputs(weight_NK: Tensor) -> Tensor:
    """A copy of evenly spaced rows of a weight, to stand for all."""
    return weight_NK[:: -(-len(weight_NK) // MOST_OUTPUTS)].float().clone()


def which_rows(x_RK: Tensor, look: int) -> Tensor:
    """Indices of some rows to stand for all, others at every ``look``. They are spread, but not evenly: rows of one example lie
    together, and every sixteenth row may be of one kind."""
    rows, some = len(x_RK), max(FEWEST_ROWS, min(MOST_ROWS, MOST_VALUES // x_RK.shape[1]))
    if rows <= some:
        return torch.arange(rows, device=x_RK.device)
    place_S = torch.arange(look * some, (look + 1) * some, dtype=torch.float64, device=x_RK.device) * GOLDEN % 1
    return (place_S * rows).long()


def fprop_errors(x_RK: Tensor, x_amax: Tensor, weight_JK: Tensor, w_amax: Tensor) -> FpropErrors:
    """The errors of y on these rows and outputs. One scale for all has to cover ``x_amax`` and ``w_amax``, the largest
    magnitudes of the whole batch and the whole weight. ``x_amax`` may be R×1, one a row, where rows are of several calls."""
    x_in = {form: _cast(x_RK, *form, x_amax) for form in {(of.a_format, of.a_scaling) for of in RECIPES}}
    w_in = {form: _cast(weight_JK, *form, w_amax) for form in {(of.b_format, of.b_scaling) for of in RECIPES}}
    y_RJ = x_RK @ weight_JK.mT
    outs_WRJ = torch.stack([x_in[of.a_format, of.a_scaling] @ w_in[of.b_format, of.b_scaling].mT for of in RECIPES])
    error_WRJ = (outs_WRJ - y_RJ).abs_()
    return FpropErrors(_floored(error_WRJ, y_RJ), _squares(error_WRJ, (1, 2)), _squares(y_RJ, (0, 1)))


def _floored(error_WRJ: Tensor, y_RJ: Tensor) -> Tensor:
    """As ``mere_floored`` with the rms of each row."""
    rms_R1 = torch.linalg.vector_norm(y_RJ, dim=1, keepdim=True, dtype=torch.float64) / math.sqrt(y_RJ.shape[1])
    ratio_WRJ = torch.where(rms_R1 > 0, error_WRJ / torch.maximum(y_RJ.abs(), FLOOR * rms_R1), 0.0)
    return ratio_WRJ.mean(2).sum(1) / (rms_R1 > 0).sum().clamp(min=1)


def _squares(values: Tensor, dim: tuple[int, int]) -> Tensor:
    return torch.linalg.vector_norm(values, dim=dim, dtype=torch.float64).square()


def _cast(values: Tensor, format: Format, scaling: Scaling, amax_of_all: Tensor) -> Tensor:
    """The values as their 8-bit codes give them back."""
    largest, dtype = info(format).max, info(format).dtype
    if scaling is Scaling.STATIC:
        scale = torch.full_like(amax_of_all, STATIC_SCALE)
    elif scaling is Scaling.TENSORWISE:
        scale = scale_from_amax(amax_of_all, format)
    else:
        scale = expand_scale(scale_from_amax(amax(values, scaling), format), scaling, values.shape)
    codes = (values / scale).clamp_(-largest, largest)
    codes = codes.round_() if format is Format.INT8 else codes.to(dtype).float()
    return codes.mul_(scale)
