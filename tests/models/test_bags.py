"""Sums over bags by our kernels, beside torch's own in FP64: values, the gradient of every id's row, and what is not read."""

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from loka.models import bags
from loka.models.bags import sum_bags


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where our kernels run: on a Hopper GPU, or interpreted."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs the package triton")
    from loka.kernels.triton.codes import INTERPRETED

    if (request.param == "cpu") != bool(INTERPRETED):
        pytest.skip("Triton interprets in one process and compiles in another: this one does the other")
    monkeypatch.setattr(bags, "missing_triton", lambda device: None)
    monkeypatch.setattr(F, "embedding_bag", lambda *_, **__: pytest.fail("by torch"))
    return torch.device(request.param)


def expected(table_RE: Tensor, rows_BN: Tensor, weight_BN: Tensor, lengths: list[int]) -> Tensor:
    weighted_BNE = table_RE.cpu().double()[rows_BN.cpu()] * weight_BN.cpu().double().unsqueeze(2)
    return torch.stack([bag_BSE.sum(1) for bag_BSE in weighted_BNE.split(lengths, dim=1)], dim=1)


def check(lengths: list[int], n_examples: int, width: int, dtype: torch.dtype, seed: int, where: torch.device) -> None:
    generator = torch.Generator().manual_seed(seed)
    n_ids, n_rows = sum(lengths), 9
    table_RE = torch.randn(n_rows, width, generator=generator).to(where, dtype).requires_grad_()
    rows_BN = torch.randint(n_rows, (n_examples, n_ids), generator=generator).to(where)
    weight_BN = torch.rand(n_examples, n_ids, generator=generator).mul(2).floor().div(2).to(where)  # half of them nothing
    first_P = torch.tensor([0, *lengths]).cumsum(0)[:-1].to(where)
    sum_BPE = sum_bags(table_RE, rows_BN, weight_BN, first_P)
    precision = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {"rtol": 1e-6, "atol": 5e-6}
    torch.testing.assert_close(
        sum_BPE.detach().cpu().double(), expected(table_RE.detach(), rows_BN, weight_BN, lengths), **precision
    )
    gradient_BPE = torch.randn(sum_BPE.shape, generator=generator).to(where, dtype)
    sum_BPE.backward(gradient_BPE)
    gradient = table_RE.grad
    assert gradient is not None
    assert gradient.is_sparse
    assert gradient.dtype is dtype
    assert torch.equal(gradient._indices()[0], rows_BN.flatten())
    bag_N = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    of_ids_BNE = gradient_BPE.cpu().double()[:, bag_N] * weight_BN.cpu().double().unsqueeze(2)
    torch.testing.assert_close(gradient._values().cpu().double(), of_ids_BNE.flatten(0, 1), **precision)


@settings(deadline=None, max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    n_examples=st.integers(0, 3),
    width=st.integers(1, 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
def test_any_bags(where: torch.device, lengths: list[int], n_examples: int, width: int, dtype: torch.dtype, seed: int) -> None:
    check(lengths, n_examples, width, dtype, seed, where)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [16, 128, 256, 500, 512])
def test_bags_of_a_batch(where: torch.device, width: int) -> None:
    check([1] * 26 + [8, 8, 32], 500, width, torch.float32, 0, where)


def test_what_counts_nothing_is_not_read(where: torch.device) -> None:
    """Padding reads a row that may be anything; torch makes NaN of zero times that."""
    table_RE = torch.tensor([[float("nan")], [2.0], [float("inf")]], device=where)
    rows_BN, weight_BN = torch.tensor([[0, 1, 2, 1]], device=where), torch.tensor([[0.0, 1.0, 0.0, 0.5]], device=where)
    assert sum_bags(table_RE, rows_BN, weight_BN, torch.tensor([0, 2], device=where)).tolist() == [[[2.0], [1.0]]]


def test_the_gradient_is_not_copied(where: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """autograd takes over what nobody else holds: a copy would be a pass over a row for every id."""
    made: list[int] = []
    inner = bags._row_gradients

    def watched(*args: Tensor) -> Tensor:
        gradient_KE = inner(*args)
        made.append(gradient_KE.data_ptr())
        return gradient_KE

    monkeypatch.setattr(bags, "_row_gradients", watched)
    table_RE = torch.randn(9, 4, device=where).requires_grad_()
    rows_BN, weight_BN = torch.randint(9, (3, 5), device=where), torch.ones(3, 5, device=where)
    sum_bags(table_RE, rows_BN, weight_BN, torch.tensor([0, 2], device=where)).square().sum().backward()
    assert table_RE.grad is not None
    assert [table_RE.grad._values().data_ptr()] == made


@pytest.mark.parametrize("table", [torch.zeros(3, 513), torch.zeros(4, 3).t()])
def test_rows_that_are_too_wide_or_have_gaps_are_torchs(table: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bags, "missing_triton", lambda device: None)
    monkeypatch.setattr(bags, "_sums", lambda *_: pytest.fail("by our kernels"))
    sum_BPE = sum_bags(table, torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3), torch.tensor([0, 1]))
    assert sum_BPE.shape == (2, 2, table.shape[1])
