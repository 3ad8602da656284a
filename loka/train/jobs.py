"""Many independent runs, one after another or several at once on the same machine."""

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice
from typing import TypeVar

import torch

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_jobs(
    jobs: Iterable[Job], run: Callable[[Job], Result], *, parallel: int = 1, budget_s: float = float("inf")
) -> Iterator[tuple[Job, Result]]:
    """``(job, run(job))`` for each job as it is done; no job is started once ``budget_s`` seconds have passed.

    With ``parallel`` above 1, that many processes work at once, each on one core: a small model leaves a GPU idle between
    its launches, which others can use. ``run`` must then be a function of a module, and jobs be picklable.
    """
    deadline = time.monotonic() + budget_s
    if parallel == 1:
        for job in jobs:
            if time.monotonic() > deadline:
                return
            yield job, run(job)
        return
    queue = iter(jobs)
    # Spawned and not forked: a forked process cannot use CUDA.
    with ProcessPoolExecutor(parallel, multiprocessing.get_context("spawn"), initializer=_use_one_core) as pool:
        pending: dict[Future[Result], Job] = {pool.submit(run, job): job for job in islice(queue, parallel)}
        try:
            while pending:
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield pending.pop(future), future.result()
                    if time.monotonic() < deadline:
                        pending.update((pool.submit(run, job), job) for job in islice(queue, 1))
        finally:
            for future in pending:
                future.cancel()


def _use_one_core() -> None:
    torch.set_num_threads(1)
