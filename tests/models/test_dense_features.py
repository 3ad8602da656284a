import math

import pytest
import torch

from loka.models.dense_features import DenseEmbeddings, mark_missing, symlog


def test_missing_becomes_zero_with_an_indicator() -> None:
    dense_BD = torch.tensor([[1.5, torch.nan], [torch.nan, -2.0]])
    assert mark_missing(dense_BD).tolist() == [[1.5, 0.0, 0.0, 1.0], [0.0, -2.0, 1.0, 0.0]]


def test_a_missing_value_is_not_a_zero() -> None:
    torch.manual_seed(0)
    dense = DenseEmbeddings(2, (8,), 1, 4, dropout=0.0)
    zero, missing = dense(torch.tensor([[1.0, 0.0], [1.0, torch.nan]]))
    assert not torch.allclose(zero, missing)


def test_infinity_is_not_hidden() -> None:
    assert mark_missing(torch.tensor([[torch.inf]])).tolist() == [[torch.inf, 0.0]]


@pytest.mark.parametrize("x", [-3.0, -0.5, 0.0, 1.0, 1e6])
def test_symlog_is_an_odd_logarithm(x: float) -> None:
    expected = math.copysign(math.log(1 + abs(x)), x)
    assert symlog(torch.tensor(x, dtype=torch.float64)).item() == pytest.approx(expected, rel=1e-12)
    assert symlog(torch.tensor(torch.nan)).isnan()
