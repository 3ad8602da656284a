"""Many independent runs, one after another or several at once on the same machine."""

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import TypeVar

import torch

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_jobs(
    jobs: Iterable[Job],
    run: Callable[[Job], Result],
    *,
    parallel: int = 1,
    budget_s: float = float("inf"),
    is_ready: Callable[[Job], bool] = lambda job: True,
) -> Iterator[tuple[Job, Result]]:
    """``(job, run(job))`` for each job as it is done; none is started once ``budget_s`` seconds have passed.

    With ``parallel`` above 1, that many processes work at once, each on one core: a small model leaves a GPU idle between its
    launches, and others can use it then. ``run`` must be a function of a module and jobs must be picklable. A job that is not
    ready lets others go first; one that is never ready is not run.
    """
    deadline = time.monotonic() + budget_s
    todo = list(jobs)

    def next_job() -> Job | None:
        ready = next((job for job in todo if is_ready(job)), None) if time.monotonic() < deadline else None
        if ready is not None:
            todo.remove(ready)
        return ready

    if parallel == 1:
        while (job := next_job()) is not None:
            yield job, run(job)
        return
    # Spawned and not forked: a forked process cannot use CUDA.
    with ProcessPoolExecutor(parallel, multiprocessing.get_context("spawn"), initializer=_use_one_core) as pool:
        pending: dict[Future[Result], Job] = {}
        try:
            while True:
                while len(pending) < parallel and (job := next_job()) is not None:
                    pending[pool.submit(run, job)] = job
                if not pending:
                    return
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield pending.pop(future), future.result()
        finally:
            for future in pending:
                future.cancel()


def _use_one_core() -> None:
    torch.set_num_threads(1)
