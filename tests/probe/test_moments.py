"""Moments that were merged are those of a two-pass computation in float64 over all rows at once."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loka.core.moments import (
    BLOCK_WIDTH,
    SKETCH_ROWS,
    Covariance,
    State,
    add_rows,
    covariance_elements,
    covariance_of,
    merge_moments,
    moments_of,
    project,
    variance_of,
)

FEATURES = BLOCK_WIDTH + 40  # two blocks, the last of them not full


def shards(sizes: list[int], spread: float, seed: int) -> list[Tensor]:
    """Correlated rows; means differ by ``spread`` deviations from shard to shard."""
    generator = torch.Generator().manual_seed(seed)
    mixing_DD = torch.randn(FEATURES, FEATURES, generator=generator) / FEATURES**0.5
    return [
        torch.randn(size, FEATURES, generator=generator) @ mixing_DD + spread * torch.randn(FEATURES, generator=generator)
        for size in sizes
    ]


def merged(parts: list[Tensor], form: Covariance) -> State:
    return functools.reduce(merge_moments, [moments_of(part, form) for part in parts])


def covariance(rows_RD: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance by two passes in float64."""
    rows_RD = rows_RD.double()
    centered_RD = rows_RD - rows_RD.mean(0)
    return rows_RD.mean(0), centered_RD.t() @ centered_RD / (len(rows_RD) - 1)


