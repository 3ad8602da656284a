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
_PREPARE, _CALL = "prepare", "call"


class WorkerLost(RuntimeError):
    """The process died, or raised: what it said is on its stderr. Or it took too long."""


class Worker(Generic[Item, Prepared]):
    """A process that prepares an item and keeps it, to call functions of it as it is told to; then perhaps another.

    Functions are given by module and name, as pickle has them, and so are items and results; what is prepared stays there.
    The process ends with this one, however this one ends.
    """

    def __init__(self, prepare: Callable[[Item], Prepared]) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process: BaseProcess = context.Process(target=_work, args=(there, prepare), daemon=True)
        with _environment(_ONE_CORE):
            self._process.start()
        there.close()  # so that its end is seen here
        self._is_ready = False
        self._why_lost: str | None = None

    @property
    def is_lost(self) -> bool:
        return self._why_lost is not None

    def begin(self, item: Item) -> None:
        """Let what was prepared before go, and have ``item`` prepared: nobody waits for it yet."""
        self._is_ready = False
        with suppress(OSError):  # where the process has ended, waiting tells
            self._here.send((_PREPARE, item))

    def wait_until_ready(self, limit_s: float | None = None) -> None:
        """A process that takes longer than the limit is stopped."""
        if self._is_ready:
            return
        self._answer("its process ended while it was made ready", limit_s)
        self._is_ready = True

    def call(self, function: Callable[[Prepared], Result]) -> Result:
        """``function`` of what was prepared, as soon as it is."""
        self.wait_until_ready()
        with suppress(OSError):
            self._here.send((_CALL, function))
        return self._answer("its process ended")

    def _answer(self, why_lost: str, limit_s: float | None = None) -> Any:
        """What the process says next."""
        if self._why_lost is None:
            with suppress(EOFError, OSError):
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
    items: Sequence[Item],
    prepare: Callable[[Item], Prepared],
    run: Callable[[Prepared], Result],
    *,
    workers: int,
    lost: Callable[[Item, WorkerLost], Result],
) -> Iterator[Result]:
    """``run(prepare(item))`` of every item, in their order: as many as there are workers are prepared, then run one by one.

    One whose process is lost is tried again in a new one, alone; if that is lost too, ``lost`` has its result.
    """
    with ExitStack() as held:

        def hire() -> Worker[Item, Prepared]:
            worker = Worker(prepare)
            held.callback(worker.stop)
            return worker

        crew = [hire() for _ in range(min(workers, len(items)))]
        for group in (items[first : first + workers] for first in range(0, len(items), workers)):
            crew = [hire() if worker.is_lost else worker for worker in crew]
            busy = list(zip(crew, group, strict=False))  # the last group may be smaller
            for worker, item in busy:
                worker.begin(item)
            for worker, _ in busy:
                with suppress(WorkerLost):
                    worker.wait_until_ready()
            for worker, item in busy:
                try:
                    result = worker.call(run)
                except WorkerLost:
                    result = _tried_again(hire(), item, run, lost)
                yield result


def _tried_again(
    worker: Worker[Item, Prepared],
    item: Item,
    run: Callable[[Prepared], Result],
    lost: Callable[[Item, WorkerLost], Result],
) -> Result:
    worker.begin(item)
    try:
        return worker.call(run)
    except WorkerLost as error:
        return lost(item, error)
    finally:
        worker.stop()


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


def _work(there: Connection, prepare: Callable[[Any], object]) -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    prepared = None
    with suppress(EOFError, BrokenPipeError):  # nobody asks any more
        while True:
            what, given = there.recv()
            if what == _PREPARE:
                prepared = None  # its memory is for the next
                prepared = prepare(given)
                there.send(None)
            else:
                there.send(given(prepared))


def _end_with_parent() -> None:
    """A parent that was killed stops nobody, and what runs on would be timed beside the next command."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
