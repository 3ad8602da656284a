"""Random batches of any schema, as a data set would make them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from loka.data.batch import PADDING, Batch, FeatureSchema

SMALL_SCHEMA = FeatureSchema(
    n_dense=3, onehot_sizes=(7, 11), multihot_sizes=(5, 6), bag_length=4, sequence_size=9, sequence_length=6
)


@pytest.fixture
def schema() -> FeatureSchema:
    """Every kind of feature, few ids: 3 dense, 2 one-hot, 2 bags, a sequence."""
    return SMALL_SCHEMA


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    return random_batch


def random_batch(schema: FeatureSchema, n: int, seed: int = 0) -> Batch:
    """Dense features of all scales with a quarter missing, ids uniform, bags and sequences of all lengths from none to full."""
    generator = torch.Generator().manual_seed(seed)

    def ids(size: int, *shape: int) -> Tensor:
        return torch.randint(size, (n, *shape), generator=generator)

    def drop(x: Tensor, value: float) -> Tensor:
        return x.masked_fill(torch.rand(x.shape, generator=generator) < 0.25, value)

    bags = [drop(ids(size, schema.bag_length), PADDING) for size in schema.multihot_sizes]
    length_B1 = ids(schema.sequence_length + 1, 1)
    age_L = torch.arange(schema.sequence_length, 0, -1)
    return Batch(
        dense_BD=drop(torch.randn(n, schema.n_dense, generator=generator), torch.nan),
        onehot_BF=torch.stack([ids(size) for size in schema.onehot_sizes], dim=1),
        label_B=ids(2).float(),
        multihot_BGS=torch.stack(bags, dim=1) if bags else None,
        sequence_BL=ids(schema.sequence_size, schema.sequence_length).masked_fill(age_L > length_B1, PADDING)
        if schema.sequence_length
        else None,
    )
