"""Parameters and arithmetic of the models, counted by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from loka.data.batch import Batch, FeatureSchema
from loka.models.recommender import Recommender
from loka.models.registry import MODELS, build_model

# About what the synthetic stream has: 16 counts, 26 ids, 2 bags, a history.
STREAM = FeatureSchema(
    n_dense=16,
    onehot_sizes=(10_000,) * 26,
    multihot_sizes=(10_000,) * 2,
    bag_length=8,
    sequence_size=10_000,
    sequence_length=32,
)


def build_without_memory(name: str, preset: str, schema: FeatureSchema = STREAM) -> Recommender:
    with torch.device("meta"):
        return build_model(name, preset, schema)


def dense_flops(model: Recommender) -> int:
    """Of one example's forward pass, on shapes alone: 2 for each multiply-add of a GEMM, none for the embeddings."""
    schema = model.schema
    with torch.device("meta"):
        batch = Batch(
            dense_BD=torch.empty(1, schema.n_dense),
            onehot_BF=torch.empty(1, len(schema.onehot_sizes), dtype=torch.int64),
            label_B=torch.empty(1),
            multihot_BGS=torch.empty(1, len(schema.multihot_sizes), schema.bag_length, dtype=torch.int64),
            sequence_BL=torch.empty(1, schema.sequence_length, dtype=torch.int64),
        )
        with FlopCounterMode(display=False) as counter:
            model(batch)
    return counter.get_total_flops()


def n_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def linear(n_in: int, n_out: int) -> int:
    return n_in * n_out + n_out


def normed(n_in: int, n_out: int) -> int:
    """Linear → LayerNorm."""
    return linear(n_in, n_out) + 2 * n_out


@pytest.mark.parametrize("name", MODELS.names())
def test_table_has_a_row_for_every_id(name: str) -> None:
    model = build_without_memory(name, "tiny")
    assert n_parameters(model.embeddings) == (26 + 2 + 1) * 10_000 * 8


def test_wukong_parameters() -> None:
    # tiny: d=8, 2 layers of 4 + 4 embeddings, k=4, MLPs of 32; 26 ids + 2 bags + history + 1 of the dense features = 30.
    dense = normed(2 * 16, 16) + linear(16, 8)
    first = 30 * 4 + 2 * (30 * 4) + normed(30 * 4, 32) + linear(32, 4 * 8) + 30 * 4 + 30 * 8 + 2 * 8
    second = 8 * 4 + 2 * (8 * 4) + normed(8 * 4, 32) + linear(32, 4 * 8) + 8 * 4 + 2 * 8
    top = normed(8 * 8, 32) + linear(32, 1)
    assert n_parameters(build_without_memory("wukong", "tiny").dense_part) == dense + first + second + top


def test_dlrm_parameters() -> None:
    # tiny: D=8; dense MLP 32-16-8; 30 embeddings have 435 dot products.
    dense = linear(2 * 16, 32) + linear(32, 16) + linear(16, 8)
    top = linear(8 + 435, 64) + linear(64, 32) + linear(32, 1)
    assert n_parameters(build_without_memory("dlrm", "tiny").dense_part) == dense + top


def test_dcnv2_parameters() -> None:
    # tiny: x₀ = 16 dense features, their 16 indicators and 29 embeddings of 8; 2 crosses of rank 16.
    width = 2 * 16 + 29 * 8
    cross = width * 16 + linear(16, width)
    top = linear(width, 64) + linear(64, 32) + linear(32, 1)
    assert n_parameters(build_without_memory("dcnv2", "tiny").dense_part) == 2 * cross + top


def test_interformer_parameters() -> None:
    # tiny: d=8; X has 26 ids + 2 bags + 1 of the dense features = 29; X_sum has 2, S_sum 2 CLS + 1 pooled + 2 recent = 5.
    gate = linear(8, 8)
    attention = 4 * linear(8, 8)
    dense = normed(2 * 16, 16) + linear(16, 8)
    x_summary = 29 * 2 + gate
    s_summary = 1 * 8 + attention + gate
    z = 29 + 5
    interaction = z * 4 + z * 4 + normed(z * 4 + 4 * 8, 32) + linear(32, 29 * 8) + 2 * 8
    sequence = normed(2 * 8, 16) + linear(16, 8 * 8) + 2 * 8 + attention + 2 * 8
    layer = s_summary + interaction + sequence + x_summary
    top = normed((2 + 5) * 8, 32) + linear(32, 1)
    total = dense + x_summary + 2 * layer + s_summary + top
    assert n_parameters(build_without_memory("interformer", "tiny").dense_part) == total


@pytest.mark.parametrize("name", MODELS.names())
def test_tiny_is_tiny(name: str) -> None:
    assert n_parameters(build_without_memory(name, "tiny").dense_part) < 100_000


def test_wukong_flops() -> None:
    dense = 32 * 16 + 16 * 8
    first = 8 * 30 * 4 + 30 * 8 * 4 + (30 * 4) * 32 + 32 * (4 * 8) + 8 * 30 * 4 + 8 * 30 * 8  # XᵀY, X(XᵀY), MLP, LCB, residual
    second = 8 * 8 * 4 + 8 * 8 * 4 + (8 * 4) * 32 + 32 * (4 * 8) + 8 * 8 * 4
    top = (8 * 8) * 32 + 32 * 1
    assert dense_flops(build_without_memory("wukong", "tiny")) == 2 * (dense + first + second + top)


def test_dlrm_flops() -> None:
    macs = 32 * 32 + 32 * 16 + 16 * 8 + 30 * 30 * 8 + (8 + 435) * 64 + 64 * 32 + 32
    assert dense_flops(build_without_memory("dlrm", "tiny")) == 2 * macs


def test_interformer_flops_include_attention() -> None:
    t = 2 + 32  # CLS tokens and steps
    gate_of = 8 * 8  # for each embedding
    dense = 32 * 16 + 16 * 8
    x_summary = 8 * 29 * 2 + 2 * gate_of
    s_summary = (1 + t + t + 1) * 8 * 8 + 2 * t * 8 + 5 * gate_of  # one query: projections, scores and weighted sum, gate
    z = 29 + 5
    interaction = 8 * z * 4 + z * 8 * 4 + 8 * z * 4 + (z * 4 + 4 * 8) * 32 + 32 * (29 * 8)
    sequence = 16 * 16 + 16 * 64 + t * 8 * 8 + 4 * t * 8 * 8 + 2 * t * t * 8
    top = (7 * 8) * 32 + 32
    macs = dense + x_summary + 2 * (s_summary + interaction + sequence + x_summary) + s_summary + top
    assert dense_flops(build_without_memory("interformer", "tiny")) == 2 * macs


@pytest.mark.parametrize("name", MODELS.names())
@pytest.mark.parametrize(("preset", "gflop"), [("base", 1.0), ("large", 5.0)])
def test_presets_take_the_arithmetic_they_promise(name: str, preset: str, gflop: float) -> None:
    assert 0.8 * gflop <= dense_flops(build_without_memory(name, preset)) / 1e9 <= 1.25 * gflop


@pytest.mark.parametrize(
    ("name", "count"), [("wukong", 245_057), ("dlrm", 233_185), ("dcnv2", 352_209), ("interformer", 333_193)]
)
def test_small_is_what_results_were_measured_with(name: str, count: int) -> None:
    assert n_parameters(build_without_memory(name, "small").dense_part) == count
