"""How a run shows itself: a progress bar on a terminal, plain lines elsewhere, nothing in a library call."""

import math
import sys
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self

from loka.core.progress import is_terminal
from loka.train.run_folder import LogRow


class Progress(AbstractContextManager["Progress"], Protocol):
    """What a run calls at its start, after each step, and with each line of metrics."""

    def start(self, step: int, steps: int) -> None: ...

    def step(self) -> None: ...

    def log(self, row: LogRow) -> None: ...


class Silent:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, step: int, steps: int) -> None:
        pass

    def step(self) -> None:
        pass

    def log(self, row: LogRow) -> None:
        pass


class Lines(Silent):
    """One line for each row of metrics, flushed at once: for logs and pipes."""

    def __init__(self) -> None:
        self._steps = 0

    def start(self, step: int, steps: int) -> None:
        self._steps = steps
        if step:
            print(f"resumed at step {step} of {steps}", flush=True)

    def log(self, row: LogRow) -> None:
        print(f"step {row.step}/{self._steps}  {describe(row)}", flush=True)


class Bar:
    """A bar with the time left; the newest metrics beside it."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[metrics]}"))
        self._bar = RichProgress(*columns)
        self._task = self._bar.add_task("train", total=None, metrics="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def start(self, step: int, steps: int) -> None:
        self._bar.update(self._task, completed=step, total=steps)

    def step(self) -> None:
        self._bar.advance(self._task)

    def log(self, row: LogRow) -> None:
        self._bar.update(self._task, metrics=describe(row))


def for_this_output() -> Progress:
    return Bar() if is_terminal(sys.stdout) else Lines()


def describe(row: LogRow) -> str:
    window = row.window
    best = "" if math.isnan(window.best_ne) else f" (best possible {window.best_ne:.4f})"
    return (
        f"log-loss {window.log_loss:.4f}  NE {window.ne:.4f}{best}  lifetime NE {row.lifetime.ne:.4f}  "
        f"AUC {window.auc:.4f}  calibration {window.calibration:.3f}  {row.samples_per_s:,.0f} samples/s"
    )
