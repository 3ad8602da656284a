"""What all commands have in common: help with an example, suggestions for typos, exit codes, and never a traceback."""

import re
import subprocess
import sys

import pytest

from loka.cli import app

COMMANDS = ("demo", "probe", "measure", "plan", "train", "report", "kernels")


def loka(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "loka", *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    app([command, "--help"], result_action="return_value")
    example = re.search(r"Example: (.*)", capsys.readouterr().out)
    assert example
    assert f"loka {command}" in example[1]


def test_help_lists_commands_in_the_order_they_are_used(capsys: pytest.CaptureFixture[str]) -> None:
    app(["--help"], result_action="return_value")
    text = capsys.readouterr().out
    places = [text.index(f"│ {command} ") for command in COMMANDS[:6]]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["repor", "run"], 'Did you mean "report"'),
        (["report", "--txt"], "Did you mean --text"),
        (["plan", "run", "--goal", "servin"], "servin"),
        (["measure"], "requires an argument"),
    ],
)
def test_a_mistyped_command_is_answered_with_what_was_meant(words: list[str], message: str) -> None:
    done = loka(*words)
    assert done.returncode == 2
    assert message in " ".join((done.stdout + done.stderr).replace("│", " ").split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["measure", "plan", "report"])
def test_a_run_that_is_not_there_says_what_makes_it(command: str) -> None:
    done = loka(command, "nowhere")
    assert done.returncode == 1
    assert done.stderr.startswith("loka: there is no ")
    assert "`loka " in done.stderr
    assert "Traceback" not in done.stderr
