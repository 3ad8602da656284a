"""The distribution of each feature by itself: its quantiles at levels that lie evenly under a normal distribution.

A row of correlated normal numbers z becomes a row of values by v = Q(Φ(z)), feature by feature: tails, zeros and values that
occur again and again are then drawn as often as they were seen. The quantiles of two batches merge into those of all their
rows, up to what lies between two levels.

Axes:  R rows,  M rows drawn,  D features,  L levels,  E = L + 1 edges of their shares,  P = 2·L points of two batches,
H Hermite coefficients.
"""

import functools
import math
from typing import TYPE_CHECKING

from loka.core.moments import Covariance, State

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LEVELS = {Covariance.FULL: 129, Covariance.BLOCKS: 129, Covariance.LOW_RANK: 33}
REACH = 3.5  # the outermost levels in standard deviations: one row in 2,100 lies beyond, and is drawn as if it lay there
HERMITE_TERMS = 12
GOLDEN = (5**0.5 - 1) / 2  # the fractional parts of its multiples fill the range from 0 to 1 evenly
_STEPS, _HALVINGS = 5, 8  # of Newton's method, and of bisection
_CHUNK = 8192  # features at a time
_FLATTEST = 0.05  # least slope of a Newton step: where features say nothing of each other, longer ones would only overshoot


def level_scores(levels: int, device: "torch.device") -> "Tensor":
    """The z of every level."""
    import torch

    return torch.linspace(-REACH, REACH, levels, dtype=torch.float32, device=device)


@functools.lru_cache(maxsize=64)
def _shares(levels: int, device: "torch.device") -> "tuple[Tensor, Tensor]":
    """Of a standard normal distribution, the share that each level stands for, and the share before it."""
    import torch

    score_L = level_scores(levels, device)
    edges = torch.special.ndtr((score_L[1:] + score_L[:-1]) / 2)
    begin_L = torch.cat([edges.new_zeros(1), edges])
    return torch.diff(begin_L, append=edges.new_ones(1)), begin_L


@functools.lru_cache(maxsize=64)
def _positions(levels: int, rows: int, device: "torch.device") -> "tuple[Tensor, Tensor, Tensor]":
    """Between which two of so many sorted rows each level lies, and how far along."""
    import torch

    probability_L = torch.special.ndtr(level_scores(levels, device))
    position_L = (probability_L * rows - 0.5).clamp(0, rows - 1)
    below_L = position_L.long()
    return below_L, (below_L + 1).clamp(max=rows - 1), (position_L - below_L)[:, None]


def quantiles_of(rows_RD: "Tensor", levels: int) -> State:
    """Every feature's quantiles over the rows."""
    import torch

    rows = rows_RD.shape[0]
    sorted_RD = _sorted(rows_RD.t().contiguous()).t()
    below_L, above_L, part_L1 = _positions(levels, rows, rows_RD.device)
    count = torch.tensor(float(rows), dtype=torch.float64, device="cpu")
    return {
        "values_LD": _between(sorted_RD[below_L], sorted_RD[above_L], part_L1),
        "count": count,
        "merges": torch.zeros_like(count),
    }


def _between(low_LD: "Tensor", high_LD: "Tensor", part_L1: "Tensor") -> "Tensor":
    """Part of the way from low to high: finite even from FP32's lowest value to its highest, exact between two equal values."""
    import torch

    return torch.where(low_LD == high_LD, low_LD, low_LD * (1 - part_L1) + high_LD * part_L1)


