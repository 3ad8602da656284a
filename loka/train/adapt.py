"""What LoKA does to a built-in model before it trains: Mods, a plan, and a Guard that watches it."""

from collections.abc import Iterator
from pathlib import Path

from torch import nn

from loka.core.errors import InvalidInput
from loka.core.plan import Goal, Plan
from loka.core.record import Record
from loka.core.record_file import FILE as RECORD_FILE
from loka.data.batch import Batch
from loka.dispatch.apply import apply_plan
from loka.dispatch.differences import has_fingerprint
from loka.dispatch.guard import Guard
from loka.dispatch.swap import applied_to
from loka.models.recommender import Recommender
from loka.mods.apply import apply_mods
from loka.train.config import TrainConfig


def adapt(model: Recommender, config: TrainConfig, batches: Iterator[Batch]) -> None:
    """Apply ``config.mods`` and ``config.plan`` in place; call it before the optimizers are made. Without them, do nothing.

    The plan may be of the whole model or of its dense part, whichever was probed.
    """
    if not config.mods and not config.plan:
        return
    batch = next(batches)
    of_dense_part = model.dense_inputs(batch)
    if config.mods:
        apply_mods(model.dense_part, config.mods, example=of_dense_part)
    if config.plan:
        plan = Plan.load(config.plan)
        if plan.document.goal is not Goal.TRAINING:
            raise InvalidInput(f"{config.plan} is a plan for serving: loka plan RUN --goal training makes one to train by")
        probed: nn.Module = model.dense_part if has_fingerprint(model.dense_part, plan.document.fingerprint) else model
        apply_plan(probed, plan, example=of_dense_part if probed is model.dense_part else (batch,))


def guard_of(model: Recommender, config: TrainConfig) -> Guard | None:
    """The Guard of a planned run; None where no Record lies beside the plan."""
    if not config.plan or not config.guard_every:
        return None
    folder = Path(config.plan).parent if Path(config.plan).is_file() else Path(config.plan)
    if not (folder / RECORD_FILE).exists():
        return None
    probed = model.dense_part if applied_to(model.dense_part) else model
    return Guard(probed, Record.load(folder), every=config.guard_every)
