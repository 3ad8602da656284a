"""Jobs prepared side by side and run one after another, whatever becomes of the processes."""

import os
from pathlib import Path

import pytest
from side_by_side_jobs import prepare, run

from loka.measure.side_by_side import prepared_side_by_side


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
    rest.close()  # type: ignore[attr-defined]
    assert "begin b" not in (tmp_path / "log").read_text()
