"""Jobs prepared side by side and run one after another, whatever becomes of the processes."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest
from side_by_side_jobs import prepare, run, start_and_die

from loka.measure.side_by_side import Worker, WorkerLost, prepared_side_by_side


@pytest.mark.parametrize("workers", [1, 2, 9])
def test_all_are_prepared_then_each_runs_alone_where_it_was_prepared(tmp_path: Path, workers: int) -> None:
    log = tmp_path / "log"
    names = ["a", "bbbbbb", "c", "dd", "e"]
    results = list(prepared_side_by_side([(name, str(log)) for name in names], prepare, run, workers=workers))
    assert [name for name, _, _ in results] == names
    assert all(is_same for _, is_same, _ in results)
    assert len({process for _, _, process in results} - {os.getpid()}) == min(workers, len(names))
    lines = log.read_text().splitlines()
    assert sorted(lines[: len(names)]) == sorted(f"prepared {name}" for name in names)
    assert lines[len(names) :] == [f"{what} {name}" for name in names for what in ("begin", "end")]
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("bad", ["dies", "raises", "late"])
def test_what_a_lost_process_had_to_do_is_done_here(tmp_path: Path, bad: str) -> None:
    """Its first item, and the one behind it; the other process goes on."""
    log = str(tmp_path / "log")
    names = [bad, "well", "behind it", "too"]
    results = list(prepared_side_by_side([(name, log) for name in names], prepare, run, workers=2))
    assert [name for name, _, _ in results] == names
    assert [process == os.getpid() for _, _, process in results] == [True, False, True, False]


def test_nothing_to_do_and_an_end_in_between(tmp_path: Path) -> None:
    assert list(prepared_side_by_side([], prepare, run, workers=3)) == []
    rest = prepared_side_by_side([(name, str(tmp_path / "log")) for name in "abc"], prepare, run, workers=2)
    assert next(rest)[0] == "a"
    assert multiprocessing.active_children()
    rest.close()  # type: ignore[attr-defined]
    assert not multiprocessing.active_children()


def test_processes_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    parent = multiprocessing.get_context("spawn").Process(target=start_and_die, args=(str(log),))
    parent.start()
    parent.join()
    (line,) = log.read_text().splitlines()
    child = int(line.removeprefix("started "))
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text():
            return
        time.sleep(0.1)
    pytest.fail("the process goes on")


def test_a_process_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    worker = Worker([("x" * 2000, str(tmp_path / "log"))], prepare)  # 20 s
    with pytest.raises(WorkerLost, match="not ready after 1 s"):
        worker.wait_until_ready(1)
    assert not multiprocessing.active_children()
    with pytest.raises(WorkerLost, match="not ready after 1 s"):  # whenever it is asked
        worker.call(0, run)
