"""Quantiles of features, merged from batches, and the normal numbers behind correlated values that are not normal."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loka.core.latent import _quick_factor, latent_of
from loka.core.marginals import (
    GOLDEN,
    REACH,
    _mean_at,
    fade_quantiles,
    latent_correlation,
    level_scores,
    merge_quantiles,
    quantiles_of,
    values_at,
)
from loka.core.moments import Covariance, moments_of

LEVELS = 129


def test_quantiles_of_a_planted_distribution() -> None:
    """Of an exponential one, Q(p) = −ln(1 − p)."""
    state = quantiles_of(torch.empty(100_000, 2).exponential_(), LEVELS)
    wanted_L = -torch.log1p(-torch.special.ndtr(level_scores(LEVELS, torch.device("cpu"))))
    torch.testing.assert_close(state["values_LD"][8:-8, 0], wanted_L[8:-8], rtol=0.05, atol=0.01)


@pytest.mark.parametrize("rows", [1, 2, 7, 256])
def test_quantiles_of_few_rows_lie_where_each_stands_for_as_much_on_either_side(rows: int) -> None:
    """Numpy calls that Hazen's."""
    rows_RD = torch.randn(rows, 3)
    probability_L = torch.special.ndtr(level_scores(LEVELS, torch.device("cpu"))).double().numpy()
    expected_LD = torch.from_numpy(np.quantile(rows_RD.double().numpy(), probability_L, axis=0, method="hazen"))
    torch.testing.assert_close(quantiles_of(rows_RD, LEVELS)["values_LD"].double(), expected_LD, rtol=1e-4, atol=1e-4)


@given(sizes=st.lists(st.sampled_from([1, 30, 256, 1000]), min_size=2, max_size=8), seed=st.integers(0, 99))
def test_merged_quantiles_are_nearly_those_of_all_rows(sizes: list[int], seed: int) -> None:
    """Batches of different sizes and places; by the share of rows below the found value, next to the share there should be."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(size, 3, generator=generator) + 3 * torch.rand(1, generator=generator) for size in sizes]
    state = functools.reduce(merge_quantiles, [quantiles_of(part, LEVELS) for part in parts])
    rows_RD = torch.cat(parts)
    assert state["count"] == len(rows_RD)
    share_LD = (rows_RD[:, None] <= state["values_LD"]).double().mean(0)
    wanted_L = torch.special.ndtr(level_scores(LEVELS, share_LD.device))
    assert ((share_LD - wanted_L[:, None]).abs() <= 0.04 + 1.5 / len(rows_RD)).all()
    assert (state["values_LD"].diff(dim=0) >= 0).all()


@given(rows=st.tuples(st.integers(1, 300), st.integers(1, 300)), levels=st.sampled_from([3, 33, 129]), seed=st.integers(0, 99))
def test_a_merged_level_is_the_point_that_reaches_into_its_share(rows: tuple[int, int], levels: int, seed: int) -> None:
    """Points of either side, each with its side's rows by its level's share, added up in float64 in order of size: up to the
    value that a level takes they reach its place, and without that value they do not."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (quantiles_of(torch.randn(count, 3, generator=generator).relu() - 0.25, levels) for count in rows)
    merged = merge_quantiles(a, b)
    edge_E = torch.special.ndtr(torch.linspace(-REACH, REACH, 2 * levels - 1, dtype=torch.float64)[1::2])
    begin_L = torch.cat([torch.zeros(1), edge_E])
    share_L = torch.cat([edge_E, torch.ones(1)]) - begin_L
    place_L = begin_L + share_L * GOLDEN
    points_PD = torch.cat([a["values_LD"], b["values_LD"]])
    weight_P = torch.cat([share_L * rows[0], share_L * rows[1]]) / sum(rows)
    for points_P, values_L in zip(points_PD.t(), merged["values_LD"].t(), strict=True):
        near_LP = (points_P - values_L[:, None]).abs() <= 2**-22 * points_P.abs()  # a value may have lost its last bit
        assert near_LP.any(1).all()
        below_L = ((points_P < values_L[:, None]) & ~near_LP).double() @ weight_P
        up_to_L = ((points_P < values_L[:, None]) | near_LP).double() @ weight_P
        assert (below_L <= place_L + 1e-5).all()
        assert (up_to_L >= place_L - 1e-5).all()


