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
    """The command line, in this process: another takes seconds to load torch. What would end in a traceback is raised."""
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["loka", *words])
        monkeypatch.setattr("loka.cli.app", lambda: app(words))  # under pytest it does not read argv
        before, code = signal.getsignal(signal.SIGTERM), 0
        try:
            main()
        except SystemExit as exited:
            code = exited.code
        finally:
            signal.signal(signal.SIGTERM, before)
        return subprocess.CompletedProcess(words, code, *capsys.readouterr())

    return run
