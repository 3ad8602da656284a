"""Rows that are drawn are like those that were learned from: planted cases, each with what a covariance alone would miss."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from loka.core.gradient_rows import reference_of
from loka.core.moments import Covariance
from loka.core.sampling import Sampler, make_sampler
from loka.core.statistics import Statistic
from loka.probe.statistics.contract import Rows, observe

Planted = Callable[[torch.Generator], tuple[Tensor, Tensor]]
K, N, ROWS = 24, 16, 512


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def learned(planted: Planted, form: Covariance = Covariance.FULL, batches: int = 16) -> dict[str, Statistic]:
    generator = torch.Generator().manual_seed(0)
    statistics: dict[str, Statistic] = {}
    reference_N = None
    for _ in range(batches):
        x_MK, dy_MN = planted(generator)
        reference_N = reference_of(dy_MN) if reference_N is None else reference_N
        new = observe(Rows(x_MK[:256], dy_MN[:256], form, len(x_MK), dy_MN.t() @ x_MK, reference_N))
        statistics = {name: statistics[name].merge(s) if name in statistics else s for name, s in new.items()}
    return statistics


def sampler_of(planted: Planted, weight_NK: Tensor | None = None, form: Covariance = Covariance.FULL) -> Sampler:
    return make_sampler(learned(planted, form), K, torch.ones(N, K) if weight_NK is None else weight_NK)


def drawn(sampler: Sampler, rows: int = 8192) -> tuple[Tensor, Tensor]:
    x_MK, dy_MN = sampler.draw(rows, torch.Generator().manual_seed(1))
    assert dy_MN is not None
    return x_MK, dy_MN


def after_a_relu(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return normal(generator, ROWS, K).relu(), normal(generator, ROWS, N) * (normal(generator, ROWS, N) > 0)


@pytest.mark.parametrize("form", list(Covariance))
def test_zeros_are_drawn_as_zeros(form: Covariance) -> None:
    x_MK, dy_MN = drawn(sampler_of(after_a_relu, form=form))
    for values in (x_MK, dy_MN):
        assert float((values == 0).double().mean()) == pytest.approx(0.5, abs=0.06 if form is Covariance.LOW_RANK else 0.03)
    assert (x_MK >= 0).all()


def two_labels(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Errors of 0.1 and −0.9 times one direction: a normal dy would be around 0, where no row is."""
    error_M1 = torch.where(torch.rand(ROWS, 1, generator=generator) < 0.1, -0.9, 0.1)
    return normal(generator, ROWS, K), error_M1 * torch.linspace(-1, 2, N)


def test_the_two_labels_stay_apart() -> None:
    _, dy_MN = drawn(sampler_of(two_labels))
    last_M = dy_MN[:, -1] / 2
    near = ((last_M - 0.1).abs() < 0.02) | ((last_M + 0.9).abs() < 0.1)
    assert float(near.double().mean()) > 0.98
    assert float((last_M < -0.5).double().mean()) == pytest.approx(0.1, abs=0.02)
    cosine_M = torch.nn.functional.cosine_similarity(dy_MN, torch.linspace(-1, 2, N)[None].expand_as(dy_MN)).abs()
    assert float(cosine_M.min()) > 0.999


