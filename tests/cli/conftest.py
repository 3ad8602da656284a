import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from loka.cli import app, main


@pytest.fixture
def loka(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command line, in this process: another takes seconds to load torch. What would end in a traceback is raised, and so
    is a failure that the test does not expect."""
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["loka", *words])
        monkeypatch.setattr("loka.cli.app", lambda: app(words))  # under pytest it does not read argv
        before, exited_with = signal.getsignal(signal.SIGTERM), 0
        try:
            main()
        except SystemExit as exited:
            exited_with = exited.code
        finally:
            signal.signal(signal.SIGTERM, before)
        done = subprocess.CompletedProcess(words, code, *capsys.readouterr())
        assert exited_with == code, done.stderr
        return done

    return run
