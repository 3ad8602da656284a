import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from loka.core.errors import InvalidInput, UnknownName
from loka.train.config import Precision, TrainConfig
from loka.train.loop import evaluate, train
from loka.train.nonfinite import NonFiniteLoss
from loka.train.run_folder import RunFolder
from loka.train.trainer import Trainer


def config(planted: str, **changes: object) -> TrainConfig:
    base = TrainConfig("dlrm", "tiny", data=planted, batch_size=64, warmup_steps=5, log_every=5, device="cpu", out=None)
    return replace(base, **changes)  # type: ignore[arg-type]


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_planted_function_is_learned_to_near_the_best_possible(planted):
    result = train(config(planted, steps=400, lr=5e-3, embedding_lr=0.1, data_options={"test_examples": 4096}))
    assert result.steps == 400
    assert result.test.examples == 4096
    assert result.test.best_ne < 0.55
    assert result.test.best_ne < result.test.ne < 1.08 * result.test.best_ne
    assert result.test.calibration == pytest.approx(1, abs=0.05)


def test_one_pass_over_the_data_is_the_default_and_every_step_is_logged_once(planted, tmp_path):
    result = train(config(planted, out=str(tmp_path)))
    assert result.steps == 12
    assert [row["step"] for row in rows(tmp_path)] == [5, 10, 12]
    assert [row["window"]["examples"] for row in rows(tmp_path)] == [5 * 64, 5 * 64, 2 * 64]
    assert rows(tmp_path)[-1]["lifetime"]["examples"] == 12 * 64
    assert rows(tmp_path)[-1]["lifetime"]["log_loss"] == pytest.approx(result.lifetime.log_loss)
    weights = [5, 5, 2]
    mean = sum(w * row["window"]["log_loss"] for w, row in zip(weights, rows(tmp_path), strict=True)) / 12
    assert result.lifetime.log_loss == pytest.approx(mean)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["test"]["log_loss"] == result.test.log_loss
    assert summary["steps"] == 12


def test_the_same_seed_is_the_same_run_and_leaves_the_callers_random_numbers_alone(planted):
    torch.manual_seed(123)
    expected = torch.rand(3)
    torch.manual_seed(123)
    runs = [train(config(planted, seed=seed, steps=6)) for seed in (7, 7, 8)]
    assert torch.equal(torch.rand(3), expected)
    first, again, other = (run.model.state_dict() for run in runs)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_each_optimizer_steps_by_its_own_learning_rate(planted, monkeypatch):
    """As far along the rise to it as the other."""
    rates: list[tuple[float, float]] = []
    step = Trainer.step

    def noting(trainer, batch):
        step(trainer, batch)
        both = trainer.dense_optimizer, trainer.embedding_optimizer
        rates.append(tuple(optimizer.param_groups[0]["lr"] for optimizer in both))

    monkeypatch.setattr(Trainer, "step", noting)
    train(config(planted, steps=6, warmup_steps=4, lr=0.01, embedding_lr=0.2))
    rise = (0.25, 0.5, 0.75, 1.0, 1.0, 1.0)
    assert rates == [(pytest.approx(0.01 * share), pytest.approx(0.2 * share)) for share in rise]


def test_a_bf16_run_stays_near_the_plain_one(planted):
    plain = train(config(planted, steps=20))
    half = train(config(planted, steps=20, precision=Precision.BF16))
    assert half.test.log_loss != plain.test.log_loss
    assert half.test.log_loss == pytest.approx(plain.test.log_loss, rel=0.02)


@pytest.mark.slow
@pytest.mark.filterwarnings("default:The .grad attribute of a Tensor:UserWarning")  # of torch's own tracing
def test_a_compiled_run_follows_the_plain_one(planted, tmp_path):
    plain = train(config(planted, steps=20))
    compiled = train(config(planted, steps=20, compile=True, out=str(tmp_path)))
    assert compiled.test.log_loss == pytest.approx(plain.test.log_loss, rel=1e-4)
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    saved = {name.removeprefix("model/") for name in load_file(checkpoint) if name.startswith("model/")}
    assert saved == plain.model.state_dict().keys()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own, captured to reserve its memory
def test_replayed_as_cuda_graphs_a_run_stays_near_the_plain_one(planted, tmp_path):
    wanted = config(planted, steps=40, batch_size=64, device="cuda", precision=Precision.BF16, compile=True)
    plain = train(wanted)
    replayed = train(replace(wanted, cuda_graphs=True, steps=20, out=str(tmp_path)))
    resumed = train(replace(wanted, cuda_graphs=True, out=str(tmp_path)), resume=True)
    assert replayed.test.log_loss != resumed.test.log_loss
    assert resumed.test.log_loss == pytest.approx(plain.test.log_loss, rel=2e-3)


def test_cuda_graphs_are_of_compiled_code_on_a_gpu(planted):
    with pytest.raises(InvalidInput, match="set compile too"):
        config(planted, cuda_graphs=True)
    with pytest.raises(InvalidInput, match="needs an NVIDIA GPU, and the run is on cpu"):
        train(config(planted, steps=1, compile=True, cuda_graphs=True))


