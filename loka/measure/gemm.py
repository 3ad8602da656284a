"""Every able kernel on one linear layer: the error of its three GEMMs, and the time of their parts and of the whole.

The parts are the executor's own. Weights are rotated past the cache and cast beforehand, as a model finds them;
activations and gradients are warm, and their casts belong to the whole.
"""

from collections.abc import Iterable
from functools import partial

import msgspec

from loka.core.gemm import SOURCES, GemmProblem, Role, SiteShape, TensorName
from loka.kernels.contract import KERNELS, why_not
from loka.kernels.device import device_of
from loka.measure.failure import told
from loka.measure.parts import Option, SiteParts, SiteTensors
from loka.measure.timing import TimedCall, Timing, time_together
from loka.numerics.formats import format_of
from loka.numerics.metrics import ErrorReport


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


def measure_site(
    site: SiteShape, tensors: SiteTensors, kernels: Iterable[str], roles: Iterable[Role] = tuple(Role), *, timed: bool = True
) -> list[GemmMeasurement]:
    """Measure each of ``kernels`` at each role. One that raises is reported with its message, and the others go on."""
    measurements = []
    site_parts = SiteParts(tensors)
    for role in roles:
        options = [Option(KERNELS.get(name).name, role) for name in kernels]
        errors = {option: _try(site_parts, option, site) for option in options}
        able = [option for option, error in errors.items() if isinstance(error, ErrorReport)]
        times = _time(site_parts, able) if timed else {}
        for option, error in errors.items():
            recipe = str(option.recipe)
            if isinstance(error, str):
                measurements.append(GemmMeasurement(option.kernel, role, site, recipe, why_not=error))
                continue
            cast_us = {name: times[key].median_us for name, key in _cast_keys(option).items() if key in times}
            gemm_time, whole_time = times.get(f"{option.kernel} gemm"), times.get(f"{option.kernel} whole")
            measurements.append(GemmMeasurement(option.kernel, role, site, recipe, None, cast_us, gemm_time, whole_time, error))
    return measurements


def _try(site_parts: SiteParts, option: Option, site: SiteShape) -> ErrorReport | str:
    """The option's error, or why there is none: the kernel's refusal or the message of its failure."""
    x = site_parts.tensors.x
    problem = GemmProblem.of(option.role, site, format_of(x.dtype), device_of(x.device))
    if reason := why_not(KERNELS.get(option.kernel), problem):
        return reason
    try:
        return site_parts.error(option)
    except Exception as failure:  # any library's any error: the reason is the result
        return told(failure)


def _time(site_parts: SiteParts, options: Iterable[Option]) -> dict[str, Timing]:
    """Kernels that want the same form of a tensor share the timing of its cast."""
    calls: dict[str, TimedCall] = {}
    for option in options:
        site_parts.prepare(option)
        for (name, key), form in zip(_cast_keys(option).items(), option.forms, strict=True):
            calls[key] = partial(site_parts.cast, name, [form])
        calls[f"{option.kernel} gemm"] = partial(site_parts.multiply, option)
        calls[f"{option.kernel} whole"] = partial(site_parts.multiply, option, fresh=True)
    tensors = site_parts.tensors
    device = tensors.x.device
    turns = max(8, len(tensors.weights)) if device.type == "cuda" else len(tensors.weights)
    return time_together(calls, device, turns=turns, rounds=11 if device.type == "cuda" else 5)


def _cast_keys(option: Option) -> dict[TensorName, str]:
    return {
        source.tensor: f"cast {source.tensor} {form.key}"
        for source, form in zip(SOURCES[option.role], option.forms, strict=True)
    }
