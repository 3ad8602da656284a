"""Train a Workload for a while under the Probe."""

import math
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from loka.core.errors import InvalidInput
from loka.core.progress import Progress, Silent, is_read
from loka.core.record import Record
from loka.core.workload import Workload
from loka.mods.apply import apply_mods
from loka.nn.kept_state import left_as_it_was
from loka.nn.unwrap import Arguments
from loka.probe.probe import Probe
from loka.train.optim import RowWiseAdagrad, make_dense_optimizer

LR, EMBEDDING_LR = 1e-3, 0.05  # those of `loka train`
TABLES = (nn.Embedding, nn.EmbeddingBag)


class Probed(NamedTuple):
    record: Record
    ended_by: BaseException | None  # an error, an interrupt, or a pipe that nobody reads any more


def probe_workload(
    workload: Workload,
    *,
    steps: int = 200,
    every: int = 10,
    mods: Sequence[str] = (),
    progress: Progress | None = None,
) -> Probed:
    """Make ``mods`` on ``workload``, train it for ``steps`` steps, and return what the Probe learned.

    Batches start over when they end; an iterator's cannot, and end the training. So does an interrupt, a closed pipe behind the
    output, or an error: what was learned so far is returned with it, unless the weights are no numbers any more. An error
    before anything was learned is raised.
    """
    if steps < 1:
        raise InvalidInput(f"steps must be at least 1, got {steps}")
    progress = progress or Silent()
    model, batches = workload.model.train(), _endless(workload)
    if mods:
        first = next(batches)
        batches = chain([first], batches)
        changes = apply_mods(model, mods, example=_first_call(workload, first))
        progress.say(str(changes))
    probe = Probe(model, every=every)
    progress.say(f"memory of the Probe: {probe.memory}")
    optimizers: list[torch.optim.Optimizer] = []
    try:
        with progress:
            progress.start(math.ceil(steps / every))
            for step, batch in enumerate(islice(batches, steps)):
                with probe.step():
                    loss = _loss(workload, batch)
                    is_shown = step % every == 0
                    value = _finite(loss, step) if is_shown or loss.device.type == "cpu" else None  # a GPU is not waited for
                    loss.backward()
                optimizers = optimizers or _make_optimizers(model)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                if is_shown:
                    progress.advance(f"step {step + 1} of {steps}, loss {value:.4g}")
        if probe.steps_seen < steps:
            progress.say(f"the batches ended after {probe.steps_seen} of {steps} steps, and cannot be iterated anew")
        return Probed(probe.record(), None)
    except (Exception, KeyboardInterrupt) as stop:
        if probe.steps_seen <= 1:  # nothing is known yet
            raise
        record = probe.record()
        if broken := [site.name for site in record.sites.values() if site.was_called and not site.weight_NK.isfinite().all()]:
            raise InvalidInput(
                f"the weights of {', '.join(broken[:3])} are NaN or infinite after step {probe.steps_seen}, so that no Record "
                f"is made: what such a model computes says nothing. It was stopped by {stop!r}"
            ) from stop
        if is_read(sys.stdout):
            progress.say(f"stopped at step {probe.steps_seen} of {steps}")
        return Probed(record, stop)
    finally:
        probe.detach()


def _endless(workload: Workload) -> Iterator[Any]:
    was_any = False
    while True:
        count = 0
        for count, batch in enumerate(workload.batches, start=1):  # noqa: B007
            yield batch
        if was_any and not count:
            return  # they were an iterator: what was learned of them is kept
        was_any = True
        if not count:
            raise InvalidInput("the workload's batches are empty: give a list, a DataLoader, or whatever can be iterated anew")


def _loss(workload: Workload, batch: Any) -> Tensor:
    loss = workload.loss(workload.model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise InvalidInput(f"the workload's loss(model, batch) returned {shape}: it must be a scalar tensor, such as a mean")
    if not loss.requires_grad:
        raise InvalidInput("the workload's loss cannot be differentiated: no gradient reaches the model's parameters from it")
    return loss


def _finite(loss: Tensor, step: int) -> float:
    value = loss.item()
    if not math.isfinite(value):
        raise InvalidInput(
            f"the loss of step {step + 1} is {value}: look for NaN in its batch, or for an empty one; what a Probe would learn "
            f"from here on is of no use"
        )
    return value


def _make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Adam, and row-wise Adagrad for embedding tables with sparse gradients, which Adam does not take.

    A table that the first batch does not read has no gradient yet: then its module says whether that will be sparse.
    """
    declared = {id(module.weight) for module in model.modules() if isinstance(module, TABLES) and module.sparse}
    learned = [p for p in model.parameters() if p.requires_grad]
    sparse = [p for p in learned if id(p) in declared or (p.grad is not None and p.grad.is_sparse)]
    dense = nn.ParameterList(p for p in learned if not any(p is table for table in sparse))
    optimizers: list[torch.optim.Optimizer] = [RowWiseAdagrad(sparse, EMBEDDING_LR)] if sparse else []
    return [*optimizers, make_dense_optimizer(dense, LR, weight_decay=0.0)] if len(dense) else optimizers


def _first_call(workload: Workload, batch: Any) -> Arguments | None:
    """The arguments of the model's first call on ``batch``."""
    calls: list[Arguments] = []

    def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(Arguments(args, kwargs))

    handle = workload.model.register_forward_pre_hook(remember, with_kwargs=True)
    try:
        with torch.no_grad(), left_as_it_was(workload.model):
            workload.loss(workload.model, batch)
    finally:
        handle.remove()
    return calls[0] if calls else None
