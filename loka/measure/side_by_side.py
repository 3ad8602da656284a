"""Measurements that take long to get ready: processes prepare them side by side, then each is taken while nobody else runs.

What another process has compiled still takes a second or two to load for every function. So the process that compiles also
measures, and keeps what it compiled until its turn.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")
Result = TypeVar("Result")


class WorkerLost(RuntimeError):
    """The process died, or raised: what it said is on its stderr."""


class Worker(Generic[Item, Prepared]):
    """A process that prepares ``items`` and keeps them, to call functions of them as it is told to.

    Functions are given by module and name, as pickle has them, and so are items and results; what is prepared stays there.
    """

    def __init__(self, items: Sequence[Item], prepare: Callable[[Item], Prepared]) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process: BaseProcess = context.Process(target=_work, args=(there, items, prepare), daemon=True)
        self._process.start()
        there.close()  # so that its end is seen here
        self._is_ready = False

    def call(self, index: int, function: Callable[[Prepared], Result]) -> Result:
        """``function`` of the item at ``index``. The first call waits until all items are prepared."""
        self.wait_until_ready()
        try:
            self._here.send((index, function))
            return self._here.recv()
        except (EOFError, OSError) as error:
            raise WorkerLost("its process ended") from error

    def wait_until_ready(self) -> None:
        if self._is_ready:
            return
        try:
            self._here.recv()
        except (EOFError, OSError) as error:
            raise WorkerLost("its process ended while it was made ready") from error
        self._is_ready = True

    def stop(self) -> None:
        self._here.close()
        self._process.terminate()
        self._process.join()


def prepared_side_by_side(
    items: Sequence[Item], prepare: Callable[[Item], Prepared], run: Callable[[Prepared], Result], *, workers: int
) -> Iterator[Result]:
    """``run(prepare(item))`` of every item, in their order. All are prepared before any runs.

    What a process that was lost had left to do is done in this one.
    """
    crew = [Worker(items[first::workers], prepare) for first in range(min(workers, len(items)))]
    try:
        for worker in crew:
            with suppress(WorkerLost):
                worker.wait_until_ready()
        for index, item in enumerate(items):
            place, number = divmod(index, len(crew))
            try:
                result = crew[number].call(place, run)
            except WorkerLost:
                result = run(prepare(item))
            yield result
    finally:
        for worker in crew:
            worker.stop()


def _work(there: Connection, items: Sequence[Any], prepare: Callable[[Any], object]) -> None:
    prepared = [prepare(item) for item in items]
    there.send(None)
    while True:
        try:
            index, function = there.recv()
        except EOFError:  # nobody asks any more
            return
        there.send(function(prepared[index]))
