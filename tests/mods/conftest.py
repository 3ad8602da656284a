"""Models that Mods are tried on: our four, and one that a user might write."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from loka.data.batch import Batch, FeatureSchema
from loka.models.recommender import Recommender
from loka.models.registry import build_model

sys.path.insert(0, str(Path(__file__).parent))  # report_lines, which test files of this folder share
SCHEMA = FeatureSchema(n_dense=3, onehot_sizes=(7, 11), multihot_sizes=(5,), bag_length=3, sequence_size=9, sequence_length=4)


@pytest.fixture
def fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.fixture
def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)

    def ids(size: int, *shape: int) -> Tensor:
        return torch.randint(size, (16, *shape), generator=generator)

    return Batch(torch.randn(16, 3, generator=generator), ids(7, 2), ids(2).float(), ids(5, 1, 3), ids(9, 4))


@pytest.fixture(params=["wukong", "dlrm", "dcnv2", "interformer"])
def recommender(request: pytest.FixtureRequest) -> Recommender:
    torch.manual_seed(0)
    return build_model(request.param, "tiny", SCHEMA)


@pytest.fixture
def build() -> Callable[[str], Recommender]:
    return lambda name: build_model(name, "tiny", SCHEMA)


@pytest.fixture
def mlp() -> nn.Sequential:
    """Two blocks and a head of three outputs; wide enough that blocks of 256 matter."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 300),
        nn.LayerNorm(300),
        nn.SiLU(),
        nn.Linear(300, 20),
        nn.RMSNorm(20),
        nn.ReLU(),
        nn.Linear(20, 3),
    )
