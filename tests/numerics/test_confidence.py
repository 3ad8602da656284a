import math
import random

import pytest

from loka.core.errors import InvalidInput
from loka.numerics.confidence import estimate_mean, t_quantile


@pytest.mark.parametrize(
    ("confidence", "dof", "tabulated"),  # two-sided, as printed in statistical tables
    [
        (0.95, 1, 12.706),
        (0.95, 2, 4.303),
        (0.95, 3, 3.182),
        (0.95, 4, 2.776),
        (0.95, 9, 2.262),
        (0.95, 10, 2.228),
        (0.95, 29, 2.045),
        (0.95, 30, 2.042),
        (0.95, 120, 1.980),
        (0.95, 10_000, 1.960),
        (0.90, 5, 2.015),
        (0.80, 7, 1.415),
        (0.50, 6, 0.718),
        (0.99, 2, 9.925),
        (0.99, 5, 4.032),
        (0.99, 60, 2.660),
        (0.999, 1, 636.619),
        (0.999, 4, 8.610),
    ],
)
def test_t_quantile_agrees_with_printed_tables(confidence, dof, tabulated):
    assert t_quantile(confidence, dof) == pytest.approx(tabulated, abs=6e-4)


@pytest.mark.parametrize("confidence", [0.1, 0.5, 0.95, 0.999])
def test_t_quantile_agrees_with_the_closed_forms_of_one_and_two_degrees(confidence):
    assert t_quantile(confidence, 1) == pytest.approx(math.tan(math.pi * confidence / 2), rel=1e-10)
    assert t_quantile(confidence, 2) == pytest.approx(confidence * math.sqrt(2 / (1 - confidence**2)), rel=1e-10)


def test_interval_of_a_hand_computed_sample():
    estimate = estimate_mean([1.0, 2.0, 3.0, 4.0])  # stdev √(5/3), t₃ = 3.18245
    assert estimate.mean == 2.5
    assert estimate.high - 2.5 == pytest.approx(3.18245 * math.sqrt(5 / 3) / 2, rel=1e-5)
    assert estimate.low == pytest.approx(5 - estimate.high)
    assert estimate.n == 4


@pytest.mark.parametrize(("n", "confidence"), [(2, 0.95), (5, 0.95), (5, 0.8), (20, 0.95)])
def test_the_planted_mean_is_covered_as_often_as_promised(n, confidence):
    draw = random.Random(0)
    trials = 3000
    covered = 0
    for _ in range(trials):
        estimate = estimate_mean([draw.gauss(7.0, 3.0) for _ in range(n)], confidence)
        covered += estimate.low <= 7.0 <= estimate.high
    standard_error = math.sqrt(confidence * (1 - confidence) / trials)
    assert covered / trials == pytest.approx(confidence, abs=3.5 * standard_error)


def test_one_sample_or_one_that_is_not_finite_bounds_nothing():
    assert (estimate_mean([3.0]).low, estimate_mean([3.0]).high) == (-math.inf, math.inf)
    assert estimate_mean([math.inf]).mean == math.inf
    assert math.isnan(estimate_mean([1.0, math.nan, 2.0]).mean)
    assert math.isnan(estimate_mean([math.inf, -math.inf]).mean)
    assert estimate_mean([1.0, math.inf]).high == math.inf


def test_samples_that_agree_exactly_have_no_width():
    for value in (0.1, 0.0, math.inf):
        estimate = estimate_mean([value] * 3)
        assert (estimate.mean, estimate.low, estimate.high, estimate.n) == (value, value, value, 3)


def test_bad_input_is_named():
    with pytest.raises(InvalidInput, match="no samples"):
        estimate_mean([])
    with pytest.raises(InvalidInput, match=r"got 1\.0 and 3"):
        t_quantile(1.0, 3)
    with pytest.raises(InvalidInput, match=r"got 0\.95 and 0"):
        t_quantile(0.95, 0)
