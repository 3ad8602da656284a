"""Mods and plans in a training run: applied before the optimizers, resumable to the same bits."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import loka
from loka.core.environment import current_environment
from loka.core.errors import InvalidFile, InvalidInput, UnknownName
from loka.core.estimate import Estimate
from loka.core.fingerprint import fingerprint
from loka.core.gemm import Role
from loka.core.plan import Choice, Goal, Plan, PlanDocument, SitePlan
from loka.core.recipe import Format
from loka.data.batch import Batch
from loka.data.dataset import open_dataset
from loka.dispatch.guard import GuardEvent
from loka.dispatch.planned import PlannedLinear
from loka.kernels.device import device_of
from loka.models.recommender import Recommender
from loka.nn.block_norm import BlockNorm
from loka.train.config import TrainConfig
from loka.train.loop import train
from loka.train.metrics import Metrics
from loka.train.progress import Silent
from loka.train.run_folder import LogRow, RunFolder


def config(planted: str, **changes: object) -> TrainConfig:
    base = TrainConfig("wukong", "tiny", data=planted, batch_size=64, steps=8, log_every=4, device="cpu", out=None)
    return replace(base, **changes)  # type: ignore[arg-type]


def write_plan(
    folder: Path, model: torch.nn.Module, kernel: str = "reference.rowwise", max_error: float = 0.2, goal: Goal = Goal.TRAINING
) -> str:
    """Every site but those of one output on ``kernel``."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    sites = []
    for name, module in linears.items():
        error = Estimate(0.08, 0.07, 0.09, 50) if module.out_features > 1 else None
        choice = Choice(kernel if error else "torch.fp32", "by hand", error)
        sites.append(SitePlan(name, module.in_features, module.out_features, dict.fromkeys(Role, choice), 2.0, 1.0, "by hand"))
    print_ = fingerprint((name, m.in_features, m.out_features, m.bias is not None) for name, m in linears.items())
    environment = current_environment(device_of(torch.device("cpu")))
    limits = dict.fromkeys(Role, max_error)
    document = PlanDocument(print_, environment, Format.FP32, goal, limits, 1.05, tuple(sites))
    return str(Plan(document).save(folder))


def planned_modules(model: torch.nn.Module) -> int:
    return sum(isinstance(module, PlannedLinear) for module in model.modules())


def test_mods_are_made_before_the_optimizers(planted):
    plain = train(config(planted, steps=1)).model
    changed = train(config(planted, mods=("no_bias", "block_norm"))).model
    assert any(isinstance(module, BlockNorm) for module in changed.modules())
    assert len(list(changed.parameters())) < len(list(plain.parameters()))


@pytest.mark.parametrize("part", ["whole", "dense_part"])
def test_a_plan_of_the_model_or_of_its_dense_part_trains_and_resumes_to_the_same_bits(planted, tmp_path, part):
    model = train(config(planted, steps=1)).model
    plan = write_plan(tmp_path, model if part == "whole" else model.dense_part)
    run = config(planted, plan=plan, out=str(tmp_path / "run"), checkpoint_every=4)
    straight = train(replace(run, out=None))
    assert planned_modules(straight.model) >= 3
    train(replace(run, steps=4))
    resumed = train(run, resume=True)
    for name, value in straight.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    plain = train(config(planted))
    assert plain.model.state_dict().keys() == straight.model.state_dict().keys()
    assert plain.test.log_loss != straight.test.log_loss
    assert plain.test.log_loss == pytest.approx(straight.test.log_loss, rel=0.02)


def write_record(folder: Path, model: Recommender, batch: Batch) -> None:
    with torch.no_grad():
        arguments = (batch.dense_BD, *model.embeddings(batch))
    probe = loka.Probe(model.dense_part, every=1)
    with probe.step():
        model.dense_part(*arguments).sum().backward()
    probe.record().save(folder)
    probe.detach()


class _StopsAfter(Silent):
    def __init__(self, steps: int) -> None:
        self.left = steps

    def step(self) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


