"""``loka bench model`` in less time: arms are made ready side by side, each in a process of its own, and timed one at a time.

Most of the time goes to compiling, which takes one core. Steps of an arm and of the baseline are still taken in turn, though in
two processes: while one runs, all others wait. Surveys, which time kernels, are made with nothing beside them. But kernels that
a library tunes by itself are tuned while other arms use the GPU too.
"""

import math
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Failure:
    """Why an arm has no row."""

    reason: str
    crowded: bool = False  # it ran out of memory or time, or its process was lost: alone it may run
    of_baseline: bool = False  # its baseline failed, so there is nothing to compare it with

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        return cls(reason_of(error), crowded=is_of_memory(error) or isinstance(error, WorkerLost))


class ArmFailed(KernelUnavailable):
    """``failure`` is what the arm's process reported."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class BaselineLost(ArmFailed):
    """A baseline failed, so there is nothing to compare arms with."""


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
Wanted = tuple[Cell, ModelArm]


def measure_side_by_side(
    bench: ModelBench, wanted: Mapping[Cell, Sequence[ModelArm]], *, workers: int, budget_s: float = math.inf
) -> Iterator[tuple[Cell, str, Row]]:
    """The rows of every cell as ``ModelBench.measure`` gives them. ``workers`` arms at once are in memory, of one cell or of
    several, beside the baselines of these cells.

    An arm that runs out of memory or time, or whose process is lost or its baseline's, is tried again alone, with its baseline.
    A cell whose baseline fails then too has no more rows, and BaselineLost is raised behind those of the others. After
    ``budget_s`` nothing more is begun.
    """
    if workers < 1:
        raise InvalidInput(f"workers must be at least 1 here, got {workers}")
    begin = time.monotonic()
    tried_alone: set[Wanted] = set()
    lost: dict[Cell, str] = {}  # whose baseline cannot run, and why
    in_order = [(cell, arm) for cell, arms in wanted.items() for arm in arms]
    groups = deque(in_order[first : first + workers] for first in range(0, len(in_order), workers))
    with ExitStack() as held:
        crew = Crew(bench, Path(held.enter_context(tempfile.TemporaryDirectory())))
        held.callback(crew.keep_baselines, ())
        while groups and time.monotonic() - begin <= budget_s:
            group = [one for one in groups.popleft() if one[0] not in lost]
            again: list[Wanted] = []
            for one, row in crew.rows(group):
                cell, arm = one
                if not isinstance(row, Failure):
                    yield cell, arm.name, row
                elif row.crowded and (len(group) > 1 or row.of_baseline) and one not in tried_alone:
                    again.append(one)
                elif row.of_baseline:
                    lost[cell] = row.reason
                else:
                    yield cell, arm.name, {"failed": row.reason}
            tried_alone.update(again)
            groups.extendleft([one] for one in reversed(again))
    if lost:
        told = "; ".join(f"{cell}: {reason}" for cell, reason in lost.items())
        raise BaselineLost(Failure(f"without {BASELINE} there is nothing to compare with ({told})", of_baseline=True))


class Crew:
    """Processes that make arms ready side by side. A cell's baseline stays in memory for the arms of the next group."""

    def __init__(self, bench: ModelBench, surveys: Path) -> None:
        self._bench, self._surveys = bench, surveys
        self._baselines: dict[Cell, tuple[ArmWorker, ExitStack]] = {}
        self._timed: set[Cell] = set()  # whose baselines have their rows

    def rows(self, group: Sequence[Wanted]) -> Iterator[tuple[Wanted, Row | Failure]]:
        """Make all arms of ``group`` ready side by side, then time them one by one."""
        of_cell: dict[Cell, list[ModelArm]] = {cell: [] for cell, _ in group}
        for cell, arm in group:
            if arm.name != BASELINE:
                of_cell[cell].append(arm)
        self.keep_baselines(of_cell)
        unsurveyed = {(cell, arm): failure for cell, arm in group if arm.is_planned and (failure := self._survey(cell, arm))}
        for cell in of_cell:
            if cell not in self._baselines:
                process = ExitStack()
                self._baselines[cell] = self._start(cell, ARMS[BASELINE], process), process
        _wait(worker for worker, _ in self._baselines.values())  # captured before arms take their memory
        with ExitStack() as held:
            surveyed = [(cell, arm) for cell, arms in of_cell.items() for arm in arms if (cell, arm) not in unsurveyed]
            crew = {wanted: self._start(*wanted, held) for wanted in surveyed}
            _wait(crew.values())
            for cell, left in of_cell.items():
                try:
                    base = _remote(self._baselines[cell][0], is_baseline=True)
                    if cell not in self._timed:
                        yield (cell, ARMS[BASELINE]), self._bench.row(ARMS[BASELINE], base, base)
                        self._timed.add(cell)
                    while left:
                        wanted = cell, left[0]
                        row = unsurveyed.get(wanted) or _row(self._bench, left[0], crew[wanted], base)
                        del left[0]
                        yield wanted, row
                except BaselineLost as error:
                    self._drop_baseline(cell)
                    for arm in left or [ARMS[BASELINE]]:
                        yield (cell, arm), replace(error.failure, of_baseline=True)

    def keep_baselines(self, cells: Collection[Cell]) -> None:
        """Stop all but those of ``cells``."""
        for cell in [held for held in self._baselines if held not in cells]:
            self._drop_baseline(cell)

    def _drop_baseline(self, cell: Cell) -> None:
        self._baselines.pop(cell)[1].close()

    def _survey(self, cell: Cell, arm: ModelArm) -> Failure | None:
        """Save the survey of a planned arm; returns why that failed, or None."""
        try:
            self._bench.survey(cell, arm).save(self._surveys / self._bench.name_of_survey(cell, arm))
        except Exception as error:  # as for any arm: the others go on
            return Failure.of(error)
        finally:
            release_memory(self._bench.device)
        return None

    def _start(self, cell: Cell, arm: ModelArm, held: ExitStack) -> ArmWorker:
        kernels = None if self._bench.kernels is None else tuple(self._bench.kernels)
        job = Job(cell, arm.name, str(self._bench.device), self._surveys, kernels, torch.get_num_threads())
        worker = Worker(_made_ready, job, limit_s=None if arm.name == BASELINE else READY_LIMIT_S)
        held.callback(worker.stop)
        return worker


def _wait(workers: Iterable[ArmWorker]) -> None:
    """Until each is ready; one that is lost says so when it is asked."""
    for worker in workers:
        with suppress(WorkerLost):
            worker.wait_until_ready()


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
                raise BaselineLost(Failure.of(error)) from error
            raise

    facts = call(_facts)
    if isinstance(facts, Failure):
        raise (BaselineLost if is_baseline else ArmFailed)(facts)
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
