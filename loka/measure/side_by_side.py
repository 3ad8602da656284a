"""Measurements that take long to get ready: processes prepare them side by side, then each is taken while nobody else runs.

What another process has compiled still takes a second or two to load for every function. So the process that compiles also
measures, and keeps what it compiled until its turn.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")
Result = TypeVar("Result")

_ONE_CORE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # for each: processes enough are at it


class WorkerLost(RuntimeError):
    """The process died, or raised: what it said is on its stderr. Or it took too long."""


class Worker(Generic[Item, Prepared]):
    """A process that prepares ``items`` and keeps them, to call functions of them as it is told to.

    Functions are given by module and name, as pickle has them, and so are items and results; what is prepared stays there.
    The process ends with this one, however this one ends.
    """

    def __init__(self, items: Sequence[Item], prepare: Callable[[Item], Prepared]) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process: BaseProcess = context.Process(target=_work, args=(there, items, prepare), daemon=True)
        with _environment(_ONE_CORE):
            self._process.start()
        there.close()  # so that its end is seen here
        self._is_ready = False
        self._why_lost: str | None = None

    def call(self, index: int, function: Callable[[Prepared], Result]) -> Result:
        """``function`` of the item at ``index``. The first call waits until all items are prepared."""
        self.wait_until_ready()
        return self._answer("its process ended", (index, function))

    def wait_until_ready(self, limit_s: float | None = None) -> None:
        """A process that takes longer than the limit is stopped."""
        if self._is_ready:
            return
        self._answer("its process ended while it was made ready", limit_s=limit_s)
        self._is_ready = True

    def _answer(self, why_lost: str, request: object = None, *, limit_s: float | None = None) -> Any:
        """What the process says next, to ``request`` if there is one."""
        if self._why_lost is None:
            with suppress(EOFError, OSError):
                if request is not None:
                    self._here.send(request)
                if self._here.poll(limit_s):
                    return self._here.recv()
                self.stop()
                why_lost = f"not ready after {limit_s:.0f} s"
            self._why_lost = why_lost
        raise WorkerLost(self._why_lost)

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
    with ExitStack() as held:
        crew = [_held(Worker(items[first::workers], prepare), held) for first in range(min(workers, len(items)))]
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


def _held(worker: Worker[Item, Prepared], held: ExitStack) -> Worker[Item, Prepared]:
    held.callback(worker.stop)
    return worker


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _work(there: Connection, items: Sequence[Any], prepare: Callable[[Any], object]) -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    prepared = [prepare(item) for item in items]
    with suppress(EOFError, BrokenPipeError):  # nobody asks any more
        there.send(None)
        while True:
            index, function = there.recv()
            there.send(function(prepared[index]))


def _end_with_parent() -> None:
    """A parent that was killed stops nobody, and what runs on would be timed beside the next command."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
