import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from loka.data.batch import Batch, FeatureSchema
from loka.models.embeddings import Embeddings
from loka.train.optim import (
    RowWiseAdagrad,
    learning_rate,
    make_dense_optimizer,
    named_state,
    sum_by_row,
    sum_unique_rows,
)


def sparse_gradient(ids: list[int], values_KE: Tensor, n_rows: int) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([ids]), values_KE, (n_rows, values_KE.shape[1]), check_invariants=True)


def reference(table: list[list[float]], steps: list[tuple[list[int], list[list[float]]]], lr: float, eps: float):
    """Row-wise Adagrad as a plain loop in Python's float64: gather each row's gradient, then update that row alone."""
    sums = [0.0] * len(table)
    table = [list(row) for row in table]
    for ids, values in steps:
        gradients: dict[int, list[float]] = {}
        for row, value in zip(ids, values, strict=True):
            gradients[row] = [a + b for a, b in zip(gradients.get(row, [0.0] * len(value)), value, strict=True)]
        for row, gradient in gradients.items():
            sums[row] += sum(g * g for g in gradient) / len(gradient)
            table[row] = [w - lr * g / (sums[row] ** 0.5 + eps) for w, g in zip(table[row], gradient, strict=True)]
    return table


@settings(deadline=None, max_examples=30)
@given(
    n_rows=st.integers(1, 7),
    width=st.integers(1, 5),
    id_lists=st.lists(st.lists(st.integers(0, 6), max_size=6), min_size=1, max_size=4),
    seed=st.integers(0, 2**16),
)
def test_sparse_and_dense_gradients_follow_the_plain_loop(n_rows, width, id_lists, seed):
    generator = torch.Generator().manual_seed(seed)
    start_RE = torch.randn(n_rows, width, generator=generator)
    steps = []
    for ids in id_lists:
        ids = [i % n_rows for i in ids]
        steps.append((ids, torch.randn(len(ids), width, generator=generator)))
    expected = torch.tensor(
        reference(start_RE.double().tolist(), [(i, v.double().tolist()) for i, v in steps], 0.1, 1e-8), dtype=torch.float64
    ).view(n_rows, width)

    for dense in (False, True):
        table = nn.Parameter(start_RE.clone())
        optimizer = RowWiseAdagrad([table], lr=0.1)
        for ids, values in steps:
            gradient = sparse_gradient(ids, values, n_rows)
            table.grad = gradient.to_dense() if dense else gradient
            optimizer.step()
        assert torch.allclose(table.double(), expected, atol=1e-5)


@settings(deadline=None, max_examples=50)
@given(ids=st.lists(st.integers(0, 9), max_size=40), n_rows=st.integers(10, 50), seed=st.integers(0, 2**16))
def test_every_row_has_the_sum_of_its_gradients_once(ids, n_rows, seed):
    gradient_KE = torch.randn(len(ids), 3, generator=torch.Generator().manual_seed(seed))
    expected_RE = torch.zeros(n_rows, 3, dtype=torch.float64)
    for row, gradient_E in zip(ids, gradient_KE.double(), strict=True):
        expected_RE[row] += gradient_E
    rows_K = torch.tensor(ids, dtype=torch.int64)
    spread, unique = sum_by_row(rows_K, gradient_KE, n_rows), sum_unique_rows(rows_K, gradient_KE)
    assert len(spread[0]) == len(ids)  # known without looking
    assert unique[0].tolist() == sorted(set(ids))
    for rows, sums in (spread, unique):
        touched = [row for row, total in zip(rows.tolist(), sums, strict=True) if total.any()]
        assert len(set(touched)) == len(touched)
        found_RE = torch.zeros(n_rows, 3, dtype=torch.float64).index_add_(0, rows, sums.double())
        assert torch.allclose(found_RE, expected_RE, atol=1e-5)


def test_untouched_rows_keep_every_bit():
    table = nn.Embedding(1000, 8, sparse=True)
    before = table.weight.detach().clone()
    optimizer = RowWiseAdagrad(table.parameters(), lr=0.5)
    touched = torch.tensor([3, 17, 17, 999])
    for _ in range(3):
        table(touched).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    changed = (table.weight != before).any(1)
    assert changed.nonzero().flatten().tolist() == [3, 17, 999]
    assert optimizer.state[table.weight]["sum_R"].nonzero().flatten().tolist() == [3, 17, 999]


@pytest.mark.parametrize("sparse", [True, False])
def test_a_table_in_bf16_is_trained_with_sums_in_fp32(sparse):
    table = nn.Embedding(5, 4, sparse=sparse).bfloat16()
    before = table.weight.detach().float()
    optimizer = RowWiseAdagrad(table.parameters(), lr=0.5)
    table(torch.tensor([1, 1, 3])).sum().backward()
    optimizer.step()
    moved_R = (table.weight.detach().float() - before).mean(1)
    torch.testing.assert_close(moved_R, torch.tensor([0, -0.5, 0, -0.5, 0]), atol=0.01, rtol=0)
    assert optimizer.state[table.weight]["sum_R"].tolist() == [0, 4, 0, 1, 0]


