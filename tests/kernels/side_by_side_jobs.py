"""What the processes of test_side_by_side run: a module, so that they can import it."""

import multiprocessing
import os
import time
from pathlib import Path

from loka.measure.side_by_side import Worker

Job = tuple[str, str]  # a name, and the file that tells what was done


def tell(log: str, line: str) -> None:
    with Path(log).open("a") as file:
        file.write(f"{line}\n")


def prepare(job: Job) -> tuple[str, str, int]:
    name, log = job
    if multiprocessing.parent_process() is not None:
        if name.startswith("dies"):
            os._exit(1)
        if name.startswith("raises"):
            raise ValueError(name)
    time.sleep(0.01 * len(name))
    tell(log, f"prepared {name}")
    return name, log, os.getpid()


def run(prepared: tuple[str, str, int]) -> tuple[str, bool, int]:
    name, log, prepared_by = prepared
    if name.startswith("late") and multiprocessing.parent_process() is not None:
        os._exit(1)
    tell(log, f"begin {name}")
    time.sleep(0.02)
    tell(log, f"end {name}")
    return name, prepared_by == os.getpid(), os.getpid()


def prepare_for_long(log: str) -> None:
    tell(log, f"started {os.getpid()}")
    time.sleep(60)


def start_and_die(log: str) -> None:
    Worker([log], prepare_for_long)
    while not Path(log).exists():
        time.sleep(0.05)
    os._exit(1)  # as if it was killed: nothing is cleaned up
