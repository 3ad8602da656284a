"""``loka bench model`` in less time: arms are made ready side by side, each in a process of its own, and timed one at a time.

Most of the time goes to compiling, which takes one core. Steps of an arm and of the baseline are still taken in turn, though in
two processes: while one runs, all others wait. The baseline, and surveys, which time kernels, are made with nothing beside
them. But kernels that a library tunes by itself are tuned while other arms use the GPU too.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from loka.core.errors import InvalidInput, KernelUnavailable
from loka.measure.failure import is_of_memory, reason_of
from loka.measure.side_by_side import Worker, WorkerLost
from loka.train.model_arms import ARMS, BASELINE, ModelArm
from loka.train.model_bench import Cell, ModelBench, Ready, release_memory
from loka.train.step_timer import StepTimer

READY_LIMIT_S = 420.0  # for an arm to be built and compiled, beside others; an InterFormer takes up to 300

Result = TypeVar("Result")


class BaselineLost(WorkerLost):
    """The baseline's process is lost, so no arm can be compared with anything."""


@dataclass(frozen=True)
class Failure:
    """Why an arm has no row."""

    reason: str
    crowded: bool = False  # it ran out of memory or time, or its process was lost: alone it may run

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        return cls(reason_of(error), crowded=is_of_memory(error) or isinstance(error, WorkerLost))


class ArmFailed(KernelUnavailable):
    """``failure`` is what the arm's process reported."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


@dataclass(frozen=True)
class Job:
    """What a process is to make ready. It gets an arm's name: a function without a name cannot be sent to a process."""

    cell: Cell
    arm: str
    device: str
    surveys: Path
    kernels: tuple[str, ...] | None
    threads: int  # those that the surveys were made with


ArmWorker = Worker[Job, Ready | Failure]
Row = dict[str, Any]
Start = Callable[[ModelArm, ExitStack], ArmWorker]


def measure_side_by_side(bench: ModelBench, cell: Cell, arms: Sequence[ModelArm], *, workers: int) -> Iterator[tuple[str, Row]]:
    """The rows of ``cell`` as ``ModelBench.measure`` gives them. ``workers`` arms at once are in memory, beside the baseline.
    An arm that runs out of memory or time, or whose process is lost, is tried again alone. A lost baseline ends the cell."""
    if workers < 1:
        raise InvalidInput(f"workers must be at least 1 here, got {workers}")
    with ExitStack() as held:
        surveys = Path(held.enter_context(tempfile.TemporaryDirectory()))
        start = partial(_start, bench, cell, surveys)
        base = _remote(start(ARMS[BASELINE], held), is_baseline=True)
        yield BASELINE, bench.row(ARMS[BASELINE], base, base)
        for first in range(0, len(arms), workers):
            group, again = arms[first : first + workers], []
            for arm, row in _rows_of_group(bench, cell, group, base, start, surveys):
                if isinstance(row, Failure) and row.crowded and len(group) > 1:
                    again.append(arm)
                else:
                    yield arm.name, _as_told(row)
            for alone in again:
                for arm, row in _rows_of_group(bench, cell, [alone], base, start, surveys):
                    yield arm.name, _as_told(row)


def _as_told(row: Row | Failure) -> Row:
    """The row as results hold it."""
    return {"failed": row.reason} if isinstance(row, Failure) else row


def _rows_of_group(
    bench: ModelBench, cell: Cell, arms: Sequence[ModelArm], base: Ready, start: Start, surveys: Path
) -> Iterator[tuple[ModelArm, Row | Failure]]:
    """Make all arms of a group ready side by side, then time them one by one."""
    surveyed = {arm: _survey(bench, cell, arm, surveys) for arm in arms if arm.is_planned}
    unsurveyed = {arm: failure for arm, failure in surveyed.items() if failure}
    with ExitStack() as held:
        crew = {arm: start(arm, held) for arm in arms if arm not in unsurveyed}
        for worker in crew.values():
            with suppress(WorkerLost):
                worker.wait_until_ready()
        for arm in arms:
            yield arm, _row(bench, arm, crew[arm], base) if arm in crew else unsurveyed[arm]


def _survey(bench: ModelBench, cell: Cell, arm: ModelArm, surveys: Path) -> Failure | None:
    """Save the survey of a planned arm in ``surveys``; returns why that failed, or None."""
    try:
        bench.survey(cell, arm).save(surveys / bench.name_of_survey(cell, arm))
    except Exception as error:  # as for any arm: the others go on
        return Failure.of(error)
    finally:
        release_memory(bench.device)
    return None


def _start(bench: ModelBench, cell: Cell, surveys: Path, arm: ModelArm, held: ExitStack) -> ArmWorker:
    kernels = None if bench.kernels is None else tuple(bench.kernels)
    job = Job(cell, arm.name, str(bench.device), surveys, kernels, torch.get_num_threads())
    worker = Worker(_made_ready, job, limit_s=None if arm.name == BASELINE else READY_LIMIT_S)
    held.callback(worker.stop)
    return worker


def _row(bench: ModelBench, arm: ModelArm, worker: ArmWorker, base: Ready) -> Row | Failure:
    try:
        return bench.row(arm, _remote(worker), base)
    except BaselineLost:
        raise
    except ArmFailed as error:
        return error.failure
    except Exception as error:  # as for any arm: the others go on
        return Failure.of(error)


def _remote(worker: ArmWorker, *, is_baseline: bool = False) -> Ready:
    """An arm in another process as if it were in this one; its calls raise WorkerLost if that process is gone."""

    def call(function: Callable[[Ready | Failure], Result]) -> Result:
        try:
            return worker.call(function)
        except WorkerLost as error:
            if is_baseline:
                raise BaselineLost(str(error)) from error
            raise

    facts = call(_facts)
    if isinstance(facts, Failure):
        raise ArmFailed(facts)
    did, ready_s, peak_bytes, is_graph = facts
    return Ready(StepTimer(partial(call, _step_us), is_graph), partial(call, _shares), did, ready_s, peak_bytes)


# What the processes run.


def _made_ready(job: Job) -> Ready | Failure:
    torch.set_num_threads(job.threads)
    bench = ModelBench(torch.device(job.device), surveys=job.surveys, kernels=job.kernels)
    try:
        return bench.ready(job.cell, ARMS[job.arm])
    except Exception as error:  # libraries raise all kinds
        return Failure.of(error)
    finally:
        torch.cuda.empty_cache()  # memory that compiling held goes to the other processes


def _facts(ready: Ready | Failure) -> tuple[str, float, int | None, bool] | Failure:
    if isinstance(ready, Failure):
        return ready
    return ready.did, ready.ready_s, ready.peak_bytes, ready.timer.is_graph


def _step_us(ready: Ready | Failure) -> float:
    assert isinstance(ready, Ready)
    return ready.timer.run()


def _shares(ready: Ready | Failure) -> dict[str, float] | None:
    assert isinstance(ready, Ready)
    return ready.shares
