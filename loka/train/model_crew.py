"""``loka bench model`` in less time: arms are made ready side by side, each in a process of its own, and timed one at a time.

Compiling is most of the time, and takes one core. Steps of an arm and of the baseline are still taken in turn, though in two
processes: while one runs, the others wait. Surveys are made beforehand, alone, for they time kernels.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from loka.core.errors import KernelUnavailable
from loka.measure.side_by_side import Worker, WorkerLost
from loka.train.model_arms import ARMS, BASELINE, ModelArm
from loka.train.model_bench import Cell, ModelBench, Ready, reason_of, release_memory
from loka.train.step_timer import StepTimer


@dataclass(frozen=True)
class Job:
    """What a process makes ready; arms by name, for a process cannot be handed a function without one."""

    cell: Cell
    arm: str
    device: str
    surveys: Path
    kernels: tuple[str, ...] | None
    threads: int  # those that the surveys were made with


def measure_side_by_side(
    bench: ModelBench, cell: Cell, arms: Sequence[ModelArm], *, workers: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of ``cell`` as ``ModelBench.measure`` gives them. Beside the baseline ``workers`` arms at once are in memory."""
    with ExitStack() as held:
        surveys = Path(held.enter_context(tempfile.TemporaryDirectory()))
        unsurveyed = {arm.name: why for arm in arms if arm.is_planned and (why := _why_not_surveyed(bench, cell, arm, surveys))}
        able = [arm for arm in arms if arm.name not in unsurveyed]
        start = partial(_start, bench, cell, surveys)
        baseline = start(ARMS[BASELINE], held)
        for first in range(0, max(1, len(able)), workers):
            with ExitStack() as group:
                crew = {arm: start(arm, group) for arm in able[first : first + workers]}
                for worker in crew.values():  # nobody is timed before all are ready
                    with suppress(WorkerLost):
                        worker.wait_until_ready()
                base = _remote(baseline)
                if first == 0:
                    yield BASELINE, bench.row(ARMS[BASELINE], base, base)
                for arm, worker in crew.items():
                    yield arm.name, _row(bench, arm, worker, base)
        yield from ((name, {"failed": why}) for name, why in unsurveyed.items())


def _why_not_surveyed(bench: ModelBench, cell: Cell, arm: ModelArm, surveys: Path) -> str | None:
    """None where the survey of a planned arm lies in ``surveys`` now."""
    try:
        bench.survey(cell, arm).save(surveys / bench.name_of_survey(cell, arm))
    except Exception as error:  # as for any arm: the others go on
        return reason_of(error)
    finally:
        release_memory(bench.device)
    return None


def _start(bench: ModelBench, cell: Cell, surveys: Path, arm: ModelArm, held: ExitStack) -> "Worker[Job, Ready | str]":
    kernels = None if bench.kernels is None else tuple(bench.kernels)
    worker = Worker([Job(cell, arm.name, str(bench.device), surveys, kernels, torch.get_num_threads())], _made_ready)
    held.callback(worker.stop)
    return worker


def _row(bench: ModelBench, arm: ModelArm, worker: "Worker[Job, Ready | str]", base: Ready) -> dict[str, Any]:
    try:
        return bench.row(arm, _remote(worker), base)
    except Exception as error:
        return {"failed": reason_of(error)}


def _remote(worker: "Worker[Job, Ready | str]") -> Ready:
    """The arm of another process as if it were here."""
    facts = worker.call(0, _facts)
    if isinstance(facts, str):
        raise KernelUnavailable(facts)
    did, ready_s, peak_bytes, is_graph = facts
    timer = StepTimer(partial(worker.call, 0, _step_us), is_graph)
    return Ready(timer, partial(worker.call, 0, _shares), did, ready_s, peak_bytes)


# What the processes run.


def _made_ready(job: Job) -> Ready | str:
    from torch._inductor import config

    torch.set_num_threads(job.threads)
    bench = ModelBench(torch.device(job.device), surveys=job.surveys, kernels=job.kernels)
    try:
        with config.patch(compile_threads=1):  # processes enough are at it
            return bench.ready(job.cell, ARMS[job.arm])
    except Exception as error:  # libraries raise all kinds
        return reason_of(error)


def _facts(ready: Ready | str) -> tuple[str, float, int | None, bool] | str:
    if isinstance(ready, str):
        return ready
    return ready.did, ready.ready_s, ready.peak_bytes, ready.timer.is_graph


def _step_us(ready: Ready | str) -> float:
    assert isinstance(ready, Ready)
    return ready.timer.run()


def _shares(ready: Ready | str) -> dict[str, float] | None:
    assert isinstance(ready, Ready)
    return ready.shares()
