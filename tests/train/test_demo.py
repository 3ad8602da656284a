"""The demo at its smallest: every stage leaves its file, and an interrupted one ends as if it had not been."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from emulated_block import emulate

from loka.core.comparison import Comparison
from loka.core.errors import InvalidInput
from loka.core.plan import Goal, Plan
from loka.core.survey import Survey
from loka.data.dataset import open_dataset
from loka.dispatch.check import check_plan
from loka.models.registry import build_model
from loka.planner.plan import make_plan
from loka.probe.probe import Probe
from loka.report.run import read_run
from loka.train.config import Precision
from loka.train.demo import Stage, has_begun, run_demo
from loka.train.demo_settings import DemoSettings
from loka.train.twins import Twin, compare_quality, compare_times

TINY = DemoSettings("tiny", Goal.SERVING, batch_size=64, probe_steps=6, twin_steps=6, test_batches=3, device="cpu")
TIMES_OF_A_FAST_BLOCK = {  # in µs
    "input_cast": 0.1, "training_cast": 0.1, "forward": 1.0, "training": 2.0,
    "baseline_forward": 1e6, "baseline_training": 2e6, "epilogue_forward": 1e6, "epilogue_training": 1e6,
}  # fmt: skip


class StopAt:
    """A progress that is interrupted at its ``count``-th step."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, step: int, steps: int) -> None:
        pass

    def step(self) -> None:
        self.count -= 1
        if self.count == 0:
            raise KeyboardInterrupt

    def log(self, row: object) -> None:
        pass


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("demo")
    run_demo(TINY, run)
    return run


def losses(run: Path, twin: str) -> list[float]:
    lines = (run / "twins" / twin / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["window"]["log_loss"] for line in lines]


def test_every_stage_leaves_its_file(whole: Path) -> None:
    run = read_run(whole)
    assert run.missing == ()
    assert run.record is not None
    assert run.comparison is not None
    assert run.comparison.fingerprint == run.record.fingerprint == Plan.load(whole).document.fingerprint
    plans = {goal: Plan.load(whole / goal) for goal in Goal}
    assert {goal: plan.document.goal for goal, plan in plans.items()} == {goal: goal for goal in Goal}
    assert Plan.load(whole).document == plans[TINY.goal].document
    low = [goal for goal, plan in plans.items() if any(site.is_low_precision for site in plan.sites)]
    assert [pair.goal for pair in run.comparison.quality] == [pair.goal for pair in run.comparison.times] == low
    assert ("planned" in run.training) == (Goal.TRAINING in low)


def test_the_record_of_another_run_is_not_taken_for_a_stage_that_is_done(whole: Path, tmp_path: Path) -> None:
    """`loka probe` writes into the same folder by default."""
    shutil.copy(whole / "record.safetensors", tmp_path)
    with pytest.raises(InvalidInput, match="holds the record of another run: name another folder"):
        run_demo(TINY, tmp_path)
    assert not has_begun(tmp_path)


def test_nor_is_that_of_another_model_beside_checkpoints(whole: Path, tmp_path: Path) -> None:
    """`loka train` may have written into that folder too."""
    shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")
    assert has_begun(tmp_path)
    model = torch.nn.Linear(4, 4)
    probe = Probe(model)
    with probe.step():
        model(torch.randn(8, 4)).sum().backward()
    probe.record().save(tmp_path)
    probe.detach()
    with pytest.raises(InvalidInput, match="holds the record of another run: name another folder"):
        run_demo(TINY, tmp_path)


def test_a_finished_demo_is_not_run_again(whole: Path) -> None:
    said: list[str] = []
    assert run_demo(TINY, whole, Stage(said.append)) == Comparison.load(whole)
    assert "already" in said[0]


@pytest.mark.parametrize("stop", [3, 9])  # under the Probe, and in the first twin
def test_an_interrupted_demo_goes_on(whole: Path, tmp_path: Path, stop: int) -> None:
    for measured in whole.glob("survey.*"):  # what takes longest, and is interrupted in its own tests
        shutil.copy(measured, tmp_path)
    interrupted = StopAt(stop)
    with pytest.raises(KeyboardInterrupt):
        run_demo(TINY, tmp_path, Stage(steps=lambda: interrupted))
    run_demo(TINY, tmp_path)
    (older,) = read_run(tmp_path).missing
    assert older.why.startswith("survey.json was measured from a different record")  # for it was copied
    assert losses(tmp_path, "high") == losses(whole, "high")


