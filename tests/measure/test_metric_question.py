"""The arithmetic behind the answer to the metric question: ranks with ties, and errors weighted by gradients."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "metric_question.py"


@pytest.fixture(scope="module")
def question() -> ModuleType:
    spec = importlib.util.spec_from_file_location("metric_question", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["metric_question"] = module
    spec.loader.exec_module(module)
    return module


def test_rank_correlation(question: ModuleType) -> None:
    assert question.ranks([3.0, 1.0, 3.0, 0.0]) == [2.5, 1.0, 2.5, 0.0]
    assert question.spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)  # 1 − 6·Σd²/(n(n²−1))
    assert question.spearman([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)
    assert question.spearman([1, 1, 1], [1, 2, 3]) == 0


def test_gradient_weighted_errors_sum_over_an_examples_rows(question: ModuleType) -> None:
    """A site over two tokens an example: δ and g of both rows make one product."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8, bias=True))
    x_BTK, gradient_BTN = torch.randn(5, 2, 16), torch.randn(5, 2, 8)
    with question.in_recipe(model, "0", "rowwise") as quantized:
        metrics = question.errors(quantized, [question.Call(x_BTK, gradient_BTN)])
        delta_BTN = (quantized(x_BTK) - nn.functional.linear(x_BTK, quantized.weight, quantized.bias)).detach()
    assert type(model[0]) is nn.Linear
    product_B = (gradient_BTN * delta_BTN).sum((1, 2))
    assert metrics[question.SECOND_ORDER] == pytest.approx(product_B.square().mean().item() / 2, rel=1e-3)
    expected = product_B.mean().item() + product_B.square().mean().item() / 2
    assert metrics[question.BOTH_ORDERS] == pytest.approx(expected, rel=1e-3)
