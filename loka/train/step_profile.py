"""Where the time of a training step goes: the profiler's kernels, sorted into the few kinds that a plan can act on."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from loka.data.batch import Batch
from loka.kernels.casting import CASTERS
from loka.models.recommender import Recommender
from loka.train.trainer import Trainer


class Kind(StrEnum):
    GEMM = "GEMM"  # batched ones too, and what a fused block does behind its GEMM
    CAST = "cast"  # to 8 bits, of weights too; casts that torch.compile fuses with their neighbours count as those
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
    busy: float | None  # kernel time ÷ step time: if well under 1, the host is the bottleneck; None where it is not known
    shares: dict[Kind, float]  # of the kernel time

    @property
    def is_sound(self) -> bool:
        """Whether kernels take no longer than the step: those of one stream cannot, unless the profiler counted some twice."""
        return self.busy is not None and self.busy <= 1.05


_INPUT_RANGE, _EMBEDDING_RANGE, _CAST_RANGE = "loka.input", "loka.embeddings", "loka.cast"
_KNOWN_KINDS = {  # by the whole name of a kernel, or of an operator around it
    "amax_kernel": Kind.CAST,
    "cast_kernel": Kind.CAST,
    "largest_kernel": Kind.CAST,
    "over_strips_kernel": Kind.CAST,
    "remember_kernel": Kind.CAST,
    "rescale_rows_kernel": Kind.CAST,
    "retranspose_kernel": Kind.CAST,
    "rowwise_kernel": Kind.CAST,
    "share_scales_kernel": Kind.CAST,
    "adam_cast_kernel": Kind.OPTIMIZER,  # although it casts what it steps
    "adam_by_rows_kernel": Kind.OPTIMIZER,
    "sum_bags_kernel": Kind.EMBEDDING,
    "bag_gradient_kernel": Kind.EMBEDDING,
    "sum_parts_kernel": Kind.EMBEDDING,
    "sum_blocks_kernel": Kind.EMBEDDING,
    "step_rows_kernel": Kind.EMBEDDING,
    "add_splits_kernel": Kind.GEMM,
    "block_forward_kernel": Kind.GEMM,  # norm, activation and cast are its epilogue
    "gemm_kernel": Kind.GEMM,
    "gradient_kernel": Kind.ELEMENTWISE,  # of norm and activation
    "norm_forward_kernel": Kind.ELEMENTWISE,
    "loka::cast_by_rows": Kind.CAST,
    "loka::cast_e4m3": Kind.CAST,
    "loka::cast_int8_rows": Kind.CAST,
    "loka::block_forward": Kind.GEMM,
    "loka::scaled_gemm": Kind.GEMM,
    "loka::mm_tf32": Kind.GEMM,
    "loka::onednn_int8_dynamic_mm": Kind.GEMM,
    "loka::onednn_int8_mm": Kind.GEMM,
    "loka::block_gradient": Kind.ELEMENTWISE,
    "loka::norm_gradient": Kind.ELEMENTWISE,
    "loka::norm_forward": Kind.ELEMENTWISE,
    "fbgemm::quantize_fp8_per_row": Kind.CAST,
    "onednn::qlinear_prepack": Kind.CAST,  # puts an operand's codes into oneDNN's own order
    "quantized::linear_prepack": Kind.CAST,
    _CAST_RANGE: Kind.CAST,
}
_ATTENTION_WORDS = ("flash", "fmha", "attention")
_GEMM_WORDS = (
    "gemm",
    "nvjet",
    "cutlass",
    "wgmma",
    "xmma",
    "splitk",
    "aten::mm",
    "aten::addmm",
    "aten::_int_mm",
    "bmm",
)


def kind_of(kernel: TimedKernel, *, compiled: bool) -> Kind:
    """The kind of a kernel. With the dense part ``compiled``, gradients outside compiled code are the embeddings'."""
    ops, name = kernel.ops, kernel.name.lower()
    # torch.compile names a kernel after all operators it was fused from, and some beside them: no word of it tells its kind.
    is_fused = name.startswith("triton_")
    # Looked up before the ranges: weights are cast again inside the step of their optimizer.
    if known := next((_KNOWN_KINDS[each] for each in (kernel.name, *ops) if each in _KNOWN_KINDS), None):
        return known
    if "quantize_fp8" in name and not is_fused:  # FBGEMM's, in Triton or CUDA
        return Kind.CAST
    if _INPUT_RANGE in ops:
        return Kind.INPUT
    if _EMBEDDING_RANGE in ops or any("RowWiseAdagrad" in op or "EmbeddingBackward" in op for op in ops):
        return Kind.EMBEDDING
    if any(op.startswith("Optimizer.") for op in ops):
        return Kind.OPTIMIZER
    if any(word in name for word in _ATTENTION_WORDS) and not is_fused:
        return Kind.ATTENTION
    if "triton_tem" in name or (any(word in name for word in _GEMM_WORDS) and not is_fused):
        return Kind.GEMM
    if any("BinaryCrossEntropy" in op for op in ops):
        return Kind.REST
    if is_fused or any("Compiled" in op for op in ops):
        return Kind.ELEMENTWISE
    if any(op.startswith("autograd::engine") for op in ops):
        return Kind.EMBEDDING if compiled else Kind.ELEMENTWISE
    if not compiled and any(op.startswith("loka.model") for op in ops):
        return Kind.ELEMENTWISE
    return Kind.REST