def test_twins_part_by_the_plan_alone(whole: Path, tmp_path: Path) -> None:
    """With every site that can in INT8, faster or not; the twin in bf16 stays close."""
    for file in whole.iterdir():
        if file.is_file() and file.name not in ("comparison.json", "plan.json"):
            shutil.copy(file, tmp_path)
    shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")
    for goal in Goal:
        make_plan(Survey.load(whole), goal=goal, min_speedup=1e-6).save(tmp_path / goal)
    comparison = run_demo(TINY, tmp_path)
    assert [pair.goal for pair in comparison.times] == [pair.goal for pair in comparison.quality] == list(Goal)
    for times in comparison.times:
        assert sum(times.high_by_kind.values()) == pytest.approx(times.high_us)
    assert all(pair.examples == 3 * 64 for pair in comparison.quality)
    training, serving = comparison.quality
    assert training.other is not None
    assert 1e-9 < abs(training.other.mean) < 0.01
    assert abs(training.change.mean) > 1e-9
    assert 1e-9 < abs(serving.change.mean) < 0.05


def test_quality_is_compared_batch_by_batch() -> None:
    data = open_dataset("synthetic", test_examples=160)
    torch.manual_seed(0)
    high, same, other = (build_model("wukong", "tiny", data.schema) for _ in range(3))
    same.load_state_dict(high.state_dict())
    equal = compare_quality(Goal.SERVING, high, same, data.test(64), Precision.FP32)
    assert (equal.change.mean, equal.change.low, equal.change.high, equal.examples) == (0, 0, 0, 160)
    apart = compare_quality(Goal.SERVING, high, other, data.test(64), Precision.FP32)
    assert apart.change.n == 2  # the last batch is smaller, and would weigh too much
    assert apart.planned_log_loss != apart.high_log_loss


def test_times_are_taken_in_turns() -> None:
    data = open_dataset("synthetic", test_examples=64)
    model, batch = build_model("wukong", "tiny", data.schema), next(data.test(64))
    calls: list[str] = []

    def run(name: str) -> None:
        calls.append(name)
        model(batch)

    turns = [Twin(model, lambda name=name: run(name)) for name in ("high", "planned")]
    pair = compare_times(Goal.SERVING, 64, *turns, rounds=3)
    assert calls[:10] == ["high", "planned"] * 5  # two rounds to warm up, three that count; then the profiler's
    assert pair.speedup.n == 3


def test_the_command_stops_without_a_traceback(tmp_path: Path) -> None:
    """Ctrl-C as a terminal sends it, while the model trains."""
    folder = tmp_path / "a run"
    command = [sys.executable, "-m", "loka", "demo", "-o", str(folder), "--device", "cpu"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        assert process.stdout is not None
        # Not before: torch's imports swallow an interrupt here and there.
        assert any(line.startswith("step ") for line in process.stdout)
        # What a shell runs in the background ignores Ctrl-C, and so do its children; they are asked to end.
        process.send_signal(signal.SIGTERM if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode in (130, -2)  # a shell's 130 either way: Python may end by the signal itself
    assert f"`loka demo -o {shlex.quote(str(folder))} --device cpu` starts over, because there is no checkpoint yet" in errors
    assert "Traceback" not in errors


@pytest.mark.usefixtures("without_trials")
def test_plans_of_fused_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where blocks are fastest: emulated here, with times that say so."""
    emulate(monkeypatch)
    monkeypatch.setattr("loka.measure.block.Blocks._time", lambda self, shape, block: TIMES_OF_A_FAST_BLOCK)
    monkeypatch.setattr("loka.measure.error.SITE_BUDGET_S", {"cpu": (0.0, 0.0)})  # errors from the fewest samples
    monkeypatch.setattr("loka.train.demo.check_plan", partial(check_plan, repeats=1))
    monkeypatch.setattr("loka.train.demo.MIN_SPEEDUP", 0.0)  # emulation is slow
    said: list[str] = []
    run_demo(replace(TINY, goal=Goal.TRAINING), tmp_path, Stage(said.append))
    assert any(site.block for site in Plan.load(tmp_path).sites)
    run = read_run(tmp_path)
    assert run.comparison is not None
    assert [pair.goal for pair in run.comparison.quality] == [Goal.TRAINING, Goal.SERVING]
    assert all(abs(pair.change.mean) < 0.02 for pair in run.comparison.quality)
    assert any("frozen" in line for line in said)
