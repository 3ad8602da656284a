"""Trying kernels in processes of their own first: one that hangs, or breaks the GPU for its process, then costs only that.

A child (``loka.measure.trial_child``) gets one problem a line and answers each. A kernel that raises is refused for that
problem; one that takes its process down, or too long, is not tried again. What a child compiles stays on disk, so several of
them at once are also how a measurement on a GPU gets its kernels compiled in little time.
"""

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Any

import msgspec
import torch

from loka.core.errors import KernelUnavailable
from loka.core.gemm import Role, SiteShape
from loka.core.recipe import Format, Transform
from loka.core.survey import BLOCK_KERNEL, Fault
from loka.kernels.contract import KERNELS
from loka.kernels.device import device_of
from loka.measure.block_parts import BlockShape
from loka.measure.failure import says_memory_was_short
from loka.measure.side_by_side import environment

START_LIMIT_S = 180.0  # to import torch and to reach the GPU
LIMIT_S = 60.0  # to compile a kernel and run it once, and as long behind every transform
BLOCK_LIMIT_S = 300.0  # a block's kernels, forward and backward, and torch's for comparison
MOST_CHILDREN = 12  # each holds a CUDA context and compiles on a core of its own
# Plain products of torch, which the reference itself is made of.
TRUSTED = tuple(f"loka.kernels.providers.{name}" for name in ("torch_high", "torch_left", "reference"))


class Trial(msgspec.Struct, frozen=True, tag="kernel"):
    """One problem of one kernel, to be run once on normal values. ``module`` registers the kernel when imported.

    ``beside`` are kernels that a plan may choose for other roles of the site: casts into the forms of both at once are compiled
    too. So is all that ``transforms`` need, since the site may turn out to want one of them.
    """

    kernel: str
    module: str
    role: Role
    shape: SiteShape
    dtype: Format
    weight_dtype: Format
    device: str
    has_bias: bool = False
    beside: tuple[str, ...] = ()
    transforms: tuple[Transform, ...] = ()
    cast_in_step: bool = False  # as a SiteRecord says it of the weight

    def __str__(self) -> str:
        return f"{self.role} of {self.shape}"


class BlockTrial(msgspec.Struct, frozen=True, tag="block"):
    """One block, to be run once in each way that it will be timed in, and on the rows that its error is taken from."""

    shape: BlockShape
    device: str
    error_rows: int
    kernel: str = BLOCK_KERNEL

    def __str__(self) -> str:
        return str(self.shape)


AnyTrial = Trial | BlockTrial


class Answer(msgspec.Struct, frozen=True):
    why_not: str | None = None  # the failure's message
    crowded: bool = False  # memory or time was short: alone it may run
    broken: bool = False  # nothing else will run in that child


class _Gone(Exception):
    """The child hung or ended; its message says which. ``crowded`` as in the Answer that it never gave."""

    def __init__(self, how: str, *, crowded: bool = False) -> None:
        super().__init__(how)
        self.crowded = crowded


def needs_trial(kernel: str) -> bool:
    return type(KERNELS.get(kernel)).__module__ not in TRUSTED


def children_for(device_type: str) -> int:
    """How many try kernels at once: on a CPU, where nothing is compiled and all would share the cores, one."""
    return min(MOST_CHILDREN, len(os.sched_getaffinity(0))) if device_type == "cuda" else 1


@contextmanager
def one_triton_cache(device_type: str) -> Iterator[None]:
    """Keep Triton's cache of compiled kernels where it is, for this process and its children. torch.compile would move it to
    its own folder, in each process when that first compiles something, and what one had compiled others would not find."""
    knobs = _triton_knobs(device_type)
    with environment({"TRITON_CACHE_DIR": knobs.cache.dir} if knobs else {}):
        yield


def try_kernels(trials: Iterable[AnyTrial], *, children: int = 1) -> dict[AnyTrial, str]:
    """The trials that failed, and why. A kernel registered by a module that cannot be imported is not tried.

    What failed for want of memory or time while others ran beside it is tried again alone.
    """
    todo = list(trials)
    knobs = _triton_knobs(todo[0].device) if todo else None
    with environment({"TRITON_PTXAS_PATH": _assembler(knobs, todo[0].device)} if knobs else {}):
        failures = _try_all(todo, children)
        crowded = [trial for trial, answer in failures.items() if children > 1 and answer.crowded]
        failures = {trial: answer for trial, answer in failures.items() if trial not in crowded} | _try_all(crowded, 1)
    return {trial: answer.why_not for trial, answer in failures.items() if answer.why_not is not None}