@given(
    sizes=st.lists(st.sampled_from([1, 2, 7, 300, 2000]), min_size=2, max_size=4),
    spread=st.sampled_from([0.0, 1.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_full_covariance_is_exact_for_shards_of_unequal_size_and_mean(sizes: list[int], spread: float, seed: int) -> None:
    parts = shards(sizes, spread, seed)
    state = merged(parts, Covariance.FULL)
    mean_D, true_DD = covariance(torch.cat(parts))
    deviation_D = true_DD.diagonal().sqrt()
    found_DD = state["scatter_DD"].double() / (state["count"] - 1)
    assert state["count"] == sum(sizes)
    assert ((state["mean_D"].double() - mean_D).abs() <= 1e-5 * (deviation_D + mean_D.abs())).all()
    assert ((found_DD - true_DD).abs() <= 1e-5 * torch.outer(deviation_D, deviation_D)).all()


def test_blocks_are_those_of_the_full_covariance() -> None:
    parts = shards([3, 1000, 40], spread=10.0, seed=0)
    state = merged(parts, Covariance.BLOCKS)
    _, true_DD = covariance(torch.cat(parts))
    deviation_D = true_DD.diagonal().sqrt()
    for block, start in zip(state["scatter_BWW"].double() / (state["count"] - 1), (0, BLOCK_WIDTH), strict=True):
        inside = slice(start, min(start + BLOCK_WIDTH, FEATURES))
        width = inside.stop - inside.start
        bound = 1e-5 * torch.outer(deviation_D[inside], deviation_D[inside])
        assert ((block[:width, :width] - true_DD[inside, inside]).abs() <= bound).all()
        assert not block[width:].any()


def test_a_sketch_keeps_every_variance_and_the_largest_directions() -> None:
    """Planted: directions fewer than the sketch has rows, far above a floor of noise."""
    generator = torch.Generator().manual_seed(0)
    directions = 100 * torch.randn(SKETCH_ROWS // 4, FEATURES, generator=generator)
    parts = [
        torch.randn(size, SKETCH_ROWS // 4, generator=generator) @ directions + torch.randn(size, FEATURES, generator=generator)
        for size in (500, 30, 900)
    ]
    state = merged(parts, Covariance.LOW_RANK)
    _, true_DD = covariance(torch.cat(parts))
    torch.testing.assert_close(variance_of(state).double(), true_DD.diagonal(), rtol=1e-5, atol=0)
    found_DD = state["sketch_LD"].double().t() @ state["sketch_LD"].double() / (state["count"] - 1)
    assert (found_DD - true_DD).norm() <= 1e-3 * true_DD.norm()
    assert state["sketch_LD"].shape == (SKETCH_ROWS, FEATURES)


@pytest.mark.parametrize("form", list(Covariance))
def test_a_variance_never_turns_negative(form: Covariance) -> None:
    """Constant features far from zero, in shards of one row: what a difference of sums of squares would get wrong."""
    parts = [torch.full((1, FEATURES), 1000.0) for _ in range(5)]
    assert (variance_of(merged(parts, form)) == 0).all()


@given(
    sizes=st.lists(st.sampled_from([1, 2, 7, 300, 2000]), min_size=2, max_size=4),
    spread=st.sampled_from([0.0, 1.0, 30.0]),
    seed=st.integers(0, 99),
    form=st.sampled_from([Covariance.FULL, Covariance.BLOCKS]),
    fade=st.sampled_from([1.0, 0.9, 0.25]),
)
def test_rows_added_are_rows_merged(sizes: list[int], spread: float, seed: int, form: Covariance, fade: float) -> None:
    """Against weighted sums in float64 by two passes, every row weighted by what it has faded to."""
    parts = shards(sizes, spread, seed)
    state = functools.reduce(lambda state, part: add_rows(state, part, fade), parts[1:], moments_of(parts[0], form))
    weight_R = torch.cat([torch.full((len(part),), fade**age) for age, part in enumerate(reversed(parts))][::-1]).double()
    rows_RD = torch.cat(parts).double()
    mean_D = (weight_R @ rows_RD) / weight_R.sum()
    scatter_DD = (rows_RD - mean_D).t() @ ((rows_RD - mean_D) * weight_R[:, None])
    size_D = scatter_DD.diagonal().sqrt()
    found_DD = state["scatter_DD"] if form is Covariance.FULL else torch.block_diag(*state["scatter_BWW"])
    true_DD = scatter_DD if form is Covariance.FULL else _only_blocks(scatter_DD)
    torch.testing.assert_close(float(state["count"]), float(weight_R.sum()))
    assert ((state["mean_D"].double() - mean_D).abs() <= 1e-5 * (size_D + mean_D.abs())).all()
    assert ((found_DD[:FEATURES, :FEATURES].double() - true_DD).abs() <= 2e-5 * torch.outer(size_D, size_D)).all()


def _only_blocks(scatter_DD: Tensor) -> Tensor:
    block_D = torch.arange(FEATURES) // BLOCK_WIDTH
    return scatter_DD * (block_D[:, None] == block_D)


def test_rows_added_to_a_sketch_keep_every_variance() -> None:
    first, second = shards([400, 100], spread=3.0, seed=1)
    state = add_rows(moments_of(first, Covariance.LOW_RANK), second, fade=0.25)
    weight_R = torch.cat([torch.full((400,), 0.25), torch.ones(100)]).double()
    rows_RD = torch.cat([first, second]).double()
    mean_D = (weight_R @ rows_RD) / weight_R.sum()
    true_D = weight_R @ (rows_RD - mean_D).square() / (weight_R.sum() - 1)
    torch.testing.assert_close(variance_of(state).double(), true_D, rtol=1e-5, atol=0)
    assert covariance_of(state) is Covariance.LOW_RANK
    assert state["sketch_LD"].shape == (SKETCH_ROWS, FEATURES)


@pytest.mark.parametrize("form", list(Covariance))
def test_the_memory_that_is_promised_is_what_it_takes(form: Covariance) -> None:
    state = moments_of(torch.randn(2 * SKETCH_ROWS, FEATURES), form)
    taken = sum(tensor.numel() for name, tensor in state.items() if name not in ("count", "mean_D"))
    assert taken == covariance_elements(form, FEATURES)


def test_a_sketch_fades_with_the_variances_it_is_of() -> None:
    """So few rows that it holds them all: its Gram matrix is the scatter."""
    first, second = shards([20, 20], spread=3.0, seed=1)
    state = add_rows(moments_of(first, Covariance.LOW_RANK), second, fade=0.1)
    exact = add_rows(moments_of(first, Covariance.FULL), second, fade=0.1)
    gram_DD = state["sketch_LD"].t() @ state["sketch_LD"]
    torch.testing.assert_close(gram_DD, exact["scatter_DD"], rtol=1e-3, atol=1e-3 * float(exact["scatter_DD"].abs().max()))


def test_what_a_sketch_does_not_hold_is_in_the_variance_of_an_output() -> None:
    """Features of equal variance and no directions: of so many the sketch holds a part."""
    rows_RD = torch.randn(4 * FEATURES, FEATURES, generator=torch.Generator().manual_seed(0))
    state = moments_of(rows_RD, Covariance.LOW_RANK)
    _, variance_J = project(state, torch.eye(FEATURES)[:10])
    torch.testing.assert_close(variance_J, variance_of(state)[:10], rtol=1e-4, atol=0)
