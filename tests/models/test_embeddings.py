from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.core.errors import InvalidInput
from loka.data.batch import PADDING, Batch, FeatureSchema
from loka.models.embeddings import Embeddings

MakeBatch = Callable[..., Batch]


def rows_by_feature(embeddings: Embeddings) -> list[torch.Tensor]:
    """The table cut into features: one-hot first, then bags, then the sequence."""
    schema = embeddings.schema
    sizes = [*schema.onehot_sizes, *schema.multihot_sizes, *([schema.sequence_size] if schema.sequence_size else [])]
    return list(embeddings.table.detach().split(sizes))


def mean_by_hand(table: torch.Tensor, ids: list[int]) -> torch.Tensor:
    total = torch.zeros(table.shape[1], dtype=torch.float64)
    kept = [i for i in ids if i != PADDING]
    for i in kept:
        total += table[i].double()
    return total / max(1, len(kept))


schemas = st.builds(
    FeatureSchema,
    n_dense=st.just(0),
    onehot_sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    multihot_sizes=st.lists(st.integers(1, 9), max_size=3).map(tuple),
    bag_length=st.integers(1, 5),
    sequence_size=st.integers(1, 9),
    sequence_length=st.integers(1, 5),
)


@settings(max_examples=40, deadline=None)
@given(schema=schemas, has_sequence=st.booleans(), seed=st.integers(0, 1000))
def test_features_are_rows_and_means_of_rows(schema: FeatureSchema, has_sequence: bool, seed: int) -> None:
    if not has_sequence:
        schema = replace(schema, sequence_size=0, sequence_length=0)
    generator = torch.Generator().manual_seed(seed)

    def ids(lowest: int, size: int, *shape: int) -> torch.Tensor:
        return torch.randint(lowest, size, (3, *shape), generator=generator)

    bags = [ids(PADDING, size, schema.bag_length) for size in schema.multihot_sizes]
    batch = Batch(
        dense_BD=torch.zeros(3, 0),
        onehot_BF=torch.stack([ids(0, size) for size in schema.onehot_sizes], dim=1),
        label_B=torch.zeros(3),
        multihot_BGS=torch.stack(bags, dim=1) if bags else None,
        sequence_BL=ids(PADDING, schema.sequence_size, schema.sequence_length) if has_sequence else None,
    )
    embeddings = Embeddings(schema, 4)
    (features_BPE,) = embeddings(batch)
    tables = rows_by_feature(embeddings)
    n_onehot, n_bags = len(schema.onehot_sizes), len(schema.multihot_sizes)
    assert features_BPE.shape == (3, n_onehot + n_bags + has_sequence, 4)
    assert embeddings.n_features == features_BPE.shape[1]
    for b in range(3):
        expected = [tables[f][batch.onehot_BF[b, f]].double() for f in range(n_onehot)]
        if batch.multihot_BGS is not None:
            expected += [mean_by_hand(tables[n_onehot + g], batch.multihot_BGS[b, g].tolist()) for g in range(n_bags)]
        if batch.sequence_BL is not None:
            expected.append(mean_by_hand(tables[-1], batch.sequence_BL[b].tolist()))
        torch.testing.assert_close(features_BPE[b].double(), torch.stack(expected), rtol=1e-6, atol=1e-7)


def test_kept_sequence_has_rows_where_valid_and_zeros_at_padding(schema: FeatureSchema, make_batch: MakeBatch) -> None:
    embeddings = Embeddings(schema, 4, keep_sequence=True)
    batch = make_batch(schema, 8)
    features_BPE, sequence_BLE, valid_BL = embeddings(batch)
    assert features_BPE.shape == (8, 4, 4)  # 2 one-hot, 2 bags
    assert torch.equal(valid_BL, batch.sequence_BL != PADDING)
    table = rows_by_feature(embeddings)[-1]
    expected = torch.stack([table[i] if i != PADDING else torch.zeros(4) for i in batch.sequence_BL.flatten().tolist()])
    assert torch.equal(sequence_BLE.flatten(0, 1), expected)


@pytest.mark.parametrize("keep_sequence", [False, True])
def test_an_empty_batch_has_empty_features(schema: FeatureSchema, make_batch: MakeBatch, keep_sequence: bool) -> None:
    embeddings = Embeddings(schema, 4, keep_sequence=keep_sequence)
    features_BPE, *_ = embeddings(make_batch(schema, 0))
    assert features_BPE.shape == (0, embeddings.n_features, 4)
    features_BPE.sum().backward()
    assert embeddings.table.grad._nnz() == 0