@pytest.mark.parametrize("size", [2e38, torch.finfo(torch.float32).max, torch.inf])
def test_values_at_both_ends_of_fp32_are_merged(size: float) -> None:
    """Marks for what is missing, say; between them there is no overflow. Older Records may hold infinities."""
    ends = torch.tensor([[size], [-size]])
    state = {**quantiles_of(torch.zeros(50, 1), LEVELS), "values_LD": ends.repeat(LEVELS, 1)[:LEVELS].sort(dim=0).values}
    state = state if size == torch.inf else quantiles_of(ends.repeat(25, 1), LEVELS)
    values_LD = merge_quantiles(state, state)["values_LD"]
    assert not values_LD.isnan().any()
    assert (values_LD.abs() <= size).all()
    if size != torch.inf:
        assert values_LD[0] == pytest.approx(-size, rel=1e-6)
        assert values_LD[-1] == pytest.approx(size, rel=1e-6)


def test_draws_between_the_ends_of_fp32_are_finite() -> None:
    ends_LD = torch.tensor([[-3e38], [3e38]])
    assert values_at(ends_LD, torch.linspace(-4, 4, 9)[:, None]).flatten().tolist() == pytest.approx(
        [-3e38, *(3e38 * z / 3.5 for z in range(-3, 4)), 3e38], rel=1e-5, abs=1e32
    )


def test_merging_keeps_values_that_occur_again_and_again() -> None:
    """Zeros of 30 % to 70 % of the rows, by batch: half of all draws are exactly zero."""
    parts = [torch.rand(500, 1) * (torch.rand(500, 1) >= share) for share in (0.3, 0.5, 0.7)]
    values_LD = functools.reduce(merge_quantiles, [quantiles_of(part, LEVELS) for part in parts])["values_LD"]
    drawn_M1 = values_at(values_LD, torch.randn(20_000, 1))
    assert float((drawn_M1 == 0).double().mean()) == pytest.approx(0.5, abs=0.04)


def test_a_faded_batch_counts_for_less() -> None:
    old, new = quantiles_of(torch.zeros(100, 1), LEVELS), quantiles_of(torch.ones(100, 1), LEVELS)
    values_LD = merge_quantiles(fade_quantiles(old, 0.25), new)["values_LD"]
    assert float((values_at(values_LD, torch.randn(20_000, 1)) > 0.5).double().mean()) == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("levels", [9, LEVELS])
