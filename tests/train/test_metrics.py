import math
from dataclasses import astuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.train.metrics import MetricSums, base_rate_entropy


def measured(logits: list[float], labels: list[int], batch_size: int = 3):
    sums = MetricSums("cpu")
    for start in range(0, len(logits), batch_size):
        sums.add(torch.tensor(logits[start : start + batch_size]), torch.tensor(labels[start : start + batch_size]))
    return sums.metrics()


def pairwise_auc(logits: list[float], labels: list[int]) -> float:
    positives = [x for x, y in zip(logits, labels, strict=True) if y]
    negatives = [x for x, y in zip(logits, labels, strict=True) if not y]
    return sum((p > n) + 0.5 * (p == n) for p in positives for n in negatives) / (len(positives) * len(negatives))


# Logits on a coarse grid: ties abound, and distinct values never share a bin.
examples = st.lists(st.tuples(st.integers(-60, 60).map(lambda i: i / 4), st.integers(0, 1)), min_size=2, max_size=40).filter(
    lambda rows: len({y for _, y in rows}) == 2
)


@settings(deadline=None, max_examples=60)
@given(rows=examples)
def test_metrics_follow_their_definitions(rows):
    logits, labels = [x for x, _ in rows], [y for _, y in rows]
    n = len(rows)
    predictions = [1 / (1 + math.exp(-x)) for x in logits]
    log_loss = sum(math.log1p(math.exp(-x)) if y else math.log1p(math.exp(x)) for x, y in rows) / n
    rate = sum(labels) / n

    got = measured(logits, labels)
    assert got.examples == n
    assert got.log_loss == pytest.approx(log_loss, rel=1e-12)
    assert got.base_rate == pytest.approx(rate)
    assert got.ne == pytest.approx(log_loss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)), rel=1e-12)
    assert got.calibration == pytest.approx(sum(predictions) / sum(labels), rel=1e-12)
    assert got.auc == pytest.approx(pairwise_auc(logits, labels), abs=1e-12)


@pytest.mark.parametrize("scale", [0.3, 3.0, 300.0])
def test_auc_of_a_continuous_score_is_good_to_five_digits(scale):
    generator = torch.Generator().manual_seed(0)
    labels = torch.rand(3000, generator=generator) < 0.3
    logits = scale * (torch.randn(3000, generator=generator) + labels - 1)
    positives, negatives = logits[labels], logits[~labels]
    exact = (positives[:, None] > negatives).double().mean().item()
    sums = MetricSums("cpu")
    sums.add(logits, labels)
    assert sums.metrics().auc == pytest.approx(exact, abs=1e-5)


def test_extreme_logits_stay_finite_and_in_order():
    got = measured([-1e6, -200.0, 200.0, 1e6], [0, 0, 1, 1])
    assert got.auc == 1.0
    assert got.log_loss == pytest.approx(0.0, abs=1e-80)
    assert measured([200.0, -200.0], [0, 1]).log_loss == pytest.approx(200.0)


def test_predicting_the_base_rate_has_ne_one_and_is_calibrated():
    rate = 0.25
    got = measured([math.log(rate / (1 - rate))] * 8, [1, 0, 0, 0] * 2)
    assert got.ne == pytest.approx(1.0)
    assert got.calibration == pytest.approx(1.0)
    assert got.auc == 0.5
    assert base_rate_entropy(0.5) == pytest.approx(math.log(2))


def test_the_best_ne_is_that_of_the_teacher_and_unknown_without_one():
    logits, teacher, labels = torch.tensor([0.0, 0.0]), torch.tensor([-2.0, 2.0]), torch.tensor([0.0, 1.0])
    sums = MetricSums("cpu")
    sums.add(logits, labels, teacher)
    assert sums.metrics().best_ne == pytest.approx(math.log1p(math.exp(-2)) / math.log(2))
    assert sums.metrics().ne == pytest.approx(1.0)
    sums.add(logits, labels)  # on some of the examples nobody knows
    assert math.isnan(sums.metrics().best_ne)


def test_labels_all_alike_have_no_ne_and_no_auc():
    got = measured([0.0, 1.0], [0, 0])
    assert math.isnan(got.ne)
    assert math.isnan(got.auc)
    assert math.isnan(got.calibration)
    assert got.log_loss > 0


def test_merging_windows_is_the_same_as_one_long_window():
    generator = torch.Generator().manual_seed(1)
    lifetime, window, whole = MetricSums("cpu"), MetricSums("cpu"), MetricSums("cpu")
    for _ in range(3):
        logits, labels = torch.randn(50, generator=generator), torch.rand(50, generator=generator) < 0.4
        window.add(logits, labels)
        whole.add(logits, labels)
        lifetime.merge(window)
        window.reset()
    assert astuple(lifetime.metrics()) == pytest.approx(astuple(whole.metrics()), rel=1e-12, nan_ok=True)
    with pytest.raises(ValueError, match="no examples"):
        window.metrics()


def test_sums_survive_their_tensors():
    sums = MetricSums("cpu")
    sums.add(torch.tensor([0.5, -0.5]), torch.tensor([1.0, 0.0]))
    copy = MetricSums("cpu")
    copy.load({name: tensor.clone() for name, tensor in sums.tensors().items()})
    assert astuple(copy.metrics()) == pytest.approx(astuple(sums.metrics()), rel=0, abs=0, nan_ok=True)