def test_gradient_is_sparse_and_only_of_the_rows_looked_up() -> None:
    schema = FeatureSchema(0, (1000, 1000), (1000,), 3)
    embeddings = Embeddings(schema, 2)
    batch = Batch(
        dense_BD=torch.zeros(2, 0),
        onehot_BF=torch.tensor([[5, 7], [5, 9]]),
        label_B=torch.zeros(2),
        multihot_BGS=torch.tensor([[[3, 4, PADDING]], [[3, PADDING, PADDING]]]),
    )
    (features_BPE,) = embeddings(batch)
    weight_BPE = torch.arange(1.0, 13.0).view(2, 3, 2)
    (features_BPE * weight_BPE).sum().backward()
    assert embeddings.table.grad.is_sparse
    gradient = embeddings.table.grad.coalesce()
    moved = {int(row): values for row, values in zip(gradient.indices()[0], gradient.values(), strict=True) if values.any()}
    expected = {
        5: [1.0 + 7.0, 2.0 + 8.0],  # in both examples
        1007: [3.0, 4.0],
        1009: [9.0, 10.0],
        2003: [5.0 / 2 + 11.0, 6.0 / 2 + 12.0],  # half of the first bag, all of the second
        2004: [5.0 / 2, 6.0 / 2],
    }
    assert {row: values.tolist() for row, values in moved.items()} == expected
    assert gradient.indices().shape[1] <= 2 * (2 + 3)  # by the ids in the batch, not the 3000 rows


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("onehot_BF", (2, 1), 11, "example 2 has id 11 in one-hot feature 1, which has the 11 ids from 0 to 10"),
        ("onehot_BF", (0, 0), PADDING, "example 0 has id -1 in one-hot feature 0"),
        ("multihot_BGS", (1, 1, 3), 6, "example 1 has id 6 in bag 1"),
        ("multihot_BGS", (1, 0, 0), -2, "example 1 has id -2 in bag 0"),
        ("sequence_BL", (3, 5), 9, "example 3 has id 9 in the sequence"),
    ],
)
def test_id_out_of_range_names_the_feature(
    schema: FeatureSchema, make_batch: MakeBatch, field: str, index: tuple[int, ...], value: int, message: str
) -> None:
    batch = make_batch(schema, 4)
    getattr(batch, field)[index] = value
    with pytest.raises(InvalidInput, match=message):
        Embeddings(schema, 4)(batch)


def test_where_ids_are_not_checked_nothing_past_a_feature_is_read(
    schema: FeatureSchema, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where an id past the table would be read, and its gradient written, wherever that lies."""
    monkeypatch.setattr(Embeddings, "_check_ids", lambda self, ids_BN: None)
    embeddings, far, last = Embeddings(schema, 4), make_batch(schema, 4), make_batch(schema, 4)
    for batch, value in ((far, 10**9), (last, 10)):
        batch.onehot_BF[2, 1] = value  # of a feature with 11 rows
        batch.sequence_BL[3, 5] = value if value > 10 else schema.sequence_size - 1
    for one, other in zip(embeddings(far), embeddings(last), strict=True):
        assert torch.equal(one, other)


def test_batch_of_another_shape_is_refused(schema: FeatureSchema, make_batch: MakeBatch) -> None:
    embeddings = Embeddings(schema, 4)
    with pytest.raises(InvalidInput, match=r"built for sequence_BL of shape \(6,\) an example, the batch has none"):
        embeddings(replace(make_batch(schema, 4), sequence_BL=None))
    wider = replace(schema, bag_length=5)
    with pytest.raises(InvalidInput, match=r"multihot_BGS of shape \(2, 4\) an example, the batch has \(2, 5\)"):
        embeddings(make_batch(wider, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"onehot_sizes": (3, 0)}, "at least one id"),
        ({"n_dense": -1}, "n_dense ≥ 0"),
        ({"bag_length": 0}, "bag_length of at least 1"),
        ({"sequence_length": 0}, "both sequence_size and sequence_length"),
        ({"sequence_size": 0}, "both sequence_size and sequence_length"),
        ({"onehot_sizes": (), "multihot_sizes": (), "sequence_size": 0, "sequence_length": 0}, "at least one categorical"),
    ],
)
def test_schema_without_sense_is_refused(schema: FeatureSchema, change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Embeddings(replace(schema, **change), 4)


def test_rows_start_within_one_over_the_root_of_their_feature_size() -> None:
    torch.manual_seed(0)
    few, many = rows_by_feature(Embeddings(FeatureSchema(0, (100, 10_000)), 16))
    for table, size in ((few, 100), (many, 10_000)):
        bound = size**-0.5
        assert table.abs().max() <= bound
        assert table.std() == pytest.approx(bound / 3**0.5, rel=0.05)  # of a uniform distribution
