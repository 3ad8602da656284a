"""What every model promises, whatever its architecture."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.data.batch import PADDING, Batch, FeatureSchema
from loka.models.recommender import Recommender
from loka.models.registry import MODELS, build_model

MakeBatch = Callable[..., Batch]
every_model = pytest.mark.parametrize("name", MODELS.names())


def seeded(name: str, schema: FeatureSchema, **options: object) -> Recommender:
    torch.manual_seed(0)
    return build_model(name, "tiny", schema, **options)


def train(model: Recommender, batches: list[Batch], lr: float) -> list[float]:
    optimizers = [
        torch.optim.Adam(model.dense_part.parameters(), lr=lr),
        torch.optim.SparseAdam(list(model.embeddings.parameters()), lr=lr),
    ]
    losses = []
    for batch in batches:
        loss = F.binary_cross_entropy_with_logits(model(batch), batch.label_B)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


@every_model
def test_one_finite_logit_an_example(name: str, schema: FeatureSchema, make_batch: MakeBatch) -> None:
    batch = make_batch(schema, 16)
    assert batch.dense_BD.isnan().any()
    logits_B = seeded(name, schema)(batch)
    assert logits_B.shape == (16,)
    assert logits_B.isfinite().all()


@every_model
@pytest.mark.parametrize(
    "changes",
    [
        {"n_dense": 0},
        {"multihot_sizes": (), "bag_length": 0},
        {"sequence_size": 0, "sequence_length": 0},
        {"sequence_length": 1},  # fewer steps than InterFormer's recent ones
    ],
)
def test_any_kind_of_feature_may_be_absent(
    name: str, changes: dict[str, object], schema: FeatureSchema, make_batch: MakeBatch
) -> None:
    schema = replace(schema, **changes)
    model = seeded(name, schema)
    logits_B = model(make_batch(schema, 16))
    assert logits_B.isfinite().all()
    assert logits_B.std() > 0


@every_model
def test_parameters_are_split_between_table_and_dense_part(name: str, schema: FeatureSchema) -> None:
    model = seeded(name, schema)
    halves = {*model.embeddings.parameters()} | {*model.dense_part.parameters()}
    assert halves == {*model.parameters()}
    assert [parameter.shape for parameter in model.embeddings.parameters()] == [(7 + 11 + 5 + 6 + 9, 8)]
    assert isinstance(model.dense_part.head, nn.Linear)
    assert model.dense_part.head.out_features == 1


@every_model
def test_gradient_reaches_every_parameter(name: str, schema: FeatureSchema, make_batch: MakeBatch) -> None:
    model = seeded(name, schema)
    batch = make_batch(schema, 256)
    F.binary_cross_entropy_with_logits(model(batch), batch.label_B).backward()
    assert model.embeddings.table.grad.is_sparse
    assert (model.embeddings.table.grad.to_dense() != 0).any(1).all()  # 256 examples hold every id
    for parameter_name, parameter in model.dense_part.named_parameters():
        assert parameter.grad.isfinite().all(), parameter_name
        assert (parameter.grad != 0).any(), parameter_name


@every_model
def test_each_feature_matters(name: str, schema: FeatureSchema, make_batch: MakeBatch) -> None:
    model = seeded(name, schema)
    batch = make_batch(schema, 32)
    logits_B = model(batch)
    others = make_batch(schema, 32, seed=1)
    for field in ("dense_BD", "onehot_BF", "multihot_BGS", "sequence_BL"):
        assert not torch.allclose(model(replace(batch, **{field: getattr(others, field)})), logits_B), field


@every_model
def test_more_padding_changes_nothing(name: str, schema: FeatureSchema, make_batch: MakeBatch) -> None:
    batch = make_batch(schema, 16)
    model = seeded(name, schema)
    longer_schema = replace(schema, bag_length=7, sequence_length=10)
    longer = seeded(name, longer_schema)
    longer.load_state_dict(model.state_dict())
    padded = replace(
        batch,
        multihot_BGS=F.pad(batch.multihot_BGS, (0, 3), value=PADDING),
        sequence_BL=F.pad(batch.sequence_BL, (4, 0), value=PADDING),
    )
    torch.testing.assert_close(longer(padded), model(batch), rtol=1e-5, atol=1e-6)


@every_model
def test_an_example_does_not_see_its_batch(name: str, schema: FeatureSchema, make_batch: MakeBatch) -> None:
    model = seeded(name, schema)
    batch = make_batch(schema, 16)
    alone = Batch(
        batch.dense_BD[3:4], batch.onehot_BF[3:4], batch.label_B[3:4], batch.multihot_BGS[3:4], batch.sequence_BL[3:4]
    )
    torch.testing.assert_close(model(alone), model(batch)[3:4], rtol=1e-4, atol=1e-6)


# torch's compiler reads the .grad of its inputs, and the looked-up embeddings, not being leaves, have none to read.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@every_model
def test_dense_part_compiles_into_one_graph(name: str, schema: FeatureSchema, make_batch: MakeBatch) -> None:
    model = seeded(name, schema)
    batch = make_batch(schema, 8)

    def logits_and_gradients(dense_part: Callable[..., Tensor]) -> list[Tensor]:
        model.zero_grad()
        logits_B = dense_part(batch.dense_BD, *model.embeddings(batch))
        logits_B.square().sum().backward()
        return [logits_B, model.embeddings.table.grad.to_dense(), *(p.grad for p in model.dense_part.parameters())]

    compiled = torch.compile(model.dense_part, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(logits_and_gradients(compiled), logits_and_gradients(model.dense_part), rtol=1e-4, atol=1e-5)


@every_model
def test_logits_are_float32_under_autocast(name: str, schema: FeatureSchema, make_batch: MakeBatch) -> None:
    model = seeded(name, schema)
    batch = make_batch(schema, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits_B = model(batch)
    assert logits_B.dtype == torch.float32
    torch.testing.assert_close(logits_B, model(batch), rtol=0.1, atol=0.05)


@every_model
def test_dropout_acts_in_training_only(name: str, schema: FeatureSchema, make_batch: MakeBatch) -> None:
    batch = make_batch(schema, 16)
    model = seeded(name, schema, dropout=0.5)
    plain = seeded(name, schema)
    plain.load_state_dict(dict(zip(plain.state_dict(), model.state_dict().values(), strict=True)))
    assert not torch.equal(model(batch), model(batch))
    assert torch.equal(model.eval()(batch), plain(batch))


@every_model
def test_raw_counts_up_to_a_million_train(name: str, schema: FeatureSchema, make_batch: MakeBatch) -> None:
    """Counts over twenty binades, unnormalized: the loss starts near ln 2 and falls at the usual rate."""
    model = seeded(name, schema)
    batch = make_batch(schema, 256)
    generator = torch.Generator().manual_seed(1)
    raw_BD = torch.exp2(20 * torch.rand(256, 3, generator=generator)).floor()
    raw_BD[0, 0] = 1e6
    label_B = (raw_BD[:, 0] > 1000).float()
    batch = replace(batch, dense_BD=raw_BD.where(~batch.dense_BD.isnan(), torch.nan), label_B=label_B)
    losses = train(model, [batch] * 60, lr=1e-3)
    assert losses[0] < 1.0
    assert max(losses) < 1.0
    assert losses[-1] < losses[0]


@every_model
def test_learns_a_planted_interaction(name: str) -> None:
    """The label's log-odds are ±3 by whether two ids are of like parity, which neither tells alone, plus a dense feature."""
    schema = FeatureSchema(n_dense=2, onehot_sizes=(10, 10))
    generator = torch.Generator().manual_seed(0)

    def planted(n: int) -> tuple[Batch, Tensor]:
        onehot_BF = torch.randint(10, (n, 2), generator=generator)
        dense_BD = torch.randn(n, 2, generator=generator)
        like_B = (onehot_BF.sum(1) % 2 == 0).float()
        probability_B = (3 * (2 * like_B - 1) + dense_BD[:, 0]).sigmoid()
        return Batch(dense_BD, onehot_BF, torch.bernoulli(probability_B, generator=generator)), probability_B

    model = seeded(name, schema)
    train(model, [planted(256)[0] for _ in range(120)], lr=0.01)
    test, probability_B = planted(20_000)
    with torch.no_grad():
        loss = F.binary_cross_entropy_with_logits(model.eval()(test), test.label_B).item()
    best = F.binary_cross_entropy(probability_B, test.label_B).item()  # the teacher's own log-loss, about 0.22
    assert loss < best + 0.03
    assert best + 0.03 < math.log(2) / 2  # and the base rate's is ln 2


def test_interformer_reads_the_order_of_a_sequence() -> None:
    """The label says which of two ids came last; both are always in the history, so a mean over it says nothing."""
    schema = FeatureSchema(n_dense=0, onehot_sizes=(2,), sequence_size=4, sequence_length=6)
    generator = torch.Generator().manual_seed(0)

    def planted(n: int) -> Batch:
        first_B = torch.randint(2, (n,), generator=generator)
        noise_BL = torch.randint(2, 4, (n, 6), generator=generator)
        gap_B = torch.randint(1, 3, (n,), generator=generator)  # beyond the newest steps, which the model sees as they are
        rows = torch.arange(n)
        noise_BL[rows, 0] = first_B
        noise_BL[rows, gap_B] = 1 - first_B
        return Batch(torch.zeros(n, 0), torch.zeros(n, 1, dtype=torch.int64), first_B.float(), sequence_BL=noise_BL)

    model = seeded("interformer", schema)
    train(model, [planted(128) for _ in range(120)], lr=0.01)
    test = planted(2000)
    with torch.no_grad():
        loss = F.binary_cross_entropy_with_logits(model(test), test.label_B).item()
    assert loss < 0.1
