"""How far a GEMM's output is from its reference, and what a cast lost. Everything is computed in float64, slice by slice.

A perfect value has error 0 even where the reference is 0; a wrong one there has error inf. NaN and inf in an output are
never averaged away: they reach the metric. Metric functions return 0-dimensional tensors and do not wait for the device.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from loka.core.errors import InvalidInput
from loka.core.estimate import Estimate
from loka.core.gemm import Role
from loka.numerics.confidence import estimate_mean
from loka.numerics.formats import decode, info
from loka.numerics.scaling import Quantized, dequantize, expand_scale, slices_of_rows

# fprop and dgrad have a floor for each row, since every example counts, in its output and in the gradient it sends on: with an
# rms of all, the few rows of large gradients, the clicks, would hide that those of all others are gone. wgrad has one for each
# column, since Adam normalizes each weight by itself.
FLOOR_AXIS = {Role.FPROP: 1, Role.DGRAD: 1, Role.WGRAD: 0}
SILENCED = 0.9  # of a feature's values: with more of them flushed it is as good as gone
MISREAD = 0.5  # of a feature's norm: a cast that is off by more is another feature
FLOOR = 0.1  # of rms(ref): below it a reference is too near zero for its relative error to say anything
AT_ONCE = 2**26  # elements in float64: several copies of a wide layer's whole gradient would fill a GPU


def mere(out: Tensor, ref: Tensor) -> Tensor:
    """Mean element-wise relative error |out−ref|/|ref|. Ruled by near-zero references: see ``mere_floored``."""
    return _mean_ratio(((out - ref).abs(), ref.abs()) for out, ref in _slices(out, ref))


def mere_floored(out: Tensor, ref: Tensor, *, axis: int | None = None) -> Tensor:
    """Mean of |out−ref|/max(|ref|, 0.1·rms(ref)), with the rms of each row (``axis`` 1), of each column (0), or of all (None).

    With an axis, a row or column that is 0 in both does not count: masked examples would hide what becomes of the others.
    """
    if axis is None:
        rms = (torch.stack([ref.square().sum() for _, ref in _slices(out, ref)]).sum() / ref.numel()).sqrt()
        return _mean_ratio(((out - ref).abs(), torch.maximum(ref.abs(), FLOOR * rms)) for out, ref in _slices(out, ref))
    if axis not in (0, 1) or out.ndim != 2:
        raise InvalidInput(
            f"an rms of each row (axis 1) or column (axis 0) is of a matrix, got axis {axis} of {tuple(out.shape)}"
        )
    sums = []
    for out_part, ref_part in _slices(out, ref, along=1 - axis):  # rows or columns stay whole, so each slice knows their rms
        error, rms = (out_part - ref_part).abs(), ref_part.square().mean(dim=axis, keepdim=True).sqrt()
        lines = (rms != 0).sum(dtype=torch.float64)  # an error in a line of 0 is inf, whatever it is divided by
        sums.append(torch.stack([_ratio(error, torch.maximum(ref_part.abs(), FLOOR * rms)).sum(), lines]))
    total, lines = torch.stack(sums).sum(0)
    return total / (lines.clamp(min=1) * out.shape[axis])


def relative_rms(out: Tensor, ref: Tensor) -> Tensor:
    """rms(out−ref)/rms(ref)."""
    sums = [torch.stack([(out - ref).square().sum(), ref.square().sum()]) for out, ref in _slices(out, ref)]
    return _ratio(*torch.stack(sums).sum(0)).sqrt()


def sqnr_db(out: Tensor, ref: Tensor) -> Tensor:
    """Signal to quantization noise in decibels, 20·log10(rms(ref)/rms(out−ref)); inf for a perfect output."""
    return -20 * relative_rms(out, ref).log10()


def flushed_share(x: Tensor, q: Quantized) -> Tensor:
    """The share of nonzero finite values of ``x`` that became 0. Under a NaN scale they became NaN, and do not count as 0."""
    return _share(((_is_flushed(q), x) for x, q in _row_slices(x, q)), x.device)


def silenced_share(x: Tensor, q: Quantized) -> Tensor:
    """The share of features (columns of ``x``) of whose nonzero values more than nine tenths became 0.

    The product may hardly show it if other features rule it, but nothing behind the cast can ever learn from such a feature.
    """
    flushed_K, present_K = torch.zeros(2, x.shape[1], dtype=torch.float64, device=x.device)
    for part, q_part in _row_slices(x, q):
        flushed_K += (_is_candidate(part) & _is_flushed(q_part)).sum(0)
        present_K += _is_candidate(part).sum(0)
    silenced_K = (present_K > 0) & (flushed_K > SILENCED * present_K)
    return silenced_K.sum(dtype=torch.float64) / (present_K > 0).sum().clamp(min=1)


def misread_share(x: Tensor, q: Quantized) -> Tensor:
    """The share of features (columns of ``x``) whose cast is off by more than half their norm.

    This is for sums over rows: there a feature's large values decide, and it may lose all small ones (unless the other operand
    has larger rows where they are).
    """
    off_K, norm_K = torch.zeros(2, x.shape[1], dtype=torch.float64, device=x.device)
    for part, q_part in _row_slices(x, q):
        exact = part.to(torch.float64)
        off_K += (dequantize(q_part, torch.float64) - exact).square().sum(0)
        norm_K += exact.square().sum(0)
    present_K = norm_K != 0
    misread_K = present_K & ~(off_K <= MISREAD**2 * norm_K)  # NaN is misread
    return misread_K.sum(dtype=torch.float64) / present_K.sum().clamp(min=1)


def saturated_share(x: Tensor, q: Quantized) -> Tensor:
    """The share of nonzero finite values of ``x`` past the range of their scale, |x/scale| > max."""
    return _share(((_is_saturated(x, q), x) for x, q in _row_slices(x, q)), x.device)


@dataclass(frozen=True)
class ErrorReport:
    """One output's error by each metric."""

    mere: float
    mere_floored: float
    relative_rms: float
    sqnr_db: float


