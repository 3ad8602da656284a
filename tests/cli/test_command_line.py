"""What all commands have in common: help with an example, suggestions for typos, exit codes, and never a traceback."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from loka.cli import app, main

COMMANDS = ("demo", "probe", "measure", "plan", "train", "report", "kernels")


Loka = Callable[..., subprocess.CompletedProcess[str]]


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
def test_a_mistyped_command_is_answered_with_what_was_meant(loka: Loka, words: list[str], message: str) -> None:
    done = loka(*words, code=2)
    assert message in " ".join((done.stdout + done.stderr).replace("│", " ").split())


@pytest.mark.parametrize("command", ["measure", "plan", "report"])
def test_a_run_that_is_not_there_says_what_makes_it(loka: Loka, command: str) -> None:
    done = loka(command, "nowhere", code=1)
    assert done.stderr.startswith("loka: there is no ")
    assert "`loka " in done.stderr


def test_a_full_disk_is_a_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device", "run/record.safetensors")

    monkeypatch.setattr("loka.cli.app", full)
    with pytest.raises(SystemExit) as exited:
        main()
    assert exited.value.code == 1
    assert capsys.readouterr().err == "loka: [Errno 28] No space left on device: 'run/record.safetensors'\n"


@pytest.mark.parametrize("words", [("kernels",), ("--help",), ("report", "--json")])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_who_has_enough_gets_no_traceback(words: tuple[str, ...], unbuffered: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "loka", *words, *([str(tmp_path)] if "report" in words else [])]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 128 + signal.SIGPIPE
    assert errors == ""


TRAIN = "train --model dlrm --preset tiny --steps 1 --batch-size 8 --data-options.test_examples 8 --out"


@pytest.mark.parametrize("words", ["--help", "kernels", TRAIN, "probe dlrm-tiny@synthetic --steps 1 --batch-size 8 --out"])
def test_without_a_standard_output_nothing_fails(words: str, tmp_path: Path) -> None:
    command = f"{sys.executable} -m loka {words} {tmp_path / 'run' if '--out' in words else ''} >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_who_has_enough_does_not_hide_a_mistake() -> None:
    script = "import sys, loka.cli as cli\nfrom loka.core.errors import InvalidInput\n"
    script += "def app():\n    print('a line')\n    raise InvalidInput('the thing to know')\ncli.app = app\ncli.main()"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # or the line would fail
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": buffered}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == "loka: the thing to know\n"
    assert process.returncode == 1


def test_to_be_asked_to_end_is_to_be_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def wait() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("loka.cli.app", wait)
    try:
        with pytest.raises(SystemExit, match="130"):
            main()
        assert "stopped: run the same command again to continue with the rest" in capsys.readouterr().err
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_terminal_that_lacks_a_letter_gets_another() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    ran = subprocess.run([sys.executable, "-m", "loka", "kernels"], capture_output=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    assert b"reference.rowwise" in ran.stdout
