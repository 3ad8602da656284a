"""What LoKA does to a built-in model before it trains: Mods, and a plan."""

from collections.abc import Iterator

import torch
from torch import nn

from loka.core.plan import Plan
from loka.data.batch import Batch
from loka.dispatch.apply import apply_plan
from loka.dispatch.differences import is_plan_of
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
    with torch.no_grad():
        of_dense_part = (batch.dense_BD, *model.embeddings(batch))
    if config.mods:
        apply_mods(model.dense_part, config.mods, example=of_dense_part)
    if config.plan:
        plan = Plan.load(config.plan)
        probed: nn.Module = model.dense_part if is_plan_of(model.dense_part, plan) else model
        apply_plan(probed, plan, example=of_dense_part if probed is model.dense_part else (batch,))