@pytest.mark.parametrize("bad_step", [0, 7, 9])
def test_a_loss_that_is_not_finite_names_step_batch_and_module(planted, tmp_path, bad_step):
    wanted = config(planted, steps=20, out=str(tmp_path), checkpoint_every=3, data_options={"inf_at": bad_step})
    with pytest.raises(NonFiniteLoss, match=rf"step {bad_step + 1} is not finite: dense_part\.[\w.]+ \(Linear\)") as caught:
        train(wanted)
    assert caught.value.step == bad_step
    assert caught.value.batch_file is not None
    assert load_file(caught.value.batch_file)["dense_BD"][0, 1] == math.inf
    # Nothing after the bad step was written: every checkpoint and line is of a healthy run.
    assert all(row["step"] <= bad_step for row in rows(tmp_path))
    steps = [int(path.stem.removeprefix("step-")) for path in (tmp_path / "checkpoints").glob("*.safetensors")]
    assert all(step <= bad_step for step in steps)


def test_weights_that_overflowed_are_told_from_activations_that_did(planted):
    with pytest.raises(NonFiniteLoss, match=r"the parameter \S+ was not finite before the step|gave the first output"):
        train(config(planted, steps=20, lr=1e38, warmup_steps=0))


def test_nothing_to_score_on_is_told_before_the_training(planted, tmp_path, monkeypatch):
    monkeypatch.setattr("loka.train.loop.run_steps", lambda *_: pytest.fail("it trains"))
    with pytest.raises(InvalidInput, match="has no row left to score on: give it more, or train on fewer"):
        train(config(planted, steps=3, out=str(tmp_path / "run"), data_options={"test_examples": 0}))
    assert not (tmp_path / "run").exists()


def test_evaluating_needs_examples_and_keeps_the_mode(planted):
    result = train(config(planted, steps=1))
    result.model.train()
    with pytest.raises(InvalidInput, match="nothing to evaluate on"):
        evaluate(result.model, [])
    assert result.model.training


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"steps": 0}, InvalidInput, "steps must be at least 1, got 0"),
        ({"batch_size": 0}, InvalidInput, "batch_size must be at least 1"),
        ({"lr": 0.0}, InvalidInput, "lr must be above 0"),
        ({"lr": math.nan}, InvalidInput, "lr must be above 0"),
        ({"lr": math.inf}, InvalidInput, "lr must be above 0 and finite"),
        ({"weight_decay": math.nan}, InvalidInput, "weight_decay must be finite and not negative"),
        ({"steps": 10**23}, InvalidInput, r"steps must be below 2\^62"),
        ({"seed": -(10**23)}, InvalidInput, r"seed must be between -2\^62 and 2\^62"),
        ({"weight_decay": -0.1}, InvalidInput, "weight_decay"),
        ({"model": "wukon"}, UnknownName, "Did you mean 'wukong'"),
        ({"preset": "huge"}, UnknownName, "tiny, small, base, large"),
        ({"data": "movielen"}, UnknownName, "Known: "),
        ({"data_path": "/nowhere/ml-1m"}, InvalidInput, "nothing at /nowhere/ml-1m"),
        ({"device": "tpu"}, InvalidInput, "no device is called 'tpu'"),
        ({"precision": Precision.TF32}, InvalidInput, "tensor cores.*use precision fp32"),
        ({"precision": "fp8"}, InvalidInput, "precision must be one of fp32, tf32, bf16, got 'fp8'"),
        ({"model_options": {"dropuot": 0.1}}, InvalidInput, "dropuot"),
        ({"data_options": {"tests": 1}}, InvalidInput, "no option 'tests'"),
    ],
)
def test_mistakes_get_a_message(planted, changes, error, message):
    with pytest.raises(error, match=message):
        train(config(planted, **{"steps": 5} | changes))


def test_saving_is_no_part_of_the_samples_a_second(planted, tmp_path, monkeypatch):
    """By a clock that a step turns by 1 s and a checkpoint by 100."""
    clock = {"s": 0.0}

    def turned(function, seconds):
        def run(*args, **kwargs):
            clock["s"] += seconds
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr("loka.train.loop.time", SimpleNamespace(perf_counter=lambda: clock["s"]))
    monkeypatch.setattr(Trainer, "step", turned(Trainer.step, 1.0))
    monkeypatch.setattr(RunFolder, "save", turned(RunFolder.save, 100.0))
    train(config(planted, steps=8, log_every=4, checkpoint_every=2, out=str(tmp_path)))
    assert [row["samples_per_s"] for row in rows(tmp_path)] == [64.0, 64.0]


def test_endless_data_needs_a_number_of_steps():
    with pytest.raises(InvalidInput, match=r"never ends.*--steps"):
        train(TrainConfig("dlrm", "tiny", data="synthetic", device="cpu", out=None))