def _triton_knobs(device: str) -> Any:
    """Triton's settings, or None where there is no GPU or no Triton."""
    if not device.startswith("cuda"):
        return None
    try:
        from triton import knobs
    except ImportError:
        return None
    return knobs


def _assembler(knobs: Any, device: str) -> str:
    """The ptxas whose version is in the names of this process's compiled kernels, so that children look for the same names.

    torch.compile hands Triton another ptxas in each process that it compiles in, and Triton looks up the version only once: in
    this process perhaps before that, in a child after it.
    """
    from triton.backends.nvidia.compiler import get_ptxas_version

    named = get_ptxas_version(device_of(torch.device(device)).sm)
    path = knobs.nvidia.ptxas.path
    with environment({"TRITON_PTXAS_PATH": None}):  # then Triton takes its own
        paths = (path, knobs.nvidia.ptxas.path)
    return next((path for path in paths if _version(path) == named), path)


def _version(assembler: str) -> str:
    return subprocess.check_output([assembler, "--version"]).decode()


def _try_all(trials: list[AnyTrial], children: int) -> dict[AnyTrial, Answer]:
    tried = _Tried(trials)
    with ThreadPoolExecutor(children) as pool:
        try:
            list(pool.map(lambda _: tried.try_all(), range(min(children, len(tried.trials)))))
        except BaseException:
            tried.stop()
            raise
    return {trial: tried.failures[trial] for trial in tried.trials if trial in tried.failures}


class _Tried:
    """Trials that several children share out."""

    def __init__(self, trials: list[AnyTrial]) -> None:
        self.trials = trials
        self.failures: dict[AnyTrial, Answer] = {}
        self._todo = iter(trials)
        self._fatal: dict[str, Answer] = {}  # by kernel
        self._lock = Lock()

    def stop(self) -> None:
        self._todo = iter(())

    def try_all(self) -> None:
        """Take trials as long as there are some, in one child after another."""
        child: _Child | None = None
        try:
            while (trial := self._next()) is not None:
                child = child or _Child()
                if self._failed_for_good(trial, child):
                    child.close()
                    child = None
        finally:
            if child is not None:
                child.close()

    def _next(self) -> AnyTrial | None:
        """One whose kernel is not known to be fatal."""
        with self._lock:
            for trial in self._todo:
                if trial.kernel not in self._fatal:
                    return trial
                self.failures[trial] = self._fatal[trial.kernel]
            return None

    def _failed_for_good(self, trial: AnyTrial, child: "_Child") -> bool:
        try:
            answer = child.ask(trial)
        except _Gone as gone:
            answer = Answer(f"{gone} at {trial}, tried in a process of its own", crowded=gone.crowded, broken=True)
        with self._lock:
            if answer.why_not is not None:
                self.failures[trial] = answer
            if answer.broken:
                self._fatal[trial.kernel] = answer
        return answer.broken


class _Child:
    def __init__(self) -> None:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # in the child itself: it has one core, which a pool would only share out
        }
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the child)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "loka.measure.trial_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
        )
        self._buffer = b""
        try:
            self._answer(START_LIMIT_S)
        except _Gone as gone:
            self.close()
            raise KernelUnavailable(f"the process that kernels are tried in did not start: it {gone}") from None

    def ask(self, trial: AnyTrial) -> Answer:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(trial) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self._answer(BLOCK_LIMIT_S if isinstance(trial, BlockTrial) else LIMIT_S * (1 + len(trial.transforms)))

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
                raise _Gone(f"{Fault.HUNG} for {limit_s:.0f} s", crowded=True)
            chunk = os.read(self._process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise self._ended()
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return msgspec.json.decode(line, type=Answer)

    def _ended(self) -> _Gone:
        code = self._process.wait()
        self._stderr.seek(0)
        last = "".join(self._stderr.read().decode(errors="replace").strip().splitlines()[-1:])
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        told = f"{Fault.ENDED} its process with {how}" + (f" ({last})" if last else "")
        return _Gone(told, crowded=says_memory_was_short(last))
