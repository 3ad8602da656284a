"""``loka report`` as a user runs it."""

from pathlib import Path

import msgspec
import pytest

from loka.cli import app
from loka.core.errors import InvalidInput


def run(*words: str) -> None:
    app(words, exit_on_error=False, result_action="return_value")


def test_an_empty_run_gets_a_page_and_a_text_that_say_what_is_missing(tmp_path: Path, capsys) -> None:
    run("report", str(tmp_path))
    assert f"wrote {tmp_path / 'report.html'}" in capsys.readouterr().out
    (tmp_path / "report.html").unlink()
    run("report", str(tmp_path), "--text")
    assert "loka measure" in capsys.readouterr().out
    run("report", str(tmp_path), "--json")
    assert msgspec.json.decode(capsys.readouterr().out)["headline"] == "Nothing measured yet"
    assert not (tmp_path / "report.html").exists()


def test_a_folder_that_is_not_there_is_a_user_error() -> None:
    with pytest.raises(InvalidInput, match=r"there is no folder nowhere: .*loka demo"):
        run("report", "nowhere")


def test_a_file_is_not_called_a_missing_folder(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(InvalidInput, match=r"plan\.json is a file: name a run's folder"):
        run("report", str(tmp_path / "plan.json"))
