"""Weights over time: a planted matrix normal is recovered from independent snapshots, and what one snapshot cannot tell."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import loka
from loka.core.errors import InvalidInput
from loka.core.matrix_normal import WIDEST, draw_weight, matrix_normal_elements, merge_matrix_normals, observe_weight
from loka.core.moments import State

N, K = 12, 20


def planted(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """M, U and V with correlated rows and columns, of unequal sizes; trace(U) = N, as a learned one has."""
    generator = torch.Generator().manual_seed(seed)
    mean_NK = torch.randn(N, K, generator=generator)
    u_NN, v_KK = (_covariance(size, generator) for size in (N, K))
    return mean_NK, u_NN * N / u_NN.trace(), 0.01 * v_KK


def _covariance(size: int, generator: torch.Generator) -> Tensor:
    factor = torch.randn(size, size, generator=generator) * torch.logspace(-0.5, 0.5, size)[:, None]
    return factor @ factor.t() / size + 0.1 * torch.eye(size)


def snapshots(mean_NK: Tensor, u_NN: Tensor, v_KK: Tensor, count: int, seed: int = 1) -> Tensor:
    normal = torch.randn(count, N, K, generator=torch.Generator().manual_seed(seed))
    return mean_NK + torch.linalg.cholesky(u_NN) @ normal @ torch.linalg.cholesky(v_KK).t()


def learned(weights: Tensor, **options: float) -> State:
    state = None
    for weight_NK in weights:
        state = observe_weight(state, weight_NK, **options)
    assert state is not None
    return state


def distance(found: Tensor, true: Tensor) -> float:
    return float((found - true).norm() / true.norm())


@pytest.mark.parametrize(("decay", "bound"), [(0.999, 0.05), (0.98, 0.15)])
def test_a_planted_matrix_normal_is_recovered(decay: float, bound: float) -> None:
    mean_NK, u_NN, v_KK = planted()
    state = learned(snapshots(mean_NK, u_NN, v_KK, 500), decay=decay)
    assert distance(state["u_NN"], u_NN) < bound
    assert distance(state["v_KK"], v_KK) < bound
    assert float(state["v_KK"].trace() / v_KK.trace()) == pytest.approx(1, abs=bound)
    assert distance(state["mean_NK"], mean_NK) < 0.05
    assert float(state["u_NN"].trace()) == pytest.approx(N, rel=1e-5)


def test_a_jump_past_what_fp32_can_hold_is_passed_over() -> None:
    """Of a run that diverges: its spread, a square, would be infinite, and every snapshot behind it would ask for its root."""
    mean_NK, u_NN, v_KK = planted()
    weights = snapshots(mean_NK, u_NN, v_KK, 6)
    state = learned(torch.cat([weights[:3], weights[:1] + 1e25, weights[3:]]))
    expected = learned(weights)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_a_spread_that_is_no_covariance_is_refused() -> None:
    state = learned(snapshots(*planted(), 3))
    with pytest.raises(InvalidInput, match="is no covariance"):
        draw_weight({**state, "v_KK": torch.full_like(state["v_KK"], torch.nan)}, torch.Generator())


def test_two_snapshots_tell_the_spread_of_one_and_not_of_their_difference() -> None:
    """Of weights that are independent, whose difference has twice the variance."""
    spreads = []
    for seed in range(40):
        first, second = 0.1 * torch.randn(2, N, K, generator=torch.Generator().manual_seed(seed))
        state = observe_weight(observe_weight(None, first), second)
        spreads.append(float(state["u_NN"].trace() / N * state["v_KK"].trace() / K))
    assert sum(spreads) / len(spreads) == pytest.approx(0.01, rel=0.2)  # smoothed from few


def test_draws_have_the_covariance_that_was_learned() -> None:
    mean_NK, u_NN, v_KK = planted()
    state = learned(snapshots(mean_NK, u_NN, v_KK, 50))
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([draw_weight(state, generator) for _ in range(3000)]).double() - state["mean_NK"].double()
    rows_NN = torch.einsum("snk,smk->nm", draws, draws) / len(draws)
    assert distance(rows_NN, state["u_NN"].double() * state["v_KK"].double().trace()) < 0.05


def test_the_newest_snapshots_count_most() -> None:
    """A weight that jumped: an average over all would stand halfway."""
    weights = torch.cat([torch.zeros(200, N, K), torch.ones(200, N, K)]) + 0.01 * torch.randn(400, N, K)
    assert float(learned(weights)["mean_NK"].mean()) == pytest.approx(1 - 0.98**200, abs=0.01)


def test_one_snapshot_and_a_frozen_weight_have_no_spread() -> None:
    weight_NK = torch.randn(N, K)
    for count in (1, 5):
        state = learned(weight_NK.expand(count, N, K))
        assert not state["v_KK"].any()
        assert torch.equal(draw_weight(state, torch.Generator()), weight_NK)


def test_few_snapshots_of_a_long_weight_stay_finite() -> None:
    """Fewer numbers than U has: what is not known yet must not blow up V."""
    state = learned(torch.randn(6, 64, 2))
    assert all(tensor.isfinite().all() for tensor in state.values())
    assert float(state["v_KK"].trace()) < 2 * 10


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_snapshot_that_is_not_finite_teaches_nothing(value: float) -> None:
    known = learned(snapshots(*planted(), 5))
    broken_NK = torch.ones(N, K).fill_diagonal_(value)
    assert observe_weight(known, broken_NK) is known
    assert observe_weight(None, broken_NK) is None


def test_a_merge_averages_by_the_number_of_snapshots() -> None:
    mean_NK, u_NN, v_KK = planted()
    a, b = (learned(snapshots(mean_NK, u_NN, v_KK, count, seed=count), decay=0.999) for count in (300, 100))
    merged = merge_matrix_normals(a, b)
    assert merged["count"] == 400
    torch.testing.assert_close(merged["v_KK"], 0.75 * a["v_KK"] + 0.25 * b["v_KK"])


def test_a_probe_follows_weights_when_asked(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, WIDEST + 1, bias=False))
    probe = loka.Probe(model, every=1, weights_over_time=True)
    plain = loka.Probe(model, every=1)
    assert probe.memory.bytes - plain.memory.bytes == 4 * matrix_normal_elements(6, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = []
    for _ in range(5):
        weights.append(model[0].weight.detach().clone())
        with probe.step(), plain.step():
            model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
    record = probe.record()
    assert torch.equal(record.sites["0"].statistics["weights"].tensors["mean_NK"], learned(torch.stack(weights))["mean_NK"])
    assert not record.sites["0"].statistics["weights"].is_exact
    assert record.sites["0"].statistics["moments"].is_exact
    assert f"wider than {WIDEST}: its weight is not followed over time" in record.sites["1"].notes
    record.save(tmp_path)
    loaded = loka.Record.load(tmp_path).sites["0"]
    drawn, again = (site.sample_weight(torch.Generator().manual_seed(3)) for site in (loaded, record.sites["0"]))
    assert drawn.shape == (6, 8)
    assert torch.equal(drawn, again)
    with pytest.raises(InvalidInput, match="the weights of site 0 over time: probe with weights_over_time=True"):
        plain.record().sites["0"].sample_weight(torch.Generator())


@pytest.mark.parametrize("variance", [1e-8, 1.0, 1e8])
def test_weights_of_any_size_are_drawn_as_far_apart_as_they_are(variance: float) -> None:
    state = {"mean_NK": torch.zeros(4, 3), "u_NN": torch.eye(4), "v_KK": variance * torch.eye(3)}
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([draw_weight(state, generator) for _ in range(400)])
    assert drawn.double().square().mean().item() == pytest.approx(variance, rel=0.1)
