"""What the processes of test_side_by_side run: a module, so that they can import it."""

import multiprocessing
import os
import time
from multiprocessing.synchronize import Lock as SynchronizedLock
from pathlib import Path

from loka.measure.side_by_side import Worker

Job = tuple[str, str]  # a name, and the file that tells what was done


def tell(log: str, line: str) -> None:
    with Path(log).open("a") as file:
        file.write(f"{line}\n")


def fail_if_told(name: str, log: str, when: str) -> None:
    """``dies in run`` does it every time, ``dies in run once`` the first."""
    if when not in name:
        return
    if "once" in name:
        marker = Path(f"{log}.{when}")
        if marker.exists():
            return
        marker.touch()
    if "raises" in name:
        raise ValueError(name)
    os._exit(1)


def prepare(job: Job) -> tuple[str, str, int]:
    name, log = job
    tell(f"{log}.beside", f"{name} {others_alive(log)}")
    tell(f"{log}.processes", str(os.getpid()))
    fail_if_told(name, log, "in prepare")
    time.sleep(0.01 * len(name))
    tell(log, f"prepared {name}")
    return name, log, os.getpid()


def others_alive(log: str) -> int:
    """Of the processes that began before."""
    known = Path(f"{log}.processes")
    return sum(Path(f"/proc/{process}").exists() for process in (known.read_text().split() if known.exists() else ()))


def run(prepared: tuple[str, str, int]) -> tuple[str, bool, int]:
    name, log, prepared_by = prepared
    fail_if_told(name, log, "in run")
    tell(log, f"begin {name}")
    time.sleep(0.02)
    tell(log, f"end {name}")
    return name, prepared_by == os.getpid(), os.getpid()


def prepare_a_lock(_: None) -> SynchronizedLock:
    return multiprocessing.get_context("spawn").Lock()


def name_of(lock: SynchronizedLock) -> str:
    return str(lock)


def prepare_for_long(log: str) -> None:
    tell(log, f"started {os.getpid()}")
    time.sleep(60)


def start_and_die(log: str) -> None:
    Worker(prepare_for_long, log)
    while not Path(log).exists():
        time.sleep(0.05)
    os._exit(1)  # as if it was killed: nothing is cleaned up
