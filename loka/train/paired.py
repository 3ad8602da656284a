"""Paired runs: arms that start from the same weights and see the same batches, so that their differences are the arms' doing.

A run is an arm together with everything else that decides its numbers.
"""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from loka.core.estimate import Estimate
from loka.core.plan import Plan
from loka.data.dataset import Dataset, open_dataset
from loka.dispatch.apply import apply_plan
from loka.models.recommender import Recommender
from loka.models.registry import build_model
from loka.mods.apply import apply_mods
from loka.numerics.confidence import estimate_mean
from loka.train.config import TrainConfig
from loka.train.fp8_everywhere import apply_everywhere
from loka.train.loop import evaluate
from loka.train.precision import matmul_precision, resolve_device
from loka.train.quality_settings import Arm
from loka.train.trainer import Trainer

POINTS = 100  # of a run's trajectory
TEST_BATCH = 4096
MODS_AS_OF = 2  # raised when Mods make another model than before: no_bias leaves alone the layers that read the model's inputs
PLANS_AS_OF = 4  # raised when plans are made otherwise: a forward pass that costs too much goes to a finer 8-bit format first


@dataclass(frozen=True)
class Run:
    config: TrainConfig  # its precision is the arm's
    arm: Arm
    plan: str | None = None  # folder of the plan, for an arm that has one

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the run's numbers, in the form in which a results file gives it back."""
        device_type = self.config.device.partition(":")[0]
        mods = {"mods_as_of": MODS_AS_OF} if self.arm.mods else {}
        plans = {"plans_as_of": PLANS_AS_OF} if self.arm.is_planned else {}
        arm = {name: value for name, value in asdict(self.arm).items() if name != "roles" or value}  # as before there were any
        return {**self.config.identity(device_type), **mods, **plans, "arm": json.loads(json.dumps(arm))}


def train_run(run: Run) -> dict[str, Any]:
    """Train and test once. A model in 8 bits is tested again with the same weights in high precision. A loss that is not finite
    ends the run: then ``nonfinite_step`` says when, and there is no ``test``."""
    config = run.config
    device = resolve_device(config.device, config.precision)
    data = dataset_of(config, device)
    steps = config.steps or data.batches_per_epoch(config.batch_size)
    assert steps is not None, f"{config.data} never ends, so its setting must say how many steps"
    with matmul_precision(config.precision):
        model, done = prepare(run, data, device)
        trainer = Trainer(model, replace(config, steps=steps))  # with an end, at which a learning rate may fall
        trajectory, seconds = _train(trainer, data, steps)
        row: dict[str, Any] = {
            "steps": steps,
            **done,
            "trajectory": trajectory,
            "samples_per_s": trainer.steps_done * config.batch_size / seconds,
        }
        bad_step = trainer.loss_watch.first_bad_step()
        if bad_step is not None:
            return row | {"nonfinite_step": bad_step}
        row["test"] = asdict(evaluate(model, data.test(TEST_BATCH), config.precision))
        if done["sites"]:
            high = _in_high_precision(run, model, data, device)
            row["test_in_high_precision"] = asdict(evaluate(high, data.test(TEST_BATCH), config.precision))
        return row


def _in_high_precision(run: Run, model: Recommender, data: Dataset, device: torch.device) -> Recommender:
    """The weights of ``model`` in a model that runs in high precision."""
    plain, _ = prepare(replace(run, arm=replace(run.arm, kernel=None), plan=None), data, device)
    plain.load_state_dict(model.state_dict())
    return plain


def prepare(run: Run, data: Dataset, device: torch.device) -> tuple[Recommender, dict[str, int]]:
    """The run's model after the arm's Mods, kernel or plan, and counts of what was done. Weights that arms of a seed share are
    the same in all."""
    config, arm = run.config, run.arm
    torch.manual_seed(config.seed)
    model = build_model(config.model, config.preset, data.schema, **config.model_options).to(device)
    example = example_of(model, data, config.batch_size)
    done = {"parameters": 0, "changes": 0, "sites": 0}
    if arm.mods:
        done["changes"] = len(apply_mods(model.dense_part, arm.mods, example=example).changes)
    done["parameters"] = sum(parameter.numel() for parameter in model.dense_part.parameters())
    if arm.kernel:
        done["sites"] = len(apply_everywhere(model.dense_part, example, arm.kernel).moved)
    if run.plan:
        plan = Plan.load(run.plan)
        apply_plan(model.dense_part, plan, example=example)
        done["sites"] = sum(site.is_low_precision for site in plan.sites)
    return model, done


def example_of(model: Recommender, data: Dataset, batch_size: int) -> tuple[Tensor, ...]:
    """The arguments of one call of the dense part."""
    return model.dense_inputs(next(data.train(batch_size)))


def _train(trainer: Trainer, data: Dataset, steps: int) -> tuple[list[tuple[int, float]], float]:
    """Mean training loss of each window of steps, before its examples were learned from; and the seconds that all took."""
    window = max(1, steps // POINTS)
    trajectory = []
    begin = time.perf_counter()
    for batch in islice(data.train(trainer.config.batch_size), steps):
        trainer.step(batch)
        if trainer.steps_done % window == 0:
            trajectory.append((trainer.steps_done, trainer.window.metrics().log_loss))  # waits for the device
            trainer.window.reset()
            if not math.isfinite(trajectory[-1][1]):
                break  # the optimizers hold still from here on
    return trajectory, time.perf_counter() - begin


def dataset_of(config: TrainConfig, device: torch.device) -> Dataset:
    """The run's data. The last two sets stay open, since the arms of a seed follow each other."""
    return _open(config.data, config.data_path, config.seed, str(device), json.dumps(config.data_options))


@lru_cache(maxsize=2)
def _open(name: str, path: str | None, seed: int, device: str, options: str) -> Dataset:
    return open_dataset(name, path=path, seed=seed, device=device, **json.loads(options))


def changes_in_percent(losses: Mapping[int, float], base: Mapping[int, float]) -> list[float]:
    """The relative change at each seed that both have; negative is better."""
    return [100 * (losses[seed] / base[seed] - 1) for seed in sorted(losses.keys() & base.keys())]


def change_in_percent(losses: Mapping[int, float], base: Mapping[int, float]) -> Estimate | None:
    """The mean of ``changes_in_percent`` with its 95 % interval (Student's t)."""
    changes = changes_in_percent(losses, base)
    return estimate_mean(changes) if changes else None


def describe_change(change: Estimate | None) -> str:
    if change is None:
        return ""
    if change.n == 1:
        return f"{change.mean:+.3f} % (one seed)"
    verdict = "" if change.low <= 0 <= change.high else (" worse" if change.mean > 0 else " better")
    return f"{change.mean:+.3f} % ± {(change.high - change.low) / 2:.3f}{verdict}"