METRICS = tuple(field.name for field in fields(ErrorReport))


def measure_error(out: Tensor, ref: Tensor, role: Role | None = None) -> ErrorReport:
    """Every metric of one output, with the floor that ``role`` asks for; waits for the device once."""
    floored = mere_floored(out, ref, axis=None if role is None else FLOOR_AXIS[role])
    metrics = (mere(out, ref), floored, relative_rms(out, ref), sqnr_db(out, ref))
    return ErrorReport(*torch.stack(metrics).tolist())


class ErrorSamples:
    """Error reports of repeated independent samples, until their mean is known well enough."""

    def __init__(self) -> None:
        self._reports: list[ErrorReport] = []

    def __len__(self) -> int:
        return len(self._reports)

    def add(self, report: ErrorReport) -> None:
        self._reports.append(report)

    def estimate(self, metric: str) -> Estimate:
        """The mean of one metric over the samples so far, with its 95 % interval."""
        if metric not in METRICS:
            raise InvalidInput(f"no error metric is called {metric!r}; known: {', '.join(METRICS)}")
        return estimate_mean([getattr(report, metric) for report in self._reports])

    def summary(self) -> dict[str, Estimate]:
        """``estimate`` of every metric, by name."""
        return {metric: self.estimate(metric) for metric in METRICS}

    def tight(self, metric: str, relative: float) -> bool:
        """Whether the 95 % interval of ``metric`` reaches no further than ``relative``·|mean| to either side."""
        estimate = self.estimate(metric)
        return estimate.low == estimate.high or estimate.high - estimate.mean <= relative * abs(estimate.mean)


def _slices(out: Tensor, ref: Tensor, along: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Both in float64, about AT_ONCE elements at a time: some rows, or with ``along`` 1 some columns."""
    if out.shape != ref.shape:
        raise InvalidInput(f"output and reference must have one shape, got {tuple(out.shape)} and {tuple(ref.shape)}")
    if out.numel() == 0:
        raise InvalidInput(f"an empty output, shape {tuple(out.shape)}, has no error to measure")
    if out.ndim == 0:
        out, ref = out[None], ref[None]
    length = max(1, AT_ONCE * out.shape[along] // out.numel())
    for part, ref_part in zip(out.split(length, along), ref.split(length, along), strict=True):
        yield part.to(torch.float64), ref_part.to(torch.float64)


def _row_slices(x: Tensor, q: Quantized) -> Iterator[tuple[Tensor, Quantized]]:
    """The tensor and its cast, about AT_ONCE elements at a time, in whole rows and blocks."""
    if x.shape != q.codes.shape:
        raise InvalidInput(f"a tensor and its cast must have one shape, got {tuple(x.shape)} and {tuple(q.codes.shape)}")
    for rows, part in slices_of_rows(q, max(1, AT_ONCE // max(1, x.shape[1]))):
        yield x[rows], part


def _mean_ratio(slices: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    sums = [(_ratio(error, reference).sum(), error.numel()) for error, reference in slices]
    return torch.stack([total for total, _ in sums]).sum() / sum(count for _, count in sums)


def _ratio(error: Tensor, reference: Tensor) -> Tensor:
    return torch.where(error == 0, 0.0, error / reference)


def _is_flushed(q: Quantized) -> Tensor:
    return (decode(q.codes) == 0) & expand_scale(q.scale, q.scaling, q.codes.shape).isfinite()


def _is_saturated(x: Tensor, q: Quantized) -> Tensor:
    scale = expand_scale(q.scale, q.scaling, q.codes.shape).to(torch.float64)
    # A scale made from amax is rounded to FP32, which can leave amax itself 2⁻²⁴ past the maximum.
    return x.to(torch.float64).abs() > info(q.format).max * (1 + 2**-22) * scale


def _is_candidate(x: Tensor) -> Tensor:
    """Zeros do not count, as they can be neither flushed nor saturated; nor do inf and NaN, which stay visible."""
    return x.isfinite() & (x != 0)


def _share(slices: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
    """The share of hits among the values that could be hit."""
    hits, candidates = torch.zeros(2, dtype=torch.float64, device=device)
    for hit, x in slices:
        hits += (hit & _is_candidate(x)).sum()
        candidates += _is_candidate(x).sum()
    return hits / candidates.clamp(min=1)
