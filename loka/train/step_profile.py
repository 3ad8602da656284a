"""Where the time of a training step goes: the profiler's kernels, sorted into the few kinds that a plan can act on."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from loka.data.batch import Batch
from loka.models.recommender import Recommender
from loka.train.trainer import Trainer


class Kind(StrEnum):
    GEMM = "GEMM"  # batched ones too
    ATTENTION = "attention"  # fused kernels, which hold GEMMs that no plan can reach
    ELEMENTWISE = "norm, activation"  # and whatever else the dense part does between its GEMMs
    EMBEDDING = "embedding"  # look-ups, their gradients, their optimizer
    OPTIMIZER = "optimizer"  # of the dense part
    INPUT = "input"
    REST = "rest"  # loss and metrics


@dataclass(frozen=True)
class TimedKernel:
    name: str
    ops: tuple[str, ...]  # the operators and ranges it was launched under, innermost first
    time_us: float


@dataclass(frozen=True)
class StepProfile:
    samples_per_s: float
    step_ms: float
    busy: float | None  # kernel time ÷ step time: well under 1, the host is the bottleneck; None where it is not known
    shares: dict[Kind, float]  # of the kernel time

    @property
    def is_sound(self) -> bool:
        """Kernels of one stream cannot take longer than the step: where they do, the profiler counted some twice."""
        return self.busy is not None and self.busy <= 1.05


_INPUT_RANGE, _EMBEDDING_RANGE = "loka.input", "loka.embeddings"
_ATTENTION_WORDS = ("flash", "fmha", "attention")
_GEMM_WORDS = (
    "gemm",
    "nvjet",
    "cutlass",
    "wgmma",
    "xmma",
    "triton_tem",
    "splitk",
    "aten::mm",
    "aten::addmm",
    "bmm",
    "qlinear",
    "int8",
)


def kind_of(kernel: TimedKernel, *, compiled: bool) -> Kind:
    """Sort one kernel. With the dense part ``compiled``, gradients outside compiled code are the embeddings'."""
    ops, name = kernel.ops, kernel.name.lower()
    if _INPUT_RANGE in ops:
        return Kind.INPUT
    if _EMBEDDING_RANGE in ops or any("RowWiseAdagrad" in op or "EmbeddingBackward" in op for op in ops):
        return Kind.EMBEDDING
    if any(op.startswith("Optimizer.") for op in ops):
        return Kind.OPTIMIZER
    if any(word in name for word in _ATTENTION_WORDS):
        return Kind.ATTENTION
    if any(word in name for word in _GEMM_WORDS):
        return Kind.GEMM
    if any("BinaryCrossEntropy" in op for op in ops):
        return Kind.REST
    if name.startswith("triton_") or any("Compiled" in op for op in ops):
        return Kind.ELEMENTWISE
    if any(op.startswith("autograd::engine") for op in ops):
        return Kind.EMBEDDING if compiled else Kind.ELEMENTWISE
    if not compiled and any(op.startswith("loka.model") for op in ops):
        return Kind.ELEMENTWISE
    return Kind.REST


def shares_of(kernels: Iterable[TimedKernel], *, compiled: bool) -> dict[Kind, float]:
    """Each kind's share of the kernels' time; the shares add up to 1."""
    times = dict.fromkeys(Kind, 0.0)
    for kernel in kernels:
        times[kind_of(kernel, compiled=compiled)] += kernel.time_us
    total = sum(times.values())
    return {kind: time_us / total for kind, time_us in times.items()}


def profile_step(trainer: Trainer, batches: Iterator[Batch], *, warmup: int, timed: int, profiled: int) -> StepProfile:
    """Time ``timed`` steps as they run in training, the making of the batches included, then profile a few more."""

    def run(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            with record_function(_INPUT_RANGE):
                batch = next(batches)
            trainer.step(batch)
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    run(warmup)
    seconds = run(timed) / timed
    kernels = profile_kernels(lambda: run(profiled), trainer.model)
    busy = sum(kernel.time_us for kernel in kernels) / profiled / (1e6 * seconds)
    return StepProfile(
        samples_per_s=trainer.config.batch_size / seconds,
        step_ms=1e3 * seconds,
        busy=busy,
        shares=shares_of(kernels, compiled=trainer.config.compile),
    )


def profile_kernels(run: Callable[[], object], model: Recommender) -> list[TimedKernel]:
    """The kernels of what ``run`` does with ``model``: on a GPU those that ran there, on the CPU its operators."""
    on_cuda = next(model.parameters()).is_cuda
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with (
        _in_range(model, "loka.model"),
        _in_range(model.embeddings, _EMBEDDING_RANGE),
        profile(activities=activities, acc_events=True) as profiler,
    ):
        run()
    return list(_cuda_kernels(profiler) if on_cuda else _cpu_operators(profiler))


def _cuda_kernels(profiler: profile) -> Iterator[TimedKernel]:
    operators = [event for event in profiler.events() or [] if event.device_type == DeviceType.CPU]
    return kernels_on_device(operators, profiler.profiler.kineto_results.events())  # pyrefly: ignore[missing-attribute]


def kernels_on_device(operators: Iterable[Any], device_events: Iterable[Any]) -> Iterator[TimedKernel]:
    """Each kernel once, with the operators it was launched under.

    Taken from what ran on the device and not from what operators say they launched: those told of some kernels many times
    over (large DLRM, H200, torch 2.11), and the kernel time came to 18 times the step's.
    """
    # A call of the CUDA runtime has a number of its own kind, which may be an operator's too.
    launchers = {event.id: event for event in operators if not event.name.startswith("cu")}
    ranges = {event.name for event in operators if event.is_user_annotation}
    seen = set()
    for event in device_events:
        key = (event.name(), event.start_ns(), event.duration_ns())
        # The profiler mirrors ranges onto the device, under the range's own name: those are not kernels.
        if event.device_type() != DeviceType.CUDA or event.name() in ranges or key in seen:
            continue
        seen.add(key)
        launcher = launchers.get(event.linked_correlation_id())
        ops = () if launcher is None else (launcher.name, *_parents(launcher))
        yield TimedKernel(event.name(), ops, event.duration_ns() / 1e3)


def _cpu_operators(profiler: profile) -> Iterator[TimedKernel]:
    for event in profiler.events() or []:
        if not event.is_user_annotation:  # a range's own time is Python's, not an operator's
            yield TimedKernel(event.name, tuple(_parents(event)), event.self_cpu_time_total)


def _parents(event: torch.autograd.profiler_util.FunctionEvent) -> Iterator[str]:
    parent = event.cpu_parent
    while parent is not None:
        yield parent.name
        parent = parent.cpu_parent


@contextmanager
def _in_range(module: nn.Module, name: str) -> Iterator[None]:
    """Within the block, the module's forward is a range of the profiler."""
    forward: Callable[..., object] = module.forward

    def in_range(*args: object) -> object:
        with record_function(name):
            return forward(*args)

    module.forward = in_range
    try:
        yield
    finally:
        del module.forward  # the class's own again