def times_of(kernels: Iterable[TimedKernel], *, compiled: bool) -> dict[Kind, float]:
    """The µs that the kernels of each kind take together."""
    times_us = dict.fromkeys(Kind, 0.0)
    for kernel in kernels:
        times_us[kind_of(kernel, compiled=compiled)] += kernel.time_us
    return times_us


def shares_of(kernels: Iterable[TimedKernel], *, compiled: bool) -> dict[Kind, float]:
    """Each kind's share of the kernels' time; the shares add up to 1."""
    times_us = times_of(kernels, compiled=compiled)
    total_us = sum(times_us.values())
    return {kind: time_us / total_us for kind, time_us in times_us.items()}


def profile_step(trainer: Trainer, batches: Iterator[Batch], *, warmup: int, timed: int, profiled: int) -> StepProfile:
    """Time ``timed`` steps as they run in training, with the making of batches, then profile ``profiled`` more."""

    def step() -> None:
        with record_function(_INPUT_RANGE):
            batch = next(batches)
        trainer.step(batch)

    config = trainer.config
    return profile_calls(
        step, trainer.model, config.batch_size, compiled=config.compile, warmup=warmup, timed=timed, profiled=profiled
    )


def profile_calls(
    call: Callable[[], object],
    model: Recommender,
    batch_size: int,
    *,
    compiled: bool,
    warmup: int = 0,
    timed: int,
    profiled: int,
) -> StepProfile:
    """Time ``timed`` calls, launched one after another, then profile ``profiled`` more."""
    device = next(model.parameters()).device

    def run(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    run(warmup)
    seconds = run(timed) / timed
    kernels = profile_kernels(lambda: run(profiled), model, compiled=compiled)
    return StepProfile(
        samples_per_s=batch_size / seconds,
        step_ms=1e3 * seconds,
        busy=sum(kernel.time_us for kernel in kernels) / profiled / (1e6 * seconds),
        shares=shares_of(kernels, compiled=compiled),
    )


def profile_kernels(run: Callable[[], object], model: Recommender, *, compiled: bool) -> list[TimedKernel]:
    """The kernels of what ``run`` does with ``model``: on a GPU those that ran there, on the CPU its operators."""
    on_cuda = next(model.parameters()).is_cuda
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with ExitStack() as ranges:
        ranges.enter_context(_in_range(model, "forward", "loka.model"))
        ranges.enter_context(_in_range(model.embeddings, "forward", _EMBEDDING_RANGE))
        if not compiled:  # a compiled model would be compiled anew for them
            ranges.enter_context(_in_range(model.dense_part, "forward", "loka.model"))  # as serving calls it
            for _, caster in CASTERS.items():
                ranges.enter_context(_in_range(caster, "cast", _CAST_RANGE))
        with profile(activities=activities, acc_events=True) as profiler:
            run()
    return list(_cuda_kernels(profiler) if on_cuda else _cpu_operators(profiler))


def _cuda_kernels(profiler: profile) -> Iterator[TimedKernel]:
    operators = [event for event in profiler.events() or [] if event.device_type == DeviceType.CPU]
    return kernels_on_device(operators, profiler.profiler.kineto_results.events())  # pyrefly: ignore[missing-attribute]


def kernels_on_device(operators: Iterable[Any], device_events: Iterable[Any]) -> Iterator[TimedKernel]:
    """Each kernel once, with the operators it was launched under.

    Kernels are those that ran on the device, not those that operators say they launched: some were told of many times over, and
    the kernel time came to 18 times the step's (large DLRM, H200, torch 2.11).
    """
    # Calls of the CUDA runtime are numbered apart, so their numbers may be operators' too.
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
def _in_range(owner: object, method: str, name: str) -> Iterator[None]:
    """Within the block, every call of the method is a range of that name in the profile."""
    call: Callable[..., object] = getattr(owner, method)

    def in_range(*args: object) -> object:
        with record_function(name):
            return call(*args)

    object.__setattr__(owner, method, in_range)  # a caster may be frozen
    try:
        yield
    finally:
        object.__delattr__(owner, method)  # the class's own again
