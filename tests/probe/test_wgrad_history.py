"""What a Probe notes of gradients of weights in 8 bits: of which rows, how it fades, and how it merges."""

import itertools

import pytest
import torch
from probed import probe_steps
from torch import Tensor, nn

from loka.numerics.wgrad_errors import RECIPES, SomeRows, of_batch, some_rows, wgrad_errors
from loka.probe.statistics.contract import SLOWER, STATISTICS
from loka.probe.wgrad_history import LEAST_OFTEN, TOGETHER, WgradHistory


def rows_of(rows: int, *, size: float = 1.0, outputs: int = 4) -> SomeRows:
    """Of a batch of three times as many."""
    x_MK, dy_MN = torch.randn(3 * rows, 6), size * torch.randn(3 * rows, outputs)
    return of_batch(x_MK[:rows], dy_MN[:rows], x_MK.abs().amax(), dy_MN.abs().amax(), dy_MN.t() @ x_MK, 3 * rows)


def sums_of(samples: list[SomeRows], fade: float = 1.0) -> dict[str, Tensor]:
    """One by one, the oldest first."""
    sums = dict.fromkeys(
        ("floored_W", "squares_W", "alike_W", "size", "rows", "times", "count"), torch.zeros((), dtype=torch.float64)
    )
    for sample in samples:
        errors = wgrad_errors([sample])
        new = (*(tensor[..., 0] for tensor in errors), 3.0 * len(sample.x_RI), 3.0, 1.0)
        sums = {name: fade * old + value for (name, old), value in zip(sums.items(), new, strict=True)}
    return sums


@pytest.mark.parametrize("outputs", [[4] * 6, [4, 4, 3, 3, 4, 3]])
@pytest.mark.parametrize("sizes", [[5] * 3, [5] * (2 * TOGETHER + 1), [5, 5, 7, 5, 7, 7]])
def test_sums_are_those_of_samples_one_by_one(sizes: list[int], outputs: list[int]) -> None:
    """However many wait to be looked at together, of however many rows, and outputs, of which fewer are looked at where there
    are many rows; looking in between changes nothing."""
    samples = [rows_of(size, outputs=n) for size, n in zip(sizes, itertools.cycle(outputs), strict=False)]
    history, watched = WgradHistory(), WgradHistory()
    for sample in samples:
        history.add(sample, 0.5)
        watched.add(sample, 0.5)
        watched.state()
    expected = sums_of(samples, fade=0.5**SLOWER)
    for state in (history.state(), watched.state()):
        torch.testing.assert_close(state, expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    ("rows", "features", "every"),
    [(1, 64, 1), (256, 64, 1), (300, 54, 1), (512, 32, 1), (600, 32, 2), (1024, 32, 2), (2048, 32, 4)],
)
def test_the_more_rows_the_fewer_features_and_the_more_rarely(rows: int, features: int, every: int) -> None:
    """And what comes more rarely fades by all the samples in between."""
    history, batch = WgradHistory(), some_rows(torch.randn(rows, 64), torch.randn(rows, 3))
    history.add(batch, 0.5)
    assert (history.features, history.every) == (features, every)
    history.add(batch, 0.5)
    assert float(history.state()["count"]) == pytest.approx(1 + 0.5 ** (SLOWER * every))


def test_errors_of_outputs_are_due_only_where_a_site_is_looked_at_closely() -> None:
    """Or they would lack the largest value of a call."""
    assert STATISTICS.get("fprop_errors").every % LEAST_OFTEN == 0


def test_samples_without_gradients_count_for_nothing() -> None:
    history, one = WgradHistory(), rows_of(5)
    for sample in (one, rows_of(5, size=0.0)):
        history.add(sample, 1.0)
    torch.testing.assert_close(history.state(), sums_of([one]), rtol=1e-6, atol=0.0)
    assert WgradHistory().state() == {}


def test_the_record_has_them_where_the_weight_learns() -> None:
    """Of two records merged, both; of a frozen weight, none."""
    model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    model[2].weight.requires_grad_(False)
    one, other = (probe_steps(model, lambda model: model(torch.randn(32, 12)).pow(2).sum(), steps) for steps in (3, 2))
    assert "wgrad_errors" not in one.sites["2"].statistics
    of_both = one.merge(other).sites["0"].statistics["wgrad_errors"].tensors
    parts = [record.sites["0"].statistics["wgrad_errors"].tensors for record in (one, other)]
    assert parts[0]["floored_W"].shape == (len(RECIPES),)
    for name, tensor in of_both.items():
        torch.testing.assert_close(tensor, parts[0][name] + parts[1][name])
    assert 4.5 < float(of_both["count"]) <= 5
