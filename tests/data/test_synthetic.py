"""The synthetic stream: the same batch at the same place, the laws it claims to follow, and a teacher that is what it says."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loka.data.batch import PADDING, Batch
from loka.data.dataset import open_dataset
from loka.data.synthetic import EXAMPLES_AT_ONCE, Drift, Synthetic, batch_seed, expected_logloss
from loka.data.synthetic_features import DrawnFeatures, ZipfLaw
from loka.data.synthetic_teacher import LATENT_WIDTH, RECENCY_SECONDS, SEQUENCE_WEIGHT

SMALL = {
    "onehot_sizes": (10, 100, 1000),
    "n_dense": 4,
    "multihot_sizes": (50,),
    "bag_length": 3,
    "sequence_size": 200,
    "sequence_length": 6,
}
ONLY_IDS = {"n_dense": 0, "multihot_sizes": (), "bag_length": 0, "sequence_size": 0, "sequence_length": 0}


def open_synthetic(seed: int = 0, **options: object) -> Synthetic:
    data = open_dataset("synthetic", seed=seed, **{**SMALL, **options})
    assert isinstance(data, Synthetic)
    return data


def assert_same(a: Batch, b: Batch) -> None:
    for name, value in vars(a).items():
        torch.testing.assert_close(value, getattr(b, name), rtol=0, atol=0, equal_nan=True)


def logits_and_labels(data: Synthetic, examples: int) -> tuple[Tensor, Tensor]:
    batches = list(itertools.islice(data.train(examples // 8), 8))
    return torch.cat([batch.teacher_logit_B for batch in batches]).double(), torch.cat([b.label_B for b in batches]).double()


# The same batch at the same place.


def test_a_batch_depends_on_seed_and_place_alone() -> None:
    data, opened_again = open_synthetic(), open_synthetic()
    batches = list(itertools.islice(data.train(64), 6))
    for start in range(6):
        assert_same(next(data.train(64, start=start)), batches[start])
        assert_same(next(opened_again.train(64, start=start)), batches[start])
    assert_same(next(data.train(64, start=10**9)), next(opened_again.train(64, start=10**9)))
    ids = [batch.onehot_BF for batch in batches] + [next(open_synthetic(seed=1).train(64)).onehot_BF]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(ids, 2))


def test_batches_drawn_together_are_numbered_and_drift_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXAMPLES_AT_ONCE, "cpu", 300)  # as on a GPU: four batches of 64 at once
    drift = Drift(popularity_ids_per_step=3, scale_at=6, scale_features=(1,), teacher_steps=20)
    still, drifting = open_synthetic(dense="raw"), open_synthetic(dense="raw", drift=drift)
    batches = list(itertools.islice(drifting.train(64), 10))
    for step, (batch, before) in enumerate(zip(batches, itertools.islice(still.train(64), 10), strict=True)):
        assert_same(next(drifting.train(64, start=step)), batch)
        assert torch.equal(batch.onehot_BF, (before.onehot_BF + 3 * step) % torch.tensor([10, 100, 1000]))
        factor_D = torch.tensor([1.0, 1000, 1, 1] if step >= 6 else [1.0] * 4)
        torch.testing.assert_close(batch.dense_BD, before.dense_BD * factor_D, equal_nan=True)
        features = DrawnFeatures(before.dense_BD, batch.onehot_BF, batch.multihot_BGS, batch.sequence_BL, batch.times_BL)
        expected = drifting.teacher.logits(features, turn_B=torch.full((64,), step / 20 * math.pi / 2))
        torch.testing.assert_close(batch.teacher_logit_B, expected)
    assert all(not torch.equal(a.onehot_BF, b.onehot_BF) for a, b in itertools.combinations(batches, 2))


def test_a_caller_s_autocast_does_not_reach_the_teacher() -> None:
    data = open_synthetic()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = next(data.train(64))
    assert_same(inside, next(data.train(64)))


def test_held_out_examples_are_finite_repeatable_and_not_trained_on() -> None:
    data = open_synthetic(test_examples=150)
    test = list(data.test(64))
    assert [len(batch) for batch in test] == [64, 64, 22]
    assert_same(test[1], list(data.test(64))[1])
    trained = [batch.onehot_BF for batch in itertools.islice(data.train(64), 20)]
    assert all(not torch.equal(batch.onehot_BF, ids[: len(batch)]) for batch in test for ids in trained)


def test_seeds_of_batches_never_meet() -> None:
    seeds = [batch_seed(seed, place) for seed in (0, 7) for place in range(50_000)]
    assert len({*seeds[:50_000]}) == len({*seeds[50_000:]}) == 50_000
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_streams_of_different_seeds_share_their_teacher_and_not_their_examples() -> None:
    one, other = open_synthetic(seed=0), open_synthetic(seed=1)
    assert (one.teacher.bias, one.best_logloss) == (other.teacher.bias, other.best_logloss)
    assert one.best_logloss != open_synthetic(teacher_seed=1).best_logloss


@given(
    onehot=st.lists(st.integers(1, 300), min_size=1, max_size=4).map(tuple),
    multihot=st.lists(st.integers(1, 50), max_size=2).map(tuple),
    n_dense=st.integers(0, 3),
    sequence=st.sampled_from([(0, 0), (1, 1), (40, 5)]),
    batch_size=st.integers(1, 9),
)
@settings(max_examples=15, deadline=None)
def test_any_mix_of_features_can_be_made(
    onehot: tuple[int, ...], multihot: tuple[int, ...], n_dense: int, sequence: tuple[int, int], batch_size: int
) -> None:
    options = {"onehot_sizes": onehot, "multihot_sizes": multihot, "bag_length": 2 * bool(multihot), "n_dense": n_dense}
    data = open_synthetic(**options, sequence_size=sequence[0], sequence_length=sequence[1])
    batch = next(data.train(batch_size))
    assert batch.onehot_BF.shape == (batch_size, len(onehot))
    assert (batch.onehot_BF < torch.tensor(onehot)).all()
    assert batch.dense_BD.shape == (batch_size, n_dense)
    assert (batch.multihot_BGS is None) == (not multihot)
    assert (batch.sequence_BL is None) == (sequence[0] == 0)
    assert batch.teacher_logit_B is not None
    assert batch.teacher_logit_B.isfinite().all()


# The laws of the features.


@pytest.mark.parametrize("exponent", [0.7, 1.0, 1.05, 1.6])
@pytest.mark.parametrize("size", [1, 2, 30, 100_000])
def test_ids_follow_zipf_s_law(exponent: float, size: int) -> None:
    law = ZipfLaw.of((7, size), exponent, torch.device("cpu"))
    n = 400_000
    ids = law.ids(torch.rand(n, 2, generator=torch.Generator().manual_seed(0)))[:, 1].numpy()

    def integral(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.log(b / a) if exponent == 1 else (b ** (1 - exponent) - a ** (1 - exponent)) / (1 - exponent)

    edges = np.unique(np.round(np.geomspace(1, size + 1, 30)))  # ranks in groups of at least one
    share = integral(edges[:-1], edges[1:]) / integral(edges[0], edges[-1])
    count = np.histogram(ids + 1, bins=edges)[0]
    count[-1] += (ids + 1 == edges[-1]).sum()  # histogram closes its last bin; no id may lie there
    assert ids.min() >= 0
    assert ids.max() < size
    deviation = (count - n * share) / np.sqrt(n * share * (1 - share) + 1)
    assert np.abs(deviation).max() < 4.5
    popularity = law.popularity()[1].numpy()
    assert popularity.sum() == pytest.approx(1)
    np.testing.assert_allclose(np.add.reduceat(popularity, edges[:-1].astype(int) - 1), share, rtol=1e-3)
    if size == 100_000:
        slope = np.polyfit(np.log(np.arange(100, 10_000)), np.log(popularity[99:9_999]), 1)[0]
        assert slope == pytest.approx(-exponent, abs=0.01)


def test_counts_are_whole_heavy_tailed_and_sometimes_missing() -> None:
    data = open_synthetic(n_dense=16, missing=0.2, dense="raw")
    count_BD = torch.cat([batch.dense_BD for batch in itertools.islice(data.train(4096), 8)])
    missing_D = count_BD.isnan().double().mean(0)
    assert missing_D.mean().item() == pytest.approx(0.2, abs=0.08)
    assert missing_D.max() - missing_D.min() > 0.1
    given = count_BD.nan_to_num(0)
    assert torch.equal(given, given.floor())
    assert (given >= 0).all()
    binades_D = torch.log2(given.amax(0) + 1)
    assert binades_D.max() > 18
    mean_D, median_D = count_BD.nanmean(0), count_BD.nanmedian(0).values
    assert (mean_D > 2 * median_D).sum() >= 12  # skewed, most of them strongly
    log_BD = torch.log1p(count_BD).nan_to_num(0).double()
    assert torch.corrcoef(log_BD.T).fill_diagonal_(0).amax() > 0.1  # one factor moves them all
    as_log = torch.cat([b.dense_BD for b in itertools.islice(open_synthetic(n_dense=16, missing=0.2).train(4096), 8)])
    torch.testing.assert_close(as_log, torch.log1p(count_BD), equal_nan=True)


# The teacher.


@pytest.mark.parametrize("base_rate", [0.01, 0.03, 0.2])
def test_the_base_rate_is_the_one_asked_for(base_rate: float) -> None:
    logit_B, label_B = logits_and_labels(open_synthetic(base_rate=base_rate), 160_000)
    assert torch.sigmoid(logit_B).mean().item() == pytest.approx(base_rate, rel=0.03)
    error = math.sqrt(base_rate * (1 - base_rate) / len(label_B))
    assert abs(label_B.mean().item() - torch.sigmoid(logit_B).mean().item()) < 4 * error


def test_labels_are_drawn_from_the_teacher_s_probabilities() -> None:
    logit_B, label_B = logits_and_labels(open_synthetic(), 160_000)
    order = logit_B.argsort()
    for part in order.chunk(20):
        probability = torch.sigmoid(logit_B[part])
        error = (probability * (1 - probability)).sum().sqrt()
        assert abs(label_B[part].sum() - probability.sum()) < 4.5 * error


def test_the_best_log_loss_is_the_entropy_of_the_labels_and_no_other_guess_beats_it() -> None:
    data = open_synthetic(base_rate=0.1)
    logit_B, label_B = logits_and_labels(data, 160_000)
    p = 1 / (1 + np.exp(-logit_B.numpy()))
    entropy = -(p * np.log(p) + (1 - p) * np.log(1 - p))
    np.testing.assert_allclose(expected_logloss(logit_B).numpy(), entropy, rtol=1e-9)
    assert data.best_logloss == pytest.approx(entropy.mean(), abs=4 * entropy.std() * math.sqrt(1 / 160_000 + 1 / 65_536))

    def logloss(guess_B: Tensor) -> float:
        return torch.nn.functional.binary_cross_entropy_with_logits(guess_B, label_B).item()

    assert logloss(logit_B) == pytest.approx(entropy.mean(), rel=0.02)
    assert all(logloss(logit_B) < logloss(guess) for guess in (0.8 * logit_B, logit_B + 0.2, logit_B - 0.2, 1.2 * logit_B))
    rate = label_B.mean()
    assert logloss(logit_B) < 0.95 * logloss(torch.full_like(logit_B, float(torch.logit(rate))))


def test_extreme_log_odds_have_a_finite_expected_log_loss() -> None:
    assert expected_logloss(torch.tensor([-200.0, 0.0, 200.0])).tolist() == pytest.approx([0.0, math.log(2), 0.0], abs=1e-12)


def test_the_logit_is_the_formula_worked_out_one_example_at_a_time() -> None:
    data = open_synthetic(drift=Drift(teacher_steps=10), dense="raw", missing=0.3)
    teacher = data.teacher
    batch = next(data.train(12, start=3))
    turn = 3 / 10 * math.pi / 2
    assert batch.sequence_BL is not None
    assert batch.times_BL is not None
    assert batch.multihot_BGS is not None
    assert batch.teacher_logit_B is not None
    starts = [0, 10, 110]
    for b in range(12):
        seen = [(i, t) for i, t in zip(batch.sequence_BL[b].tolist(), batch.times_BL[b].tolist(), strict=True) if i != PADDING]
        fields = []
        weight = [math.exp(-t / RECENCY_SECONDS) for _, t in seen]
        norm = math.sqrt(sum(w * w for w in weight)) or 1.0
        assert teacher.sequence_VR is not None
        history = sum(
            (w / norm * teacher.sequence_VR[i] for w, (i, _) in zip(weight, seen, strict=True)), torch.zeros(LATENT_WIDTH)
        )
        fields.append(SEQUENCE_WEIGHT * history)
        bag = [i for i in batch.multihot_BGS[b, 0].tolist() if i != PADDING]
        fields.append(sum((teacher.multihot_VR[0][i] for i in bag), torch.zeros(LATENT_WIDTH)) / math.sqrt(max(len(bag), 1)))
        fields += [teacher.onehot_VR[start + i] for start, i in zip(starts, batch.onehot_BF[b].tolist(), strict=True)]
        for d, count in enumerate(batch.dense_BD[b].tolist()):
            if math.isnan(count):
                fields.append(teacher.missing_DR[d])
            else:
                standard = (math.log1p(count) - teacher.log_mean_D[d]) / teacher.log_std_D[d]
                fields.append(standard * teacher.dense_DR[d] + teacher.present_DR[d])
        assert len(fields) == 9
        first, second, third = (
            (math.cos(turn) * w + math.sin(turn) * v).double().view(-1, LATENT_WIDTH)
            for w, v in (teacher.first_X, teacher.second_X, teacher.third_X)
        )
        x = [field.double() for field in fields]
        orders = [
            sum((first[m] @ x[m]).item() for m in range(9)),
            sum((second[m] * x[m] * x[m + 4]).sum().item() for m in range(4)),
            sum((third[m] * x[m] * x[m + 3] * x[m + 6]).sum().item() for m in range(3)),
        ]
        expected = teacher.bias + sum(scale * order for scale, order in zip(teacher.order_scale, orders, strict=True))
        assert batch.teacher_logit_B[b].item() == pytest.approx(expected, abs=2e-4)


def test_every_field_has_mean_zero_so_that_orders_do_not_mix() -> None:
    data = open_synthetic(missing=0.4)
    x_BX = data.teacher._fields(data._law.draw(torch.Generator().manual_seed(5), 100_000)).double()
    deviation_X = x_BX.mean(0) / (x_BX.std(0) / math.sqrt(len(x_BX)) + 1e-12)
    assert deviation_X.abs().max() < 6  # of 72, some of them standardized on another sample


def every_combination(sizes: tuple[int, ...]) -> DrawnFeatures:
    ids = torch.cartesian_prod(*(torch.arange(size) for size in sizes))
    return DrawnFeatures(torch.empty(len(ids), 0), ids, None, None, None)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_each_order_is_there_and_cannot_be_had_from_fewer_features(order: int) -> None:
    """Over all combinations of three features: knowing fewer than ``order`` of them says nothing of that order's effect."""
    sizes = (4, 5, 6)
    strengths = {f"{name}_order": float(number == order) for number, name in enumerate(("first", "second", "third"), 1)}
    data = open_synthetic(onehot_sizes=sizes, **ONLY_IDS, **strengths)
    effect = (data.teacher.logits(every_combination(sizes)).double() - data.teacher.bias).view(sizes)
    p, q, r = (share.double() for share in data._law.onehot.popularity())
    weight = torch.einsum("i,j,k->ijk", p, q, r)
    assert (weight * effect**2).sum().sqrt().item() == pytest.approx(1, rel=0.03)
    known_one = [
        torch.einsum("ijk,j,k->i", effect, q, r),
        torch.einsum("ijk,i,k->j", effect, p, r),
        torch.einsum("ijk,i,j->k", effect, p, q),
    ]
    known_two = [
        torch.einsum("ijk,k->ij", effect, r),
        torch.einsum("ijk,j->ik", effect, q),
        torch.einsum("ijk,i->jk", effect, p),
    ]
    largest = [max(part.abs().max().item() for part in parts) for parts in (known_one, known_two, [effect])]
    assert all(value < 1e-5 for value in largest[: order - 1])
    assert all(value > 0.3 for value in largest[order - 1 :])


