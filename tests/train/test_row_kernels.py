"""Row-wise Adagrad by our kernels, against the plain mathematics in FP64."""

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loka.train import optim
from loka.train.optim import step_rows


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> torch.device:
    return _able(request.param)


@pytest.fixture
def interpreter() -> torch.device:
    return _able("cpu")


def _able(device: str) -> torch.device:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs the package triton")
    from loka.kernels.triton.codes import INTERPRETED

    if (device == "cpu") != bool(INTERPRETED):
        pytest.skip("Triton interprets in one process and compiles in another: this one does the other")
    return torch.device(device)


def expected(
    table_RE: Tensor, sum_R: Tensor, ids_K: Tensor, gradient_KE: Tensor, lr: float, eps: float
) -> tuple[Tensor, Tensor]:
    table_RE, sum_R, gradient_KE = (tensor.detach().cpu().double().clone() for tensor in (table_RE, sum_R, gradient_KE))
    for row in ids_K.unique().tolist():
        gradient_E = gradient_KE[ids_K.cpu() == row].sum(0)
        sum_R[row] += gradient_E.square().mean()
        table_RE[row] -= lr * gradient_E / (sum_R[row].sqrt() + eps)
    return table_RE, sum_R


def check(ids_K: Tensor, n_rows: int, width: int, dtype: torch.dtype, seed: int, where: torch.device) -> None:
    generator = torch.Generator().manual_seed(seed)
    table_RE = torch.randn(n_rows, width, generator=generator).to(dtype)
    sum_R = torch.rand(n_rows, generator=generator)
    gradient_KE = torch.randn(len(ids_K), width, generator=generator).to(dtype)
    new_RE, new_R = expected(table_RE, sum_R, ids_K, gradient_KE, 0.1, 1e-8)
    given = table_RE.to(where), sum_R.to(where)
    versions = [tensor._version for tensor in given]
    step_rows(*given, ids_K.to(where), gradient_KE.to(where), 0.1, 1e-8)
    assert all(now._version > before for now, before in zip(given, versions, strict=True))
    torch.testing.assert_close(given[1].cpu().double(), new_R, rtol=1e-4, atol=1e-6)
    rtol, atol = (0.01, 0.01) if dtype is torch.bfloat16 else (1e-5, 1e-5)
    torch.testing.assert_close(given[0].cpu().double(), new_RE, rtol=rtol, atol=atol)
    untouched = torch.ones(n_rows, dtype=torch.bool).index_fill_(0, ids_K, False)
    assert torch.equal(given[0].cpu()[untouched], table_RE[untouched])


@settings(deadline=None, max_examples=15)
@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 2, 3, 31, 32, 33, 70]), min_size=1, max_size=6),
    width=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
def test_interpreted_rows(interpreter: torch.device, counts: list[int], width: int, dtype: torch.dtype, seed: int) -> None:
    ids = torch.tensor([row for row, count in enumerate([*counts, 1]) for _ in range(count)])
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]
    check(ids, len(counts) + 2, width, dtype, seed, interpreter)


@pytest.mark.parametrize("before", [0, 3, 4, 15, 16, 17])
def test_an_id_of_more_parts_and_blocks_than_are_read_at_once(
    before: int, where: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 16 places, two parts or blocks at once; it begins and ends anywhere in them."""
    monkeypatch.setattr(optim, "IDS_OF_PART", 4)
    monkeypatch.setattr(optim, "PARTS_AT_ONCE", 2)
    for hot, behind in ((7, 20), (9, 0), (16, 1), (33, 20), (48, 1), (63, 0), (100, 20)):
        ids = torch.tensor([0] * before + [1] * hot + [2] * behind)
        check(ids, 4, 5, torch.float32, hot, where)


def test_more_ids_than_a_block_has(where: torch.device) -> None:
    ids = torch.tensor([3] * 1030 + [1, 0, 4] + [2] * 2100)
    check(ids, 5, 3, torch.float32, 0, where)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [3, 16, 128, 256, 500])
def test_compiled_rows_of_a_batch_with_hot_ids(width: int) -> None:
    where, generator = _able("cuda"), torch.Generator().manual_seed(0)
    ids = (1000 * torch.rand(20_000, generator=generator) ** 8).long()
    check(ids, 1000, width, torch.float32, 0, where)
    ids[:9_000] = 17  # as padding's, one in two
    check(ids, 1000, width, torch.float32, 1, where)


@pytest.mark.gpu
def test_the_same_bits_every_time() -> None:
    where, generator = _able("cuda"), torch.Generator().manual_seed(0)
    ids = (1000 * torch.rand(20_000, generator=generator) ** 8).long().to(where)
    gradient = torch.randn(20_000, 64, generator=generator).to(where)
    runs = []
    for _ in range(5):
        table, sums = torch.ones(1000, 64, device=where), torch.zeros(1000, device=where)
        step_rows(table, sums, ids, gradient, 0.1, 1e-8)
        runs.append((table, sums))
    assert all(torch.equal(table, runs[0][0]) and torch.equal(sums, runs[0][1]) for table, sums in runs)


def test_where_an_infinity_was_found_nothing_moves(where: torch.device) -> None:
    table, sums = torch.randn(5, 8).to(where), torch.rand(5).to(where)
    before = table.clone(), sums.clone()
    ids, gradient = torch.tensor([1, 1, 3], device=where), torch.full((3, 8), float("nan"), device=where)
    step_rows(table, sums, ids, gradient, 0.1, 1e-8, torch.ones((), device=where))
    assert torch.equal(table, before[0])
    assert torch.equal(sums, before[1])
    step_rows(table, sums, ids, gradient, 0.1, 1e-8, torch.zeros((), device=where))
    assert table.isnan().any(1).nonzero().flatten().tolist() == [1, 3]