def long_and_short_rows(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Lengths over e^±4; the few long ones point elsewhere than the many short."""
    length_M1 = torch.exp(2 * normal(generator, ROWS, 1))
    usual_MN = torch.ones(N) + 0.3 * normal(generator, ROWS, N)
    rare_MN = torch.linspace(-3, 3, N) + 0.3 * normal(generator, ROWS, N)
    return normal(generator, ROWS, K), length_M1 * torch.where(length_M1 > 10, rare_MN, usual_MN)


def test_every_row_counts_alike_however_short() -> None:
    """The usual direction is that of most rows, not of those that rule the covariance."""
    _, dy_MN = drawn(sampler_of(long_and_short_rows))
    cosine_M = torch.nn.functional.cosine_similarity(dy_MN, torch.ones_like(dy_MN)).abs()
    assert float(cosine_M.median()) > 0.85
    size_M = dy_MN.abs().mean(1).log()
    assert float(size_M.std()) == pytest.approx(2.0, rel=0.2)


def coherent(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """dy has a part that is a product of two features: no covariance of x and dy shows it, dw does."""
    x_MK = normal(generator, ROWS, K) + 1
    return x_MK, 0.02 * (x_MK[:, :1] * x_MK[:, 1:2]) * torch.linspace(0.5, 1, N) + 0.1 * normal(generator, ROWS, N)


def test_the_gradient_of_the_weight_is_that_which_was_seen() -> None:
    x_MK, dy_MN = drawn(sampler_of(coherent))
    generator = torch.Generator().manual_seed(9)
    parts = [coherent(generator) for _ in range(64)]
    true_NK = sum(dy_MN.t() @ x_MK for x_MK, dy_MN in parts) / (64 * ROWS)
    found_NK = dy_MN.t() @ x_MK / len(x_MK)
    assert (found_NK - true_NK).norm() < 0.2 * true_NK.norm()


def cancelling(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Heavy-tailed features, of which pairs are nearly equal, under weights that take their difference."""
    shared_MK = normal(generator, ROWS, K // 2).pow(3)
    x_MK = torch.cat([shared_MK, shared_MK + 0.01 * normal(generator, ROWS, K // 2)], dim=1)
    return x_MK, normal(generator, ROWS, N)


def test_what_cancels_in_the_output_cancels_in_draws() -> None:
    weight_NK = torch.randn(N, K // 2, generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    weight_NK[:, K // 2 :] *= -1
    x_MK, _ = drawn(sampler_of(cancelling, weight_NK))
    true_MK, _ = cancelling(torch.Generator().manual_seed(5))
    output, true_output = ((x @ weight_NK.t()).square().mean().sqrt() for x in (x_MK, true_MK))
    assert float(output) == pytest.approx(float(true_output), rel=0.15)


def test_tiny_gradients_keep_their_size() -> None:
    def tiny(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x_MK, dy_MN = long_and_short_rows(generator)
        return x_MK, 1e-12 * dy_MN

    _, dy_MN = drawn(sampler_of(tiny))
    assert float(dy_MN.abs().mean(1).log().mean()) == pytest.approx(float(torch.tensor(1e-12).log()), abs=0.5)


def test_values_whose_squares_leave_fp32_are_drawn_all_the_same() -> None:
    """A 64-bit hash given as a number, say."""
    x_RK = torch.randn(256, K, generator=torch.Generator().manual_seed(0))
    x_RK[:, :2] = 1e19 * x_RK[:, :1]
    sampler = make_sampler(observe(Rows(x_RK, None, Covariance.FULL, 256)), K, torch.ones(N, K))
    x_MK, _ = sampler.draw(4096, torch.Generator().manual_seed(1))
    torch.testing.assert_close(x_MK.abs().median(0).values, x_RK.abs().median(0).values, rtol=0.2, atol=0)


def test_without_gradients_x_alone_is_drawn_and_the_same_seed_gives_the_same() -> None:
    rows = Rows(torch.randn(256, K), None, Covariance.FULL, 256)
    sampler = make_sampler(observe(rows), K, torch.ones(N, K))
    x_MK, dy_MN = sampler.draw(100, torch.Generator().manual_seed(3))
    assert x_MK.shape == (100, K)
    assert dy_MN is None
    assert torch.equal(x_MK, sampler.draw(100, torch.Generator().manual_seed(3))[0])


@pytest.mark.parametrize("masked", [0.0, 0.5, 0.9])
def test_masked_examples_are_drawn_as_often_as_they_were_and_the_others_whole(masked: float) -> None:
    """Their gradient is 0, which is said once: drawn for e and for u apart, half of the rest would be lost too."""

    def planted(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x_MK, error_M1 = normal(generator, ROWS, K), normal(generator, ROWS, 1)
        dy_MN = error_M1 * (1 + 0.3 * normal(generator, ROWS, N))
        return x_MK, dy_MN * (torch.rand((ROWS, 1), generator=generator) >= masked)

    _, dy_MN = drawn(sampler_of(planted), 20_000)
    assert (dy_MN == 0).all(1).double().mean() == pytest.approx(masked, abs=0.05)
    assert dy_MN.square().mean() == pytest.approx(1.09 * (1 - masked), rel=0.15)
    live_MN = dy_MN[dy_MN.any(1)]
    assert (live_MN == 0).double().mean() < 0.02


def turning(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Where a row points turns with a feature, one way for either sign of its error: neither u nor e goes with x, dw does."""
    x_MK, error_M1 = normal(generator, ROWS, K), normal(generator, ROWS, 1)
    aside_N = torch.tensor([1.0, -1.0]).repeat(N // 2)
    return x_MK, error_M1 * (1 + 0.5 * error_M1.sign() * x_MK[:, :1] * aside_N)


def test_a_gradient_that_no_covariance_knows_of_is_made_up_for() -> None:
    x_MK, dy_MN = drawn(sampler_of(turning), 32_768)
    generator = torch.Generator().manual_seed(9)
    true_NK = sum(dy.t() @ x for x, dy in (turning(generator) for _ in range(64))) / (64 * ROWS)
    assert true_NK[:, 0].abs().min() > 0.3  # ½·E|e|·E[x²]; of every other feature next to nothing
    assert (dy_MN.t() @ x_MK / len(x_MK) - true_NK).norm() < 0.3 * true_NK.norm()


def test_it_is_made_up_for_in_turns_where_outputs_without_a_gradient_take_none_of_it() -> None:
    """Three in four are 0, as behind a ReLU: each correction comes to a quarter of what is missing."""

    def masked(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x_MK, dy_MN = turning(generator)
        return x_MK, dy_MN * (torch.rand(dy_MN.shape, generator=generator) < 0.25)

    x_MK, dy_MN = drawn(sampler_of(masked), 32_768)
    generator = torch.Generator().manual_seed(9)
    true_NK = sum(dy.t() @ x for x, dy in (masked(generator) for _ in range(64))) / (64 * ROWS)
    assert (dy_MN.t() @ x_MK / len(x_MK) - true_NK).norm() < 0.65 * true_NK.norm()


def test_what_is_small_beside_the_gradient_of_one_step_is_not_made_up_for() -> None:
    """Of eight rows a step: a gradient that is wrong by a tenth of what chance makes of it there does no harm."""

    def barely_turning(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x_MK, error_M1 = normal(generator, 8, K), normal(generator, 8, 1)
        aside_N = torch.tensor([1.0, -1.0]).repeat(N // 2)
        return x_MK, error_M1 * (1 + 0.15 * error_M1.sign() * x_MK[:, :1] * aside_N)

    assert make_sampler(learned(barely_turning, batches=1024), K, torch.ones(N, K)).pull_KN is None


@pytest.mark.parametrize("share", [0.2, 0.45])
def test_a_feature_of_two_values_has_its_mean(share: float) -> None:
    """Between two levels it is not known where one value ends: the mean says."""

    def planted(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x_MK = (torch.rand((ROWS, K), generator=generator) < share).float()
        return x_MK, normal(generator, ROWS, N)

    statistics = learned(planted, batches=40)
    mean_K = statistics["moments"].tensors["mean_D"][:K]
    x_MK, _ = make_sampler(statistics, K, torch.ones(N, K)).draw(200_000, torch.Generator().manual_seed(1))
    torch.testing.assert_close(x_MK.mean(0), mean_K, rtol=0.04, atol=0)
