"""Measurements that take long to get ready: processes prepare them side by side, then each is taken while nobody else runs.

What another process has compiled still takes a second or two to load for every function. So the process that compiles also
measures, and keeps what it compiled until its turn.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")
Result = TypeVar("Result")


def prepared_side_by_side(
    items: Sequence[Item], prepare: Callable[[Item], Prepared], run: Callable[[Prepared], Result], *, workers: int
) -> Iterator[Result]:
    """``run(prepare(item))`` of every item, in their order. Both functions must be picklable; so must items and results.

    All are prepared before any runs. What a process that died, or raised, had left to do is done in this one.
    """
    crew = [_Worker(items[first::workers], prepare, run) for first in range(min(workers, len(items)))]
    try:
        for worker in crew:
            worker.wait_until_ready()
        for index, item in enumerate(items):
            result = crew[index % len(crew)].next_result()
            yield run(prepare(item)) if result is None else result[0]
    finally:
        for worker in crew:
            worker.stop()


class _Worker(Generic[Item, Prepared, Result]):
    """A process with its share of the items, which it runs one by one as it is told to."""

    def __init__(self, items: Sequence[Item], prepare: Callable[[Item], Prepared], run: Callable[[Prepared], Result]) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process: BaseProcess = context.Process(target=_work, args=(there, items, prepare, run), daemon=True)
        self._process.start()
        there.close()  # so that its end is seen here
        self._is_alive = True

    def wait_until_ready(self) -> None:
        self._receive()

    def next_result(self) -> tuple[Result] | None:
        """None where the process is gone."""
        if self._is_alive:
            self._here.send(None)
        return self._receive()

    def stop(self) -> None:
        self._here.close()
        self._process.terminate()
        self._process.join()

    def _receive(self) -> tuple[Result] | None:
        if not self._is_alive:
            return None
        try:
            return self._here.recv()
        except (EOFError, ConnectionError):
            self._is_alive = False
            return None


def _work(
    there: Connection, items: Sequence[Item], prepare: Callable[[Item], Prepared], run: Callable[[Prepared], Result]
) -> None:
    ready = [prepare(item) for item in items]
    there.send(None)
    for prepared in ready:
        there.recv()
        there.send((run(prepared),))