def merge_quantiles(a: State, b: State) -> State:
    """The quantiles of the rows of both: each level stands for the rows around it, and takes the value of one of them.

    It takes a value that was there, none in between: else zeros would become fewer from merge to merge. It takes another one
    each time, in even turns: always the middle one, and a batch much smaller than all before it would never move a level.

    For a fast sort a point says in its lowest bit whose it is, so that values lose this bit. How far the points up to one reach
    depends only on how many of them are a's and how many b's: a table that is the same for all features.
    """
    import torch

    count, merges = a["count"] + b["count"], a["merges"] + b["merges"] + 1
    levels = a["values_LD"].shape[0]
    share_L, begin_L = _shares(levels, a["values_LD"].device)
    edge_E, share_of_a = torch.cat([begin_L, begin_L.new_ones(1)]), float(a["count"] / count)
    reach_EE = share_of_a * edge_E[:, None] + (1 - share_of_a) * edge_E  # by how many points of a (rows) and b (columns)
    wanted_L = begin_L.add(share_L, alpha=float(merges) * GOLDEN % 1)
    passed_EE = torch.searchsorted(wanted_L, reach_EE, right=True)  # levels that are reached

    of_a, of_b = (state["values_LD"].nan_to_num().view(torch.int32) for state in (a, b))  # an infinity has no bit to spare
    points = torch.cat([of_a & -2, of_b | 1])
    points_DP = _sorted(points.view(torch.float32).t().contiguous()).view(torch.int32)
    steps_DP = levels + 1 - levels * (points_DP & 1)  # through ``passed_EE``: a point of a is a row further, one of b a column
    passed_DP = passed_EE.take(steps_DP.cumsum(1))
    points_DE = torch.zeros_like(passed_DP[:, : levels + 1]).scatter_add_(1, passed_DP, torch.ones_like(passed_DP))
    at_DL = points_DE.cumsum(1)[:, :levels].clamp(max=2 * levels - 1)  # the first point that reaches it
    values_DL = (points_DP.gather(1, at_DL) & -2).view(torch.float32)
    return {"values_LD": values_DL.t().contiguous(), "count": count, "merges": merges}


def fade_quantiles(state: State, factor: float) -> State:
    """The same quantiles, known from ``factor`` times as many rows."""
    return {**state, "count": state["count"] * factor}


def values_at(values_LD: "Tensor", z_MD: "Tensor") -> "Tensor":
    """Q(Φ(z)): straight lines from level to level, nothing beyond the outermost; zeros end half-way to the next level."""
    import torch

    last = values_LD.shape[0] - 1
    position_MD = (z_MD.clamp(-REACH, REACH) + REACH) * (last / (2 * REACH))
    below_MD = position_MD.long().clamp(0, last - 1)
    low_MD, high_MD = values_LD.gather(0, below_MD), values_LD.gather(0, below_MD + 1)
    part_MD = position_MD - below_MD
    part_MD = torch.where((low_MD == 0) == (high_MD == 0), part_MD, part_MD.round())
    return _between(low_MD, high_MD, part_MD)


def shifts_for(values_LD: "Tensor", mean_D: "Tensor") -> "Tensor":
    """How far to move z for draws to have these means: at most by a level, since where between two levels one value ends and
    the next begins is not known. The label of an example is such a step, and the mean gradient hangs on it."""
    import torch

    parts = zip(values_LD.split(_CHUNK, dim=1), mean_D.split(_CHUNK), strict=True)
    return torch.cat([_shifts(values_LC, mean_C) for values_LC, mean_C in parts])


def _shifts(values_LD: "Tensor", mean_D: "Tensor") -> "Tensor":
    """By bisection: the mean grows with the shift."""
    import torch

    spacing = 2 * REACH / (values_LD.shape[0] - 1)
    low_D, high_D = torch.full_like(mean_D, -spacing), torch.full_like(mean_D, spacing)
    for _ in range(_HALVINGS):
        middle_D = (low_D + high_D) / 2
        is_low_D = _mean_at(values_LD, middle_D) < mean_D
        low_D, high_D = torch.where(is_low_D, middle_D, low_D), torch.where(is_low_D, high_D, middle_D)
    return (low_D + high_D) / 2


