"""Jobs prepared side by side and run one after another, whatever becomes of the processes."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from side_by_side_jobs import Job, prepare, run, start_and_die

from loka.measure.side_by_side import Worker, WorkerLost, prepared_side_by_side

SLOW = "x" * 2000  # 20 s


def lost(job: Job, error: WorkerLost) -> tuple[str, bool, int]:
    return f"{job[0]}: {error}", True, -1


@pytest.mark.parametrize("workers", [1, 2, 9])
def test_a_group_is_prepared_then_each_runs_alone_where_it_was_prepared(tmp_path: Path, workers: int) -> None:
    log = tmp_path / "log"
    names = ["a", "bbbbbb", "c", "dd", "e"]
    results = list(
        prepared_side_by_side([(name, str(log)) for name in names], prepare, run, workers=workers, limit_s=60, lost=lost)
    )
    assert [name for name, _, _ in results] == names
    assert all(is_same for _, is_same, _ in results)
    assert len({process for _, _, process in results} - {os.getpid()}) == len(names)
    lines = iter(log.read_text().splitlines())
    for group in (names[first : first + workers] for first in range(0, len(names), workers)):
        assert sorted(next(lines) for _ in group) == sorted(f"prepared {name}" for name in group)
        run_one_by_one = [f"{what} {name}" for name in group for what in ("begin", "end")]
        assert [next(lines) for _ in run_one_by_one] == run_one_by_one
    assert not list(lines)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("when", ["in prepare", "in run"])
@pytest.mark.parametrize("how", ["dies", "raises"])
def test_one_whose_process_is_lost_is_tried_again_alone(tmp_path: Path, how: str, when: str) -> None:
    """Behind its group, when that has let go of all memory; and never in this process, which it might break."""
    log = str(tmp_path / "log")
    names = [f"{how} {when} once", "well", "behind it", f"{how} {when}", "last"]
    results = list(prepared_side_by_side([(name, log) for name in names], prepare, run, workers=2, limit_s=60, lost=lost))
    told = f"{how} {when}: its process ended" + (" while it was made ready" if when == "in prepare" else "")
    told += f": {how} {when}" if how == "raises" else ""
    assert [name for name, _, _ in results] == ["well", f"{how} {when} once", "behind it", told, "last"]
    assert all(is_same for _, is_same, _ in results)
    assert os.getpid() not in {process for _, _, process in results}
    beside = [line.rpartition(" ")[::2] for line in Path(f"{log}.beside").read_text().splitlines()]
    for name in (names[0], names[3]):
        first, second = (others for known, others in beside if known == name)
        assert second == "0", f"{name}, which ran beside {first}, was tried again beside {second}"
    assert not multiprocessing.active_children()


def test_nothing_to_do_and_an_end_in_between(tmp_path: Path) -> None:
    assert list(prepared_side_by_side([], prepare, run, workers=3, limit_s=60, lost=lost)) == []
    rest = prepared_side_by_side(
        [(name, str(tmp_path / "log")) for name in "abc"], prepare, run, workers=2, limit_s=60, lost=lost
    )
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


def test_a_process_that_is_done_leaves_nothing_behind() -> None:
    """One that is stopped where it stands is said to leak what it shares with others, as compilers do: locks."""
    script = (
        "from loka.measure.side_by_side import Worker\nfrom side_by_side_jobs import name_of, prepare_a_lock\n"
        "if __name__ == '__main__':\n"
        "    worker = Worker(prepare_a_lock, None)\n    print(worker.call(name_of))\n    worker.stop()\n"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Lock" in done.stdout


def test_a_process_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    worker = Worker(prepare, (SLOW, str(tmp_path / "log")), limit_s=1)
    with pytest.raises(WorkerLost, match="not ready after 1 s"):
        worker.wait_until_ready()
    assert not multiprocessing.active_children()
    with pytest.raises(WorkerLost, match="not ready after 1 s"):  # whenever it is asked
        worker.call(run)


def test_all_of_a_group_have_the_same_time_and_those_in_time_are_run(tmp_path: Path) -> None:
    names = [SLOW, f"{SLOW}er", "in time", "behind them"]
    begin = time.monotonic()
    results = prepared_side_by_side(
        [(name, str(tmp_path / "log")) for name in names], prepare, run, workers=3, limit_s=4, lost=lost
    )
    assert next(results)[0] == "in time"
    assert time.monotonic() - begin < 2 * 4
    assert [name.removeprefix(SLOW) for name, _, _ in results] == [
        ": not ready after 4 s",
        "er: not ready after 4 s",
        "behind them",
    ]