def test_the_sequence_s_content_and_times_matter_and_padding_does_not() -> None:
    data = open_synthetic(sequence_length=4)
    batch = next(data.train(500))
    counts = torch.zeros(1, 4)

    def logit(ids: list[int], times: list[float]) -> float:
        features = DrawnFeatures(
            counts, batch.onehot_BF[:1], torch.full((1, 1, 3), PADDING), torch.tensor([ids]), torch.tensor([times])
        )
        return data.teacher.logits(features).item()

    day = RECENCY_SECONDS
    assert abs(logit([1, 2, 3, 4], [4.0, 3.0, 2.0, 1.0]) - logit([1, 2, 3, 5], [4.0, 3.0, 2.0, 1.0])) > 1e-3
    assert abs(logit([1, 2, 3, 4], [4.0, 3.0, 2.0, 1.0]) - logit([1, 2, 3, 4], [9 * day, 9 * day, 9 * day, 1.0])) > 1e-3
    assert logit([PADDING, PADDING, 3, 4], [0.0, 0.0, 2.0, 1.0]) == pytest.approx(
        logit([7, 8, 3, 4], [99 * day, 99 * day, 2.0, 1.0]), abs=1e-5
    )
    with_other_history = data.teacher.logits(
        DrawnFeatures(
            torch.expm1(batch.dense_BD).round(),
            batch.onehot_BF,
            batch.multihot_BGS,
            batch.sequence_BL.roll(1, 0),
            batch.times_BL.roll(1, 0),
        )
    )
    assert (with_other_history - batch.teacher_logit_B).std() > 0.3


