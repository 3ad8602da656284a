"""Every able kernel on one linear layer: the error of its three GEMMs, and the time of their parts and of the whole.

The parts are the executor's own. Weights are rotated past the cache and cast beforehand, as a model finds them;
activations and gradients are warm, and their casts belong to the whole.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from loka.core.gemm import SOURCES, GemmProblem, Role, SiteShape, TensorName
from loka.kernels.contract import KERNELS, Kernel, why_not
from loka.kernels.device import device_of
from loka.kernels.executor import SiteExecutor, SiteKernels
from loka.kernels.operand import Form, Operand
from loka.measure.timing import Candidate, Timing, copies_past_cache, time_together
from loka.numerics.formats import format_of
from loka.numerics.metrics import ErrorReport, measure_error
from loka.numerics.reference import gemm


class GemmMeasurement(msgspec.Struct, frozen=True, omit_defaults=True):
    """One kernel at one role of one site; where ``why_not`` speaks there are no numbers."""

    kernel: str
    role: Role
    site: SiteShape
    recipe: str
    why_not: str | None = None
    cast_us: dict[TensorName, float] = {}  # of each operand; w's is paid once a step, not once a call
    gemm: Timing | None = None
    whole: Timing | None = None  # casts of activations and gradients, and the GEMM
    error: ErrorReport | None = None


@dataclass
class SiteTensors:
    """What a site multiplies: x, dy, and copies of w to rotate. ``reference`` is each role's output at float64."""

    x: Tensor
    dy: Tensor
    weights: list[Tensor]
    _references: dict[Role, Tensor] = field(default_factory=dict)

    @classmethod
    def random(cls, site: SiteShape, dtype: torch.dtype, device: torch.device, *, seed: int = 0) -> "SiteTensors":
        """Normal values of the sizes that occur in training: unit activations, outputs of unit variance, small gradients."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(rows: int, cols: int, std: float) -> Tensor:
            return (std * torch.randn(rows, cols, generator=generator, device=device)).to(dtype)

        copies = copies_past_cache(site.n * site.k * dtype.itemsize, device) if device.type == "cuda" else 3
        weights = [normal(site.n, site.k, site.k**-0.5) for _ in range(copies)]
        return cls(normal(site.m, site.k, 1.0), normal(site.m, site.n, 1e-3), weights)

    def stored(self, name: TensorName, turn: int) -> Tensor:
        return {TensorName.X: self.x, TensorName.DY: self.dy, TensorName.W: self.weights[turn % len(self.weights)]}[name]

    def reference(self, role: Role) -> Tensor:
        if role not in self._references:
            a, b = (self.stored(s.tensor, 0).t() if s.transposed else self.stored(s.tensor, 0) for s in SOURCES[role])
            self._references[role] = gemm(a, b)
        return self._references[role]


def measure_site(
    site: SiteShape, tensors: SiteTensors, kernels: Iterable[str], roles: Iterable[Role] = tuple(Role), *, timed: bool = True
) -> list[GemmMeasurement]:
    """Measure each of ``kernels`` at each role. One that raises is reported with its message, and the others go on."""
    measurements = []
    for role in roles:
        runs = {name: _Run.prepare(KERNELS.get(name), role, site, tensors) for name in kernels}
        able = {name: run for name, run in runs.items() if isinstance(run, _Run)}
        times = _time(able, tensors) if timed else {}
        for name, run in runs.items():
            recipe = str(KERNELS.get(name).recipe(role))
            if isinstance(run, str):
                measurements.append(GemmMeasurement(name, role, site, recipe, why_not=run))
                continue
            casts = dict(zip((source.tensor for source in SOURCES[role]), run.cast_keys(), strict=True))
            cast_us = {tensor: times[key].median_us for tensor, key in casts.items() if key in times}
            gemm_time, whole_time = times.get(f"{name} gemm"), times.get(f"{name} whole")
            measurements.append(GemmMeasurement(name, role, site, recipe, None, cast_us, gemm_time, whole_time, run.error))
    return measurements


def baseline_kernel(dtype: torch.dtype) -> str:
    """What a model of ``dtype`` runs on without LoKA."""
    return f"torch.{format_of(dtype)}"


@dataclass
class _Run:
    """One kernel at one role, tried once: its error, and the calls to time."""

    executor: SiteExecutor
    role: Role
    tensors: SiteTensors
    error: ErrorReport
    operands: Sequence[tuple[Mapping[Form, Operand], Mapping[Form, Operand]]]  # one pair for each copy of the weight

    @classmethod
    def prepare(cls, kernel: Kernel, role: Role, site: SiteShape, tensors: SiteTensors) -> "_Run | str":
        """The run, or why there is none: the kernel's refusal or the message of its failure."""
        dtype, device = tensors.x.dtype, tensors.x.device
        if reason := why_not(kernel, GemmProblem.of(role, site, format_of(dtype), device_of(device))):
            return reason
        executor = SiteExecutor(SiteKernels.same(kernel.name))
        a, b = SOURCES[role]
        copies = len(tensors.weights) if TensorName.W in (a.tensor, b.tensor) else 1
        try:
            operands = [
                (
                    executor.cast(a.tensor, tensors.stored(a.tensor, turn), (role,)),
                    executor.cast(b.tensor, tensors.stored(b.tensor, turn), (role,)),
                )
                for turn in range(copies)
            ]
            out = executor.multiply(role, *operands[0], dtype)
            error = measure_error(out, tensors.reference(role), per_column=role is Role.WGRAD)
        except Exception as failure:  # any library's any error: the reason is the result
            return f"failed: {type(failure).__name__}: {str(failure).splitlines()[0]}"
        return cls(executor, role, tensors, error, operands)

    def candidates(self) -> dict[str, Candidate]:
        """The calls to time. Kernels that want the same form of a tensor share the timing of its cast."""
        name = self.executor.kernels[self.role].name
        casts = {key: self._caster(s.tensor) for key, s in zip(self.cast_keys(), SOURCES[self.role], strict=True)}
        return {**casts, f"{name} gemm": self._gemm, f"{name} whole": self._whole}

    def cast_keys(self) -> list[str]:
        forms = self.executor.operand_forms(self.role)
        return [f"cast {s.tensor} {form!r}" for s, form in zip(SOURCES[self.role], forms, strict=True)]

    def _caster(self, name: TensorName) -> Candidate:
        return lambda turn: self._cast(name, turn)

    def _cast(self, name: TensorName, turn: int) -> Mapping[Form, Operand]:
        return self.executor.cast(name, self.tensors.stored(name, turn), (self.role,))

    def _gemm(self, turn: int) -> Tensor:
        a_casts, b_casts = self.operands[turn % len(self.operands)]
        return self.executor.multiply(self.role, a_casts, b_casts, self.tensors.x.dtype)

    def _whole(self, turn: int) -> Tensor:
        a, b = SOURCES[self.role]
        _, weight_casts = self.operands[turn % len(self.operands)]
        b_casts = weight_casts if b.tensor is TensorName.W else self._cast(b.tensor, turn)
        return self.executor.multiply(self.role, self._cast(a.tensor, turn), b_casts, self.tensors.x.dtype)


def _time(runs: Mapping[str, _Run], tensors: SiteTensors) -> dict[str, Timing]:
    candidates = {key: call for run in runs.values() for key, call in run.candidates().items()}
    device = tensors.x.device
    turns = max(8, len(tensors.weights)) if device.type == "cuda" else len(tensors.weights)
    return time_together(candidates, device, turns=turns, rounds=11 if device.type == "cuda" else 5)