class TestGuarded:
    @pytest.fixture
    def run(self, planted, tmp_path):
        """Planned with a limit that FP8 cannot keep: the first check gives every site back."""
        model = train(config(planted, steps=1)).model
        plan = write_plan(tmp_path, model.dense_part, max_error=0.01)
        write_record(tmp_path, model, next(open_dataset(planted, path=None, seed=0, device=torch.device("cpu")).train(64)))
        return config(planted, plan=plan, out=str(tmp_path / "run"), guard_every=2, log_every=2, checkpoint_every=4)

    def test_sites_that_drifted_are_given_back_once_and_told_in_the_metrics(self, run):
        result = train(run)
        assert planned_modules(result.model) == 0
        rows = [json.loads(line) for line in (Path(run.out) / "metrics.jsonl").read_text().splitlines()]
        assert [bool(row["given_back"]) for row in rows] == [True, False, False, False]
        first = rows[0]["given_back"][0]
        assert first["step"] == 0
        assert first["error"] > first["bound"] == pytest.approx(0.015)
        assert len({event["site"] for event in rows[0]["given_back"]}) == len(rows[0]["given_back"]) >= 3

    @pytest.mark.parametrize("log_every", [2, 8])
    def test_what_was_given_back_stays_so_when_a_run_is_resumed(self, run, log_every):
        """Also where a checkpoint comes before the next line of metrics."""
        run = replace(run, log_every=log_every)
        straight = train(replace(run, out=f"{run.out}-straight"))
        with pytest.raises(KeyboardInterrupt):
            train(run, progress=_StopsAfter(5))
        resumed = train(run, resume=True)
        assert planned_modules(resumed.model) == 0
        for name, value in straight.model.state_dict().items():
            assert torch.equal(value, resumed.model.state_dict()[name]), name

    def test_what_was_not_finite_can_be_resumed_from(self, tmp_path):
        folder, metrics = RunFolder(tmp_path), Metrics(*(1 for _ in fields(Metrics)))
        event = GuardEvent(7, "top.0", Role.FPROP, error=math.nan, recorded_error=0.01, bound=0.3)
        folder.append(LogRow(8, metrics, metrics, 1.0, (event,)))
        (found,) = folder.given_back()
        assert math.isnan(found.error)
        assert replace(found, error=0.0) == replace(event, error=0.0)

    def test_without_a_record_or_by_request_nothing_watches(self, run):
        assert planned_modules(train(replace(run, guard_every=0, out=None)).model) >= 3
        (Path(run.plan).parent / "record.safetensors").unlink()
        assert planned_modules(train(replace(run, out=None)).model) >= 3


def test_a_run_goes_on_only_with_the_plan_it_began_with(planted, tmp_path):
    model = train(config(planted, steps=1)).model
    plan = write_plan(tmp_path, model)
    run = config(planted, plan=plan, out=str(tmp_path / "run"), steps=4, checkpoint_every=4)
    train(run)
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "plan.json").write_bytes(Path(plan).read_bytes())
    train(replace(run, plan=str(moved), steps=5), resume=True)  # the same plan in another place
    write_plan(tmp_path, model, "reference.tensorwise")
    with pytest.raises(InvalidFile, match="belongs to a run of another config: plan was"):
        train(replace(run, steps=6), resume=True)


def test_a_plan_for_serving_trains_nothing(planted, tmp_path):
    plan = write_plan(tmp_path, train(config(planted, steps=1)).model, goal=Goal.SERVING)
    with pytest.raises(InvalidInput, match="is a plan for serving: loka plan RUN --goal training"):
        train(config(planted, plan=plan))


def test_a_run_without_either_has_the_identity_it_always_had(planted):
    assert {"mods", "plan"}.isdisjoint(config(planted).identity("cpu"))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"plan": ""}, InvalidInput, "plan is empty: name the folder of a plan"),
        ({"plan": "/nowhere/plan.json"}, InvalidInput, "there is no plan at /nowhere/plan.json: make one with `loka plan RUN`"),
        ({"mods": ("blok_norm",)}, UnknownName, "no mod is called 'blok_norm'. Did you mean 'block_norm'"),
    ],
)
def test_mistakes_get_a_message(planted, changes, error, message):
    with pytest.raises(error, match=message):
        train(config(planted, **changes))
