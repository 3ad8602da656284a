"""A run that is stopped, even killed, and resumed is the run that was never stopped: to the bit, on the CPU."""

import errno
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from loka.core.errors import InvalidFile, InvalidInput
from loka.train.checkpoint import remove_leftovers
from loka.train.config import TrainConfig
from loka.train.loop import train
from loka.train.run_folder import RunFolder
from loka.train.trainer import Trainer

STEPS, EVERY = 240, 4
COMMAND = (
    f"train --model wukong --preset tiny --model-options.dropout 0.2 --steps {STEPS} --batch-size 64 --log-every 3 "
    f"--checkpoint-every {EVERY} --device cpu --resume --data-options.test_examples 512 --data-options.onehot_sizes [9,99] "
    "--data-options.multihot_sizes [] --data-options.bag_length 0"
).split()


def start(out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "loka", *COMMAND, "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def finish(out: Path) -> None:
    output, _ = (process := start(out)).communicate(timeout=120)
    assert process.returncode == 0, output


def kill_after_first_line(out: Path, seconds: float) -> None:
    process = start(out)
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first.startswith(("step", "resumed")), first + process.stdout.read()
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"


def newest_tensors(out: Path) -> dict[str, Tensor]:
    return load_file(max((out / "checkpoints").glob("step-*.safetensors")))


def lines_without_speed(out: Path) -> list[dict]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        del row["samples_per_s"]  # wall-clock, the one thing that differs
    return rows


def assert_same_run(a: Path, b: Path) -> None:
    assert lines_without_speed(a) == lines_without_speed(b)
    ours, theirs = newest_tensors(a), newest_tensors(b)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    assert json.loads((a / "summary.json").read_text())["test"] == json.loads((b / "summary.json").read_text())["test"]


def test_killed_at_random_moments_and_resumed_is_the_uninterrupted_run(tmp_path):
    finish(tmp_path / "whole")
    assert [row["step"] for row in lines_without_speed(tmp_path / "whole")] == list(range(3, STEPS + 1, 3))
    moments = random.Random(0)
    reached = 0
    for _ in range(2):
        kill_after_first_line(tmp_path / "killed", moments.uniform(0.0, 0.2))
        checkpoints = sorted((tmp_path / "killed" / "checkpoints").glob("step-*.safetensors"))
        reached = max(reached, *(int(path.stem.removeprefix("step-")) for path in checkpoints))
    assert 0 < reached < STEPS, "no kill struck in the middle of training: this test has shown nothing"
    finish(tmp_path / "killed")
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    assert not list((tmp_path / "killed" / "checkpoints").glob(".*")), "a killed save's temporary file was left behind"


def small_config(planted: str, out: Path, **changes: object) -> TrainConfig:
    base = TrainConfig("dcnv2", "tiny", data=planted, batch_size=32, log_every=4, checkpoint_every=3, device="cpu")
    return replace(base, out=str(out), **changes)  # type: ignore[arg-type]


def test_a_longer_run_continues_a_shorter_one_and_two_checkpoints_are_kept(planted, tmp_path):
    whole = train(small_config(planted, tmp_path / "whole", steps=12))
    train(small_config(planted, tmp_path / "parts", steps=8))
    parts = train(small_config(planted, tmp_path / "parts", steps=12), resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert parts.test == whole.test
    assert sorted(path.name for path in (tmp_path / "parts" / "checkpoints").iterdir()) == [
        "step-000000009.safetensors",
        "step-000000012.safetensors",
    ]


def test_what_a_kill_left_of_a_save_is_deleted_and_nothing_else(tmp_path):
    kept = ["step-000000005.safetensors", "notes.tmp", ".tmp"]
    left = [".step-000000010.safetensors.a1b2c3.tmp", ".tmpAb12Cd"]  # ours, and what safetensors writes first
    for name in kept + left:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_a_finished_run_resumes_to_its_own_result(planted, tmp_path):
    first = train(small_config(planted, tmp_path, steps=8))
    again = train(small_config(planted, tmp_path, steps=8), resume=True)
    assert again.test == first.test
    assert [row["step"] for row in lines_without_speed(tmp_path)] == [4, 8]


def test_samples_learned_before_a_checkpoint_are_no_speed_of_the_resumed_run(planted, tmp_path, monkeypatch):
    """Line 8 stands for four steps, of which the resumed run makes two, from 7 on."""
    monkeypatch.setattr("loka.train.loop._Clock.lap", lambda clock: 1.0)
    train(small_config(planted, tmp_path, steps=8))
    newest(tmp_path).unlink()
    train(small_config(planted, tmp_path, steps=12), resume=True)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["window"]["examples"] for row in rows] == [4 * 32] * 3
    assert [row["samples_per_s"] for row in rows] == [4 * 32, 2 * 32, 4 * 32]


def test_a_folder_with_a_run_is_not_overwritten(planted, tmp_path):
    train(small_config(planted, tmp_path, steps=4))
    with pytest.raises(InvalidInput, match=r"holds a run already: continue it with --resume, or choose another --out"):
        train(small_config(planted, tmp_path, steps=4))
    with pytest.raises(InvalidInput, match=r"metrics.jsonl is a file: name a folder"):
        train(small_config(planted, tmp_path / "metrics.jsonl", steps=4))


def test_another_config_is_refused_naming_each_difference(planted, tmp_path):
    train(small_config(planted, tmp_path, steps=4))
    with pytest.raises(InvalidFile, match=r"lr was 0.001, now 0.01; seed was 0, now 3.*another out folder"):
        train(small_config(planted, tmp_path, steps=8, lr=0.01, seed=3), resume=True)


def test_a_run_whose_learning_rate_falls_towards_its_end_cannot_move_the_end(planted, tmp_path):
    train(small_config(planted, tmp_path, steps=4, decay_steps=2))
    with pytest.raises(InvalidFile, match=r"steps was 4, now 8"):
        train(small_config(planted, tmp_path, steps=8, decay_steps=2), resume=True)


def test_a_run_is_one_process_at_a_time(planted, tmp_path):
    config = small_config(planted, tmp_path, steps=4)
    result = train(config)
    trainer = Trainer(result.model, config)
    with RunFolder(tmp_path).begun(trainer), pytest.raises(InvalidInput, match="another process is at the run"):
        train(replace(config, steps=8), resume=True)
    assert train(replace(config, steps=8), resume=True).steps == 8


def test_a_run_that_lost_its_checkpoints_is_not_wiped_out(planted, tmp_path):
    config = small_config(planted, tmp_path, steps=8, checkpoint_every=3, log_every=1)
    train(config)
    lines = (tmp_path / "metrics.jsonl").read_text()
    shutil.rmtree(tmp_path / "checkpoints")
    train(config, resume=True)
    assert (tmp_path / "metrics.lost.jsonl").read_text() == lines
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 8


@pytest.mark.parametrize("reason", [errno.ENOSYS, errno.ENOLCK])
def test_where_files_cannot_be_locked_it_is_said(planted, tmp_path, monkeypatch, caplog, reason):
    def flock(file: object, how: int) -> None:
        raise OSError(reason, "not here")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert train(small_config(planted, tmp_path, steps=4)).steps == 4
    assert "files cannot be locked" in caplog.text


def test_damaged_lines_are_told_to_whoever_asks_what_was_given_back(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics_file.write_text('{"step": 1}\n{"step": 2, "giv\n{"step": 3}\n')
    with pytest.raises(InvalidFile, match=r"metrics.jsonl is damaged .*put it back"):
        folder.given_back()
    folder.metrics_file.write_text('{"step": 1}\n')
    assert folder.given_back() == []


def test_an_out_that_is_empty_is_refused(planted, tmp_path):
    """As from a variable that is not set."""
    with pytest.raises(InvalidInput, match="out is empty"):
        replace(small_config(planted, tmp_path), out="")


def newest(out: Path) -> Path:
    return max((out / "checkpoints").glob("step-*.safetensors"))


def with_header(path: Path, **changes: object) -> None:
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["loka"])
    save_file(load_file(path), path, metadata={"loka": json.dumps(header | changes)})


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def make_foreign(path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, path)


def make_newer(path: Path) -> None:
    with_header(path, schema="loka.checkpoint/2", shards=8)


def add_unknown_field(path: Path) -> None:
    with_header(path, shards=8)


def lose_a_part(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = {name: tensor for name, tensor in load_file(path).items() if not name.startswith("dense_optimizer/")}
    save_file(tensors, path, metadata=metadata)


def make_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def rename_a_weight(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    name = next(name for name in tensors if name.startswith("model/"))
    tensors["model/another_layer.weight"] = tensors.pop(name)
    save_file(tensors, path, metadata=metadata)


def cut_metrics(path: Path) -> None:
    (path.parent.parent / "metrics.jsonl").write_text("")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            truncate,
            r"is truncated or not a safetensors file.*delete it to resume from the one before",
        ),
        (make_foreign, r"no checkpoint of LoKA"),
        (make_newer, r"schema 'loka.checkpoint/2', this LoKA reads 'loka.checkpoint/1'"),
        (add_unknown_field, r"damaged header.*shards"),
        (rename_a_weight, r"weights do not fit the model[\s\S]*another_layer"),
        (lose_a_part, r"holds no dense_optimizer: delete it"),
        (make_a_folder, r"is truncated or not a safetensors file"),
        (cut_metrics, r"metrics.jsonl has lost lines"),
    ],
)
def test_a_damaged_checkpoint_says_what_is_wrong(planted, tmp_path, damage, message):
    config = small_config(planted, tmp_path, steps=4)
    train(config)
    damage(newest(tmp_path))
    with pytest.raises(InvalidFile, match=message):
        train(config, resume=True)


def test_without_its_newest_checkpoint_a_run_resumes_from_the_one_before(planted, tmp_path):
    train(small_config(planted, tmp_path / "whole", steps=10))
    train(small_config(planted, tmp_path / "lost", steps=10))
    newest(tmp_path / "lost").unlink()
    train(small_config(planted, tmp_path / "lost", steps=10), resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "lost")
