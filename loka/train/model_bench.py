"""How fast is a whole model? ``loka bench model``: each arm's training step or serving call, timed beside compiled bf16.

A training step is forward, backward and both optimizers, embeddings and metrics included; serving is look-up and forward.
On a GPU the dense part is compiled for the batch size and the whole is replayed as a CUDA graph, so that no launch from the
host is timed. Arm and baseline take turns step by step, and the speed-up is the ratio of their medians.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loka.core.plan import Goal
from loka.core.survey import Survey
from loka.data.batch import Batch
from loka.data.dataset import open_dataset
from loka.measure.failure import reason_of
from loka.measure.survey import measure
from loka.models.recommender import Recommender
from loka.models.registry import build_model
from loka.mods.apply import apply_mods
from loka.train.config import Precision, TrainConfig
from loka.train.loka_plan import record_run
from loka.train.model_arms import ARMS, BASELINE, ModelArm, Subject
from loka.train.precision import matmul_precision
from loka.train.step_profile import profile_calls
from loka.train.step_timer import StepTimer, step_timer, take_turns
from loka.train.trainer import Trainer

TIMED_STEPS = 20
PROBED_STEPS = 4
PROFILED_STEPS = 3


@dataclass(frozen=True)
class Cell:
    """One row of the table: what all its arms run."""

    model: str
    preset: str
    batch_size: int
    goal: Goal

    def __str__(self) -> str:
        return f"{self.model}/{self.preset}/{self.batch_size}/{self.goal}"


@dataclass(frozen=True)
class Ready:
    """An arm that was built, prepared and run, and can be timed."""

    timer: StepTimer
    profile: Callable[[], dict[str, float] | None]  # each kind's share of a step's kernel time; None if that is not sound
    did: str
    ready_s: float  # seconds to build, plan and compile it, alone or beside other arms
    peak_bytes: int | None  # of its weights, states and activations; None on the CPU

    @cached_property
    def shares(self) -> dict[str, float] | None:
        return self.profile()


class ModelBench:
    """Times arms on one device. A survey made for training is used for serving the same model too, and if it is kept in a
    folder ``surveys``, in later calls."""

    def __init__(
        self,
        device: torch.device,
        *,
        timed_steps: int = TIMED_STEPS,
        surveys: Path | None = None,
        kernels: Sequence[str] | None = None,
    ) -> None:
        """``kernels`` are those that plans choose from, beside blocks; all if not given."""
        self.device = device
        self.timed_steps = timed_steps
        self.surveys, self.kernels = surveys, kernels
        self.data = open_dataset("synthetic", device=device, test_examples=1)
        self._surveys: dict[str, Survey] = {}

    def measure(
        self, cell: Cell, arms: Iterable[ModelArm], base: ModelArm = ARMS[BASELINE]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """The row of ``base``, then each other arm's; one that cannot run has ``failed`` with the reason instead, never fatal.

        The base stays in memory, captured, so that every arm is timed beside it.
        """
        baseline = self.ready(cell, base)
        yield base.name, self.row(base, baseline, baseline)
        for arm in (arm for arm in arms if arm != base):
            try:
                yield arm.name, self.row(arm, self.ready(cell, arm), baseline)
            except Exception as error:  # libraries raise all kinds: whatever it is, the other arms go on
                yield arm.name, {"failed": reason_of(error)}
        del baseline
        release_memory(self.device)

    def row(self, arm: ModelArm, ready: Ready, baseline: Ready) -> dict[str, Any]:
        """What the results hold of an arm: its time and the baseline's, taken in turn, and where the time of each goes."""
        timers = {"baseline": baseline.timer} | ({} if ready is baseline else {"arm": ready.timer})
        times = take_turns(timers, rounds=self.timed_steps)
        time_of_arm, time_of_base = times.get("arm", times["baseline"]), times["baseline"]
        row: dict[str, Any] = {
            "time_us": asdict(time_of_arm),
            "baseline_us": time_of_base.median_us,
            "speedup": time_of_base.median_us / time_of_arm.median_us,
            "is_graph": ready.timer.is_graph,
            "did": ready.did,
            "ready_s": ready.ready_s,
            "peak_bytes": ready.peak_bytes,
        }
        if ready is baseline or arm.is_planned:
            row["shares"] = ready.shares
        if ready is not baseline:  # the baseline's own row may be from another day, and another state of the code
            row["baseline_shares"] = baseline.shares
        return row

    def ready(self, cell: Cell, arm: ModelArm) -> Ready:
        """Build the model, do what the arm asks, compile it and run it twice."""
        begin, on_cuda = time.perf_counter(), self.device.type == "cuda"
        batches = list(islice(self.data.train(cell.batch_size), 2))
        release_memory(self.device)
        survey = self.survey(cell, arm) if arm.is_planned else None
        release_memory(self.device)
        before = torch.cuda.memory_allocated(self.device) if on_cuda else 0
        trains = cell.goal is Goal.TRAINING
        trainer = self._trainer(cell, arm) if trains else None  # its optimizers would keep weights that serving drops
        model = trainer.model if trainer else self._model(cell, arm)
        dtype = torch.float32 if trains or arm.precision is not Precision.BF16 else torch.bfloat16
        if not trains:
            model.eval()
            model.dense_part.to(dtype)
        example = dense_arguments(model, batches[0], dtype)
        did = arm.prepare(Subject(model.dense_part, example, cell.goal, survey))
        if on_cuda:
            model.dense_part.compile(dynamic=False)
            torch.cuda.reset_peak_memory_stats(self.device)  # without what preparing took; compiling adds to no step's memory
        call = partial(trainer.step, batches[0]) if trainer else serving_call(model, batches[0], dtype)
        step = partial(_in_precision, arm.precision, call)
        for _ in range(2):  # the first makes the optimizers' states
            step()
        peak = torch.cuda.max_memory_allocated(self.device) - before if on_cuda else None
        profile = partial(_shares, step, model, cell.batch_size, on_cuda)
        return Ready(step_timer(step, self.device), profile, did, time.perf_counter() - begin, peak)

    def _trainer(self, cell: Cell, arm: ModelArm) -> Trainer:
        config = TrainConfig(
            cell.model,
            cell.preset,
            batch_size=cell.batch_size,
            lr=1e-5,  # the same batch again and again: keep the weights where they are
            warmup_steps=0,
            precision=arm.precision,
            device=str(self.device),
            out=None,
        )
        trainer = Trainer(self._model(cell, arm), config)
        for group in trainer.dense_optimizer.param_groups:
            group["capturable"] = self.device.type == "cuda"
        return trainer

    def _model(self, cell: Cell, arm: ModelArm) -> Recommender:
        torch.manual_seed(0)
        with torch.device(self.device):  # first weights made in place: a large model's would take minutes on the CPU
            model = build_model(cell.model, cell.preset, self.data.schema)
        if arm.mods:
            apply_mods(model.dense_part, arm.mods, example=model.dense_inputs(next(self.data.train(64))))
        return model

    def name_of_survey(self, cell: Cell, arm: ModelArm) -> str:
        return "-".join((cell.model, cell.preset, str(cell.batch_size), *arm.mods, *(self.kernels or ())))

    def survey(self, cell: Cell, arm: ModelArm) -> Survey:
        """The survey of the arm's model, from a copy that is gone when kernels are measured: errors of wide layers take much
        memory."""
        name = self.name_of_survey(cell, arm)
        if name not in self._surveys:
            folder = None if self.surveys is None else self.surveys / name
            if folder is not None and (folder / "survey.json").exists():
                self._surveys[name] = Survey.load(folder)
            else:
                steps = islice(cycle(islice(self.data.train(cell.batch_size), 2)), PROBED_STEPS)
                record = record_run(self._trainer(cell, arm), steps, every=2)
                release_memory(self.device)
                self._surveys[name] = measure(record, kernels=self.kernels, device=self.device, out=folder)
        return self._surveys[name]


def _shares(step: Callable[[], object], model: Recommender, batch_size: int, compiled: bool) -> dict[str, float] | None:
    profile = profile_calls(step, model, batch_size, compiled=compiled, timed=5, profiled=PROFILED_STEPS)
    return {str(kind): share for kind, share in profile.shares.items()} if profile.is_sound else None


def _in_precision(precision: Precision, call: Callable[[], object]) -> None:
    with matmul_precision(precision):
        call()


def serving_call(model: Recommender, batch: Batch, dtype: torch.dtype) -> Callable[[], object]:
    def serve() -> Tensor:
        with torch.no_grad():
            return model.dense_part(*dense_arguments(model, batch, dtype)).float()

    return serve


def dense_arguments(model: Recommender, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What the dense part reads of ``batch``; floating tensors in ``dtype``."""
    return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in model.dense_inputs(batch))


def release_memory(device: torch.device) -> None:
    torch._dynamo.reset()  # each shape is compiled for itself, not as a dynamic version of the one before
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
