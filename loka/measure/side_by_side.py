"""Measurements that take long to get ready: processes prepare them side by side, then each is taken while nobody else runs.

What another process has compiled still takes a second or two to load for every function. So the process that compiles also
measures, and keeps what it compiled until its turn.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any, Generic, NamedTuple, TypeVar

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")
Result = TypeVar("Result")

_ONE_CORE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # for each: processes enough are at it
_GOODBYE_S = 10.0  # for a process that waits to be told to end by itself


class WorkerLost(RuntimeError):
    """The process died, or raised: why, and the rest is on its stderr. Or it took too long."""


class _Raised(NamedTuple):
    """The last thing that a process says."""

    reason: str


class Worker(Generic[Item, Prepared]):
    """A process that prepares ``item`` and keeps what came of it, to call functions of it as it is told to.

    Functions are given by module and name, as pickle has them, and so are the item and results; what is prepared stays there.
    The process ends with this one, however this one ends; one that is asked for and not ready ``limit_s`` after its start is
    stopped.
    """

    def __init__(self, prepare: Callable[[Item], Prepared], item: Item, *, limit_s: float | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process: BaseProcess = context.Process(target=_work, args=(there, prepare, item), daemon=True)
        with environment(_ONE_CORE):
            self._process.start()
        there.close()  # so that its end is seen here
        self._started, self._limit_s = time.monotonic(), limit_s
        self._is_ready = False
        self._why_lost: str | None = None

    def call(self, function: Callable[[Prepared], Result]) -> Result:
        """``function`` of what was prepared, as soon as it is."""
        self.wait_until_ready()
        return self._answer("its process ended", function)

    def wait_until_ready(self) -> None:
        if self._is_ready:
            return
        left_s = None if self._limit_s is None else max(0.0, self._started + self._limit_s - time.monotonic())
        self._answer("its process ended while it was made ready", left_s=left_s)
        self._is_ready = True

    def _answer(self, why_lost: str, request: object = None, *, left_s: float | None = None) -> Any:
        """What the process says next, to ``request`` if there is one."""
        if self._why_lost is None:
            with suppress(EOFError, OSError):
                if request is not None:
                    self._here.send(request)
                if self._here.poll(left_s):
                    answer = self._here.recv()
                    if not isinstance(answer, _Raised):
                        return answer
                    why_lost = f"{why_lost}: {answer.reason}"
                else:
                    why_lost = f"not ready after {self._limit_s:.0f} s"
                self.stop()
            self._why_lost = why_lost
        raise WorkerLost(self._why_lost)

    def stop(self) -> None:
        self._here.close()
        if self._is_ready:  # it sees that nobody asks any more, and gives back what one that is stopped leaves behind
            self._process.join(_GOODBYE_S)
        self._process.terminate()
        self._process.join()


def prepared_side_by_side(
    items: Sequence[Item],
    prepare: Callable[[Item], Prepared],
    run: Callable[[Prepared], Result],
    *,
    workers: int,
    limit_s: float,
    lost: Callable[[Item, WorkerLost], Result],
) -> Iterator[Result]:
    """``run(prepare(item))`` of every item, group by group: as many as there are workers are prepared, then run one by one.

    One whose process is lost, or not ready after ``limit_s``, is tried again behind its group, in a new process and alone, for
    memory or cores may have been short; if that is lost too, ``lost`` has its result.
    """
    for first in range(0, len(items), workers):
        group = items[first : first + workers]
        with ExitStack() as held:
            # One process for each item, and none from group to group: what a process has let go of, its allocator may hold.
            crew = [(item, _begun(prepare, item, limit_s, held)) for item in group]
            for _, worker in crew:
                with suppress(WorkerLost):
                    worker.wait_until_ready()
            again = []
            for item, worker in crew:
                try:
                    result = worker.call(run)
                except WorkerLost:
                    again.append(item)
                else:
                    yield result
        for item in again:
            with ExitStack() as held:
                try:
                    result = _begun(prepare, item, limit_s, held).call(run)
                except WorkerLost as error:
                    result = lost(item, error)
                yield result


def _begun(prepare: Callable[[Item], Prepared], item: Item, limit_s: float, held: ExitStack) -> Worker[Item, Prepared]:
    worker = Worker(prepare, item, limit_s=limit_s)
    held.callback(worker.stop)
    return worker


@contextmanager
def environment(held: Mapping[str, str | None]) -> Iterator[None]:
    """Variables, None for one that is not set, that processes started inside get too and that behind it are what they were."""
    before = {name: os.environ.get(name) for name in held}
    _set_environment(held)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _work(there: Connection, prepare: Callable[[Any], object], item: Any) -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    prepared = _of(prepare, item, there)
    with suppress(EOFError, BrokenPipeError):  # nobody asks any more
        there.send(None)
        while True:
            there.send(_of(there.recv(), prepared, there))


def _of(function: Callable[[Any], Result], given: Any, there: Connection) -> Result:
    """What ``function`` returns; what it raises is the last that is heard of this process."""
    try:
        return function(given)
    except Exception as error:
        from loka.measure.failure import reason_of  # loads torch, for seconds: not where a process begins

        there.send(_Raised(reason_of(error)))
        raise


def _end_with_parent() -> None:
    """A parent that was killed stops nobody, and what runs on would be timed beside the next command."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