@pytest.mark.parametrize("shift", [-0.2, 0.0, 0.3])
def test_the_mean_of_what_is_drawn(levels: int, shift: float) -> None:
    """Of long tails, values that end half-way to zero, rare ones and labels, beside a sum over a fine grid of z."""
    z = torch.randn(20_000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = torch.stack([(1.5 * z[:, 0]).exp(), z[:, 1].relu(), (z[:, 2] > 2.3).double(), z[:, 3].sign()], dim=1)
    values_LD = quantiles_of(rows.float(), levels)["values_LD"].double()
    grid_G = torch.linspace(-8, 8, 400_001, dtype=torch.float64)
    weight_G = torch.exp(-grid_G.square() / 2) / (-grid_G.square() / 2).exp().sum()
    expected_D = weight_G @ values_at(values_LD, (grid_G + shift)[:, None].expand(-1, 4))
    torch.testing.assert_close(
        _mean_at(values_LD, torch.full((4,), shift, dtype=torch.float64)), expected_D, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("correlation", [-0.3, 0.0, 0.3, 0.8])
def test_values_drawn_have_the_correlation_asked_for(correlation: float) -> None:
    """Of a log-normal feature and one that is half zeros."""
    z = torch.randn(200_000, 2)
    values_LD = quantiles_of(torch.stack([z[:, 0].exp(), z[:, 1].relu()], dim=1), LEVELS)["values_LD"]
    wanted_DD = torch.tensor([[1.0, correlation], [correlation, 1.0]], dtype=torch.float64)
    rho = float(latent_correlation(values_LD, wanted_DD)[0, 1])
    assert abs(rho) >= abs(correlation)  # bending features weakens how they go together
    mixed = torch.stack([z[:, 0], rho * z[:, 0] + (1 - rho**2) ** 0.5 * z[:, 1]], dim=1)
    found = torch.corrcoef(values_at(values_LD, mixed).t())[0, 1]
    assert float(found) == pytest.approx(correlation, abs=0.04)


@pytest.mark.parametrize(("fade", "mean", "std"), [(0.5**0.1, 10.0, 1.0), (1.0, 5.0, 5.1)])
def test_many_small_batches_move_what_is_known(fade: float, mean: float, std: float) -> None:
    """A hundred batches around 0, then a hundred around 10: with a half-life of ten the former are forgotten, else kept."""
    generator = torch.Generator().manual_seed(0)
    state = None
    for batch in range(200):
        rows_RD = 10.0 * (batch >= 100) + torch.randn(256, 2, generator=generator)
        new = quantiles_of(rows_RD, 129)
        state = new if state is None else merge_quantiles(fade_quantiles(state, fade), new)
    assert state is not None
    drawn_MD = values_at(state["values_LD"], torch.randn(20_000, 2, generator=generator))
    assert float(drawn_MD.mean()) == pytest.approx(mean, abs=0.5)
    assert float(drawn_MD.std()) == pytest.approx(std, rel=0.1)


@pytest.mark.parametrize("correlation", [0.7, 1.0])
def test_many_features_are_drawn_as_correlated_as_they_are(correlation: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past some width by Cholesky, of a correlation that may be singular: one feature twice."""
    monkeypatch.setattr("loka.core.latent.MOST_EXACT", 3)
    z_RD = torch.randn(20_000, 4, generator=torch.Generator().manual_seed(0))
    z_RD[:, 1] = correlation * z_RD[:, 0] + (1 - correlation**2) ** 0.5 * z_RD[:, 1]
    latent = latent_of(moments_of(z_RD, Covariance.FULL), quantiles_of(z_RD, LEVELS)["values_LD"])
    drawn_MD = latent.draw(40_000, torch.Generator().manual_seed(1))
    torch.testing.assert_close(torch.corrcoef(drawn_MD.t()), torch.corrcoef(z_RD.t()), rtol=0, atol=0.03)
    torch.testing.assert_close(drawn_MD.var(0), torch.ones(4), rtol=0, atol=0.05)


def test_correlations_that_do_not_fit_together_are_drawn_all_the_same() -> None:
    """Each of three features opposed to both others: no such numbers exist."""
    factor_DD = _quick_factor(torch.eye(3, dtype=torch.float64) * 1.9 - 0.9)
    assert factor_DD.isfinite().all()
    torch.testing.assert_close(factor_DD.square().sum(0), torch.ones(3))


def test_zeros_end_half_way_to_the_next_level() -> None:
    """What lies between a zero and another value was never seen: half of such draws are the one, half the other."""
    values_LD = torch.tensor([[-2.0], [0.0], [0.0], [4.0], [6.0]])
    z_M1 = torch.tensor([-2.7, -2.6, 0.8, 0.9, 1.75, 2.625, 9.0])[:, None]  # levels are at ±3.5, ±1.75 and 0
    assert values_at(values_LD, z_M1)[:, 0].tolist() == pytest.approx([-2.0, 0.0, 0.0, 4.0, 4.0, 5.0, 6.0])


def test_numbers_of_a_sketch_have_unit_variance_and_the_correlation_of_its_largest_direction() -> None:
    """A hundred features that share half of their variance: 64 directions are kept, and noise stands for the others."""
    rows_RD = torch.randn(600, 1) + torch.randn(600, 100)
    latent = latent_of(moments_of(rows_RD, Covariance.LOW_RANK), quantiles_of(rows_RD, 33)["values_LD"])
    z_MD = latent.draw(20_000, torch.Generator().manual_seed(0))
    covariance_DD = torch.cov(z_MD.t())
    torch.testing.assert_close(covariance_DD.diagonal(), torch.ones(100), rtol=0.08, atol=0)
    shared = (covariance_DD.sum() - covariance_DD.trace()) / (100 * 99)
    assert shared == pytest.approx(0.5, abs=0.05)