# Drift.


def test_counts_change_their_unit_at_the_step_asked_for_and_nothing_else_changes() -> None:
    plain = open_synthetic(dense="raw")
    drifting = open_synthetic(dense="raw", drift={"scale_at": 3, "scale_features": [0, 2], "scale_factor": 1000})
    for step, (one, other) in enumerate(zip(plain.train(200), itertools.islice(drifting.train(200), 6), strict=False)):
        factor_D = torch.tensor([1000.0, 1, 1000, 1] if step >= 3 else [1.0] * 4)
        torch.testing.assert_close(other.dense_BD, one.dense_BD * factor_D, equal_nan=True)
        assert torch.equal(one.label_B, other.label_B)
        assert torch.equal(one.teacher_logit_B, other.teacher_logit_B)
        assert torch.equal(one.onehot_BF, other.onehot_BF)
    late = next(drifting.train(200, start=5))
    torch.testing.assert_close(late.dense_BD, other.dense_BD, rtol=0, atol=0, equal_nan=True)


def test_popularity_moves_to_other_ids_and_the_teacher_knows_them() -> None:
    drifting = open_synthetic(drift={"popularity_ids_per_step": 0.5})
    plain = open_synthetic()
    for step in (0, 1, 10, 400):
        moved, still = next(drifting.train(3000, start=step)), next(plain.train(3000, start=step))
        assert torch.equal(moved.onehot_BF, (still.onehot_BF + step // 2) % torch.tensor([10, 100, 1000]))
        assert moved.onehot_BF[:, 2].mode().values == step // 2
    assert not torch.equal(moved.teacher_logit_B, still.teacher_logit_B)
    held_out = next(drifting.test(3000, step=400))
    assert held_out.onehot_BF[:, 2].mode().values == 200


def test_the_teacher_turns_into_another_of_the_same_strength() -> None:
    drifting = open_synthetic(drift={"teacher_steps": 100})
    turned = {step: next(drifting.test(20_000, step=step)).teacher_logit_B for step in (0, 50, 100)}

    def correlation(a: Tensor, b: Tensor) -> float:
        return torch.corrcoef(torch.stack([a, b]))[0, 1].item()

    assert torch.equal(turned[0], next(open_synthetic().test(20_000)).teacher_logit_B)
    assert correlation(turned[0], turned[50]) == pytest.approx(math.cos(math.pi / 4), abs=0.25)
    assert abs(correlation(turned[0], turned[100])) < 0.35
    assert 0.5 < turned[100].std() / turned[0].std() < 2


# On a GPU.


@pytest.mark.gpu
def test_the_gpu_s_teacher_is_the_cpu_s_and_batches_are_made_without_a_host_sync() -> None:
    on_cpu, on_gpu = open_dataset("synthetic"), open_dataset("synthetic", device="cuda", dense="raw")
    assert isinstance(on_cpu, Synthetic)
    assert isinstance(on_gpu, Synthetic)
    assert on_cpu.best_logloss == on_gpu.best_logloss
    batches = on_gpu.train(8192)
    next(batches)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = next(itertools.islice(batches, 8, None))  # beyond those drawn together
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert batch.label_B.device.type == "cuda"
    again = batch.to("cpu")
    features = DrawnFeatures(again.dense_BD, again.onehot_BF, again.multihot_BGS, again.sequence_BL, again.times_BL)
    torch.testing.assert_close(on_cpu.teacher.logits(features), again.teacher_logit_B, rtol=1e-4, atol=1e-4)
    assert_same(batch, next(on_gpu.train(8192, start=9)))