def _mean_at(values_LD: "Tensor", shift_D: "Tensor") -> "Tensor":
    """E[Q(Φ(z + shift))] of the Q of ``values_at``: over a stretch between two levels ∫(a + b·z)·φ(z) dz = a·ΔΦ − b·Δφ, or,
    where it goes from zeros to others, a step half-way; beyond the outermost levels their own values."""
    import torch

    level_L1 = level_scores(values_LD.shape[0], values_LD.device)[:, None]
    edge_LD = level_L1 - shift_D
    share_LD, density_LD = torch.special.ndtr(edge_LD), torch.exp(-edge_LD.square() / 2) / math.sqrt(2 * math.pi)
    low, high = values_LD[:-1], values_LD[1:]
    slope = (high - low) / level_L1.diff(dim=0)
    line = (low - slope * edge_LD[:-1]) * share_LD.diff(dim=0) - slope * density_LD.diff(dim=0)
    half_way = torch.special.ndtr((edge_LD[:-1] + edge_LD[1:]) / 2)
    step = low * (half_way - share_LD[:-1]) + high * (share_LD[1:] - half_way)
    inner_D = torch.where((low == 0) == (high == 0), line, step).sum(0)
    return inner_D + values_LD[0] * share_LD[0] + values_LD[-1] * (1 - share_LD[-1])


def latent_correlation(values_LD: "Tensor", correlation_DD: "Tensor") -> "Tensor":
    """The correlation of z under which the values v = Q(Φ(z)) have ``correlation_DD``; it may be slightly indefinite.

    With v = Σ_h b_h·He_h(z)/√h!, the b of unit length, corr(v_i, v_j) = Σ_h b_ih·b_jh·ρᵢⱼʰ, solved for ρ by Newton's method.
    """
    import torch

    coefficients_HD = _hermite_coefficients(values_LD.to(correlation_DD.dtype))
    rho_DD = correlation_DD.clone()
    for _ in range(_STEPS):
        value_DD, slope_DD = torch.zeros_like(rho_DD), torch.zeros_like(rho_DD)
        power_DD = torch.ones_like(rho_DD)
        for h, b_D in enumerate(coefficients_HD, start=1):
            products_DD = b_D[:, None] * b_D
            slope_DD.addcmul_(products_DD, power_DD, value=h)
            power_DD = power_DD * rho_DD
            value_DD.addcmul_(products_DD, power_DD)
        rho_DD = (rho_DD - (value_DD - correlation_DD) / slope_DD.clamp(min=_FLATTEST)).clamp(-1, 1)
    return rho_DD.fill_diagonal_(1.0)


def _sorted(values_DR: "Tensor") -> "Tensor":
    """Each row by size. NumPy sorts ten times as fast on a CPU, and a Probe may not take more than 1 % of a step."""
    import torch

    if values_DR.device.type != "cpu":
        return values_DR.sort(dim=1).values
    import numpy as np

    return torch.from_numpy(np.sort(values_DR.numpy(), axis=1))


def _hermite_coefficients(values_LD: "Tensor") -> "Tensor":
    """b_1 … b_H of every feature, of unit length; 0 for a feature that never changes."""
    import torch

    z_G = torch.linspace(-5, 5, 401, dtype=values_LD.dtype, device=values_LD.device)
    weight_G = torch.exp(-z_G.square() / 2)
    weight_G = weight_G / weight_G.sum()
    polynomials = [torch.ones_like(z_G), z_G]
    for h in range(1, HERMITE_TERMS):
        polynomials.append(z_G * polynomials[-1] - h * polynomials[-2])
    basis_HG = torch.stack([p / math.sqrt(math.factorial(h)) for h, p in enumerate(polynomials) if h]) * weight_G
    coefficients_HD = basis_HG @ values_at(values_LD, z_G[:, None].expand(-1, values_LD.shape[1]))
    length_D = coefficients_HD.square().sum(0).sqrt()
    return torch.where(length_D > 0, coefficients_HD / length_D, 0.0)
