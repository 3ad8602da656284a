"""Mods and plans in a training run: applied before the optimizers, resumable to the same bits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loka.core.environment import current_environment
from loka.core.errors import InvalidFile, InvalidInput, UnknownName
from loka.core.estimate import Estimate
from loka.core.fingerprint import fingerprint
from loka.core.gemm import Role
from loka.core.plan import Choice, Goal, Plan, PlanDocument, SitePlan
from loka.core.recipe import Format
from loka.dispatch.planned import PlannedLinear
from loka.kernels.device import device_of
from loka.nn.block_norm import BlockNorm
from loka.train.config import TrainConfig
from loka.train.loop import train


def config(planted: str, **changes: object) -> TrainConfig:
    base = TrainConfig("wukong", "tiny", data=planted, batch_size=64, steps=8, log_every=4, device="cpu", out=None)
    return replace(base, **changes)  # type: ignore[arg-type]


def write_plan(folder: Path, model: torch.nn.Module, kernel: str = "reference.rowwise") -> str:
    """Every site but those of one output on ``kernel``."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    sites = []
    for name, module in linears.items():
        error = Estimate(0.08, 0.07, 0.09, 50) if module.out_features > 1 else None
        choice = Choice(kernel if error else "torch.fp32", "by hand", error)
        sites.append(SitePlan(name, module.in_features, module.out_features, dict.fromkeys(Role, choice), 2.0, 1.0, "by hand"))
    print_ = fingerprint((name, m.in_features, m.out_features, m.bias is not None) for name, m in linears.items())
    environment = current_environment(device_of(torch.device("cpu")))
    limits = dict.fromkeys(Role, 0.2)
    document = PlanDocument(print_, environment, Format.FP32, Goal.TRAINING, limits, 1.05, tuple(sites))
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


def test_a_run_without_either_has_the_identity_it_always_had(planted):
    assert {"mods", "plan"}.isdisjoint(config(planted).identity("cpu"))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"plan": "/nowhere/plan.json"}, InvalidInput, "there is no plan at /nowhere/plan.json: make one with `loka plan RUN`"),
        ({"mods": ("blok_norm",)}, UnknownName, "no mod is called 'blok_norm'. Did you mean 'block_norm'"),
    ],
)
def test_mistakes_get_a_message(planted, changes, error, message):
    with pytest.raises(error, match=message):
        train(config(planted, **changes))
