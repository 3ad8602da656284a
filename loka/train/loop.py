"""``train``: open the data, build the model, and go through the batches; ``evaluate``: score a model on held-out ones."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import torch

from loka.core.errors import InvalidInput
from loka.data.batch import Batch
from loka.data.dataset import Dataset, open_dataset
from loka.dispatch.guard import GuardEvent
from loka.models.recommender import Recommender
from loka.models.registry import MODELS, build_model
from loka.train.adapt import adapt, guard_of
from loka.train.config import Precision, TrainConfig
from loka.train.metrics import Metrics, MetricSums
from loka.train.nonfinite import NonFiniteLoss, find_nonfinite, save_batch
from loka.train.precision import autocast, matmul_precision, resolve_device
from loka.train.progress import Progress, Silent
from loka.train.run_folder import LogRow, RunFolder
from loka.train.trainer import Trainer


@dataclass(frozen=True)
class TrainResult:
    """The outcome of a run: the trained model, and its quality on the stream it learned from and on held-out examples."""

    model: Recommender
    steps: int
    lifetime: Metrics  # of all predictions in training, each made before its example was learned from
    test: Metrics
    bad_rows: int  # malformed rows left out of the data


def train(config: TrainConfig, *, resume: bool = False, progress: Progress | None = None) -> TrainResult:
    """Train a model as ``config`` says and score it on the data set's held-out part.

    With ``resume`` a run that was stopped, even killed, continues from its newest checkpoint; on the CPU the result is the same
    to the bit as without the stop. Raises ``NonFiniteLoss`` when the loss is NaN or infinite.
    """
    progress = progress or Silent()
    device = resolve_device(config.device, config.precision)
    folder = None if config.out is None else RunFolder(config.out)
    # Mistakes first, before data that may take minutes to read.
    if folder and not resume:
        folder.refuse_if_taken()
    MODELS.get(config.model)
    with _own_random_numbers(config.seed, device), matmul_precision(config.precision):
        data = open_dataset(config.data, path=config.data_path, seed=config.seed, device=device, **config.data_options)
        steps = _steps(config, data)
        if next(data.test(config.batch_size), None) is None:
            raise InvalidInput(f"the data set {config.data!r} has no row left to score on: give it more, or train on fewer")
        config = replace(config, steps=steps)
        model = build_model(config.model, config.preset, data.schema, **config.model_options).to(device)
        adapt(model, config, data.train(config.batch_size))
        trainer, guard = Trainer(model, config), guard_of(model, config)
        with folder.begun(trainer) if folder else nullcontext():
            if guard:
                guard.resume(trainer.steps_done, folder.given_back() if folder else ())
            with progress:
                progress.start(trainer.steps_done, steps)
                if guard:
                    run_steps(trainer, data, steps, folder, progress, guard.step, guard.events)
                else:
                    run_steps(trainer, data, steps, folder, progress)
            test = evaluate(model, data.test(config.batch_size), config.precision)
            result = TrainResult(model, trainer.steps_done, trainer.lifetime.metrics(), test, data.bad_rows)
            if folder:
                folder.write_summary(
                    {
                        "steps": result.steps,
                        "lifetime": result.lifetime,
                        "test": result.test,
                        "bad_rows": result.bad_rows,
                        "config": asdict(config),
                    }
                )
    return result


def run_steps(
    trainer: Trainer,
    data: Dataset,
    steps: int,
    folder: RunFolder | None,
    progress: Progress,
    around_step: Callable[[], AbstractContextManager[None]] = nullcontext,
    events: Sequence[GuardEvent] = (),
) -> None:
    """Train from where ``trainer`` stands up to ``steps``, each step inside ``around_step()``, with metrics and checkpoints.

    Events that join ``events`` meanwhile are written with the next line of metrics.
    """
    config = trainer.config
    clock, n_told = _Clock(), len(events)
    untimed = trainer.window.examples  # of the first window, if its beginning was trained before a checkpoint
    for batch in islice(data.train(config.batch_size, start=trainer.steps_done), max(0, steps - trainer.steps_done)):
        with around_step():
            trainer.step(batch)
        progress.step()
        is_last = trainer.steps_done == steps
        is_saved = folder is not None and (is_last or trainer.steps_done % config.checkpoint_every == 0)
        # A resumed run reads from the metrics which sites were given back before its checkpoint.
        if is_last or trainer.steps_done % config.log_every == 0 or (is_saved and len(events) > n_told):
            _check_finite(trainer, data)
            row = replace(_close_window(trainer, clock, untimed), given_back=tuple(events[n_told:]))
            n_told, untimed = len(events), 0
            progress.log(row)
            if folder:
                folder.append(row)
        if folder and is_saved:
            with clock.paused():
                _check_finite(trainer, data)
                folder.save(trainer)


def evaluate(model: Recommender, batches: Iterable[Batch], precision: Precision = Precision.FP32) -> Metrics:
    """Score ``model`` on ``batches``, which must be on its device. Leaves the model in the mode it was in."""
    device = next(model.parameters()).device
    was_training = model.training
    sums = MetricSums(device)
    model.eval()
    try:
        with torch.no_grad(), autocast(precision, device):
            for batch in batches:
                sums.add(model(batch), batch.label_B, batch.teacher_logit_B)
    finally:
        model.train(was_training)
    if not sums.examples:
        raise InvalidInput("there is nothing to evaluate on: the batches hold no example")
    return sums.metrics()


def _steps(config: TrainConfig, data: Dataset) -> int:
    steps = config.steps or data.batches_per_epoch(config.batch_size)
    if not steps:
        raise InvalidInput(f"the data set {config.data!r} never ends: say how many steps to train, e.g. --steps 500")
    return steps


def _close_window(trainer: Trainer, clock: "_Clock", untimed: int) -> LogRow:
    window = trainer.window.metrics()
    trainer.lifetime.merge(trainer.window)
    trainer.window.reset()
    return LogRow(trainer.steps_done, window, trainer.lifetime.metrics(), (window.examples - untimed) / clock.lap())


def _check_finite(trainer: Trainer, data: Dataset) -> None:
    step = trainer.loss_watch.first_bad_step()
    if step is None:
        return
    config = trainer.config
    batch = next(data.train(config.batch_size, start=step))
    with autocast(config.precision, trainer.device):
        where = find_nonfinite(trainer.model, batch)
    batch_file = Path(config.out) / f"batch-of-step-{step + 1}.safetensors" if config.out else None
    if batch_file:
        save_batch(batch_file, batch)
    raise NonFiniteLoss(step, where, batch_file)


@contextmanager
def _own_random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch for the block, and restore the caller's random state after it."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


class _Clock:
    """Seconds between laps, without those paused."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        seconds, self._start = now - self._start, now
        return seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self._start += time.perf_counter() - before
