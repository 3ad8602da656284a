"""How a long job shows itself: a bar on a terminal, plain lines elsewhere, nothing in a library call."""

import select
import sys
import time
from contextlib import AbstractContextManager
from typing import Protocol, Self, TextIO


class Progress(AbstractContextManager["Progress"], Protocol):
    """Told what a job consists of, of every piece that is done, and what should be read at once."""

    def start(self, total: int, done: int = 0) -> None: ...

    def say(self, line: str) -> None: ...

    def advance(self, piece: str) -> None: ...


class Silent:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, total: int, done: int = 0) -> None:
        pass

    def say(self, line: str) -> None:
        pass

    def advance(self, piece: str) -> None:
        pass


class Lines(Silent):
    """One line for each piece, flushed at once: for logs and pipes."""

    def __init__(self) -> None:
        self._total = self._done = 0
        self._since = time.monotonic()

    def start(self, total: int, done: int = 0) -> None:
        self._total, self._done = total, done

    def say(self, line: str) -> None:
        print(line, flush=True)

    def advance(self, piece: str) -> None:
        self._done += 1
        print(f"{self._done}/{self._total}  {piece}  ({time.monotonic() - self._since:.0f} s)", flush=True)


class Bar:
    """A bar with the time left, and the newest piece beside it."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[piece]}"))
        self._bar = RichProgress(*columns)
        self._task = self._bar.add_task("", total=None, piece="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def start(self, total: int, done: int = 0) -> None:
        self._bar.update(self._task, completed=done, total=total)

    def say(self, line: str) -> None:
        self._bar.console.print(line, highlight=False, markup=False)

    def advance(self, piece: str) -> None:
        self._bar.update(self._task, advance=1, piece=piece)


def for_this_output() -> Progress:
    return Bar() if is_terminal(sys.stdout) else Lines()


def is_terminal(stream: TextIO | None) -> bool:
    """False where there is none: a service may start its processes without a standard output."""
    return stream is not None and stream.isatty()


def is_read(stream: TextIO | None) -> bool:
    """Whether somebody may still read what is written to ``stream``: not where it is a pipe whose other end was closed."""
    try:
        descriptor = stream.fileno() if stream is not None else None
    except OSError:  # it is kept in memory
        descriptor = None
    if descriptor is None:
        return True
    state = select.poll()
    state.register(descriptor, 0)  # errors are told in any case
    return not any(event & select.POLLERR for _, event in state.poll(0))
