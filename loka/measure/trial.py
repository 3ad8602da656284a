"""Trying kernels in a process of their own first: one that hangs, or breaks the GPU for its process, then costs only that.

The child (``loka.measure.trial_child``) gets one problem a line and answers each. A kernel that raises is refused for that
problem; one that takes its process down, or too long, is not tried again.
"""

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable

import msgspec

from loka.core.gemm import Role, SiteShape
from loka.core.recipe import Format
from loka.kernels.contract import KERNELS

START_LIMIT_S = 180.0  # to import torch and to reach the GPU
LIMIT_S = 60.0  # to compile a kernel and run it once
# Plain products of torch, which the reference itself is made of.
TRUSTED = ("loka.kernels.providers.torch_high", "loka.kernels.providers.reference")


class Trial(msgspec.Struct, frozen=True):
    """One problem of one kernel, to be run once on normal values. ``module`` registers the kernel when imported."""

    kernel: str
    module: str
    role: Role
    shape: SiteShape
    dtype: Format
    weight_dtype: Format
    device: str


class Answer(msgspec.Struct, frozen=True):
    why_not: str | None = None  # the failure's message
    tried: bool = True  # else the child knows no such kernel
    broken: bool = False  # nothing else will run in that child


class _Gone(Exception):
    """The child hung or ended; its message says which."""


def needs_trial(kernel: str) -> bool:
    return type(KERNELS.get(kernel)).__module__ not in TRUSTED


def try_kernels(trials: Iterable[Trial]) -> dict[Trial, str]:
    """The trials that failed, and why. A kernel registered by a module that cannot be imported is not tried."""
    failures: dict[Trial, str] = {}
    fatal: dict[str, str] = {}
    child: _Child | None = None
    try:
        for trial in trials:
            if trial.kernel in fatal:
                failures[trial] = fatal[trial.kernel]
                continue
            child = child or _Child()
            try:
                answer = child.ask(trial)
            except _Gone as gone:
                answer = Answer(f"{gone} at {trial.role} of {trial.shape}, tried in a process of its own", broken=True)
            if answer.why_not is not None:
                failures[trial] = answer.why_not
            if answer.broken:
                fatal[trial.kernel] = failures[trial]
                child.close()
                child = None
    finally:
        if child is not None:
            child.close()
    return failures


class _Child:
    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the child)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "loka.measure.trial_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
        )
        self._buffer = b""
        self._answer(START_LIMIT_S)

    def ask(self, trial: Trial) -> Answer:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(trial) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise _Gone(self._how_it_ended()) from None
        return self._answer(LIMIT_S)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def _answer(self, limit_s: float) -> Answer:
        """The next line of the child."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise _Gone(f"hung for {limit_s:.0f} s")
            chunk = os.read(self._process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise _Gone(self._how_it_ended())
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return msgspec.json.decode(line, type=Answer)

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"ended its process with {how}" + (f" ({lines[-1]})" if lines else "")