@pytest.mark.parametrize("sparse", [True, False])
def test_the_square_of_a_gradient_that_fp16_has_no_number_for_counts(sparse):
    """1e-4 squared is below fp16's smallest number: taken for 0, it would have the step divided by eps."""
    table = nn.Embedding(5, 4, sparse=sparse).half()
    before = table.weight.detach().float()
    optimizer = RowWiseAdagrad(table.parameters(), lr=0.5)
    (1e-4 * table(torch.tensor([1, 3]))).sum().backward()
    optimizer.step()
    moved_R = (table.weight.detach().float() - before).mean(1)
    torch.testing.assert_close(moved_R, torch.tensor([0, -0.5, 0, -0.5, 0]), atol=0.01, rtol=0)


@pytest.mark.parametrize("is_sparse", [True, False])
def test_found_inf_holds_both_optimizers_still(is_sparse):
    table, dense = nn.Parameter(torch.ones(4, 2)), nn.Linear(2, 2)
    rowwise, adam = RowWiseAdagrad([table], lr=0.1), make_dense_optimizer(dense, lr=0.1, weight_decay=0.1)

    def step() -> None:
        sparse = sparse_gradient([1, 2], torch.full((2, 2), gradient), 4)
        table.grad = sparse if is_sparse else sparse.to_dense()
        for parameter in dense.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        rowwise.step()
        adam.step()

    gradient = 1.0
    step()  # momentum is there now, so a step with a zero gradient would still move
    kept = [t.clone() for t in (table, *dense.parameters(), *named_state(adam, dense).values(), rowwise.state[table]["sum_R"])]
    rowwise.found_inf = adam.found_inf = torch.ones(())
    gradient = float("nan")
    step()
    now = (table, *dense.parameters(), *named_state(adam, dense).values(), rowwise.state[table]["sum_R"])
    for before, after in zip(kept, now, strict=True):
        assert torch.equal(before, after)
    rowwise.found_inf = adam.found_inf = torch.zeros(())
    gradient = 1.0
    step()
    assert not torch.equal(kept[0], table)
    assert not torch.equal(kept[1], dense.weight)


def test_weight_decay_shrinks_matrices_and_leaves_biases():
    layer = nn.Linear(3, 3)
    nn.init.ones_(layer.weight)
    nn.init.ones_(layer.bias)
    optimizer = make_dense_optimizer(layer, lr=0.1, weight_decay=0.5)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(layer.weight, torch.full((3, 3), 1 - 0.1 * 0.5))
    assert torch.equal(layer.bias, torch.ones(3))


def test_a_weight_of_more_axes_is_a_matrix_too():
    """Such as one that holds a matrix for each of several experts."""
    several = nn.ParameterList([nn.Parameter(torch.ones(2, 3, 3))])
    optimizer = make_dense_optimizer(several, lr=0.1, weight_decay=0.5)
    several[0].grad = torch.zeros(2, 3, 3)
    optimizer.step()
    assert torch.allclose(several[0], torch.full((2, 3, 3), 1 - 0.1 * 0.5))


def test_a_table_has_two_axes():
    with pytest.raises(ValueError, match=r"two axes.*\(3,\)"):
        RowWiseAdagrad([nn.Parameter(torch.zeros(3))], lr=0.1)


def test_the_learning_rate_rises_stays_and_falls_along_lines():
    assert [learning_rate(1.0, step, warmup_steps=4) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert [learning_rate(2.0, step, decay_steps=4, steps=6) for step in range(6)] == [2.0, 2.0, 2.0, 1.5, 1.0, 0.5]
    assert [learning_rate(1.0, step, warmup_steps=2, decay_steps=2, steps=3) for step in range(3)] == [0.5, 1.0, 0.5]
    assert learning_rate(0.3, 0) == 0.3


@pytest.mark.gpu
def test_embeddings_learn_on_a_gpu_as_on_the_cpu_and_the_host_waits_for_nothing():
    torch.manual_seed(0)
    schema = FeatureSchema(n_dense=0, onehot_sizes=(50, 3), multihot_sizes=(9,), bag_length=4)
    on_cpu = Embeddings(schema, 8)
    on_gpu = copy.deepcopy(on_cpu).cuda()
    batch = Batch(
        dense_BD=torch.zeros(256, 0),
        onehot_BF=torch.stack([torch.randint(size, (256,)) for size in schema.onehot_sizes], dim=1),
        label_B=torch.zeros(256),
        multihot_BGS=torch.randint(-1, 9, (256, 1, 4)),
    )
    weight_BPE = torch.randn(256, 3, 8)

    def learn(embeddings: Embeddings, batch: Batch, weight_BPE: Tensor) -> None:
        optimizer = RowWiseAdagrad(embeddings.parameters(), lr=0.1)
        for _ in range(3):
            (features_BPE,) = embeddings(batch)
            (features_BPE * weight_BPE).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    learn(on_cpu, batch, weight_BPE)
    given = batch.to("cuda"), weight_BPE.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        learn(on_gpu, *given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(on_gpu.table.cpu(), on_cpu.table, rtol=1e-4, atol=1e-5)
