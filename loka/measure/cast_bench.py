"""``loka bench casts``: casts to e4m3 of one matrix, beside FBGEMM's, torch.compile's, and a copy of the same matrix."""

import msgspec
import torch
from torch import Tensor

from loka.core.gemm import TensorName
from loka.core.recipe import Format, Scaling
from loka.kernels.casting import CASTERS, Caster, CastProblem
from loka.kernels.operand import Form, OperandSpec
from loka.kernels.triton.share import cast_by_rows
from loka.measure.failure import told
from loka.measure.timing import TimedCall, copies_past_cache, time_together
from loka.numerics.scaling import STATIC_SCALE

COPY, FBGEMM, COMPILED = "copy", "fbgemm rowwise", "torch.compile rowwise"
BY_ROWS = "blocks' own, both"  # rows as they lie by powers of two, and their codes transposed with one scale for all
OURS = (Scaling.ROWWISE, Scaling.STATIC, Scaling.TENSORWISE, Scaling.BLOCK_1X128, Scaling.BLOCK_128X128)
LAYOUTS = {"plain": (False,), "transposed": (True,), "both": (False, True)}


class CastMeasurement(msgspec.Struct, frozen=True, omit_defaults=True):
    """Medians in µs by cast: ``warm`` with the matrix in the cache as an activation is, ``cold`` from memory."""

    rows: int
    cols: int
    warm_us: dict[str, float]
    cold_us: dict[str, float]
    bytes: dict[str, int]  # read once and written
    why_not: dict[str, str] = {}

    def share_of_copy(self, cast: str) -> float:
        """The rate at which a cast from memory moves its bytes, as a share of a copy's."""
        return (self.bytes[cast] / self.cold_us[cast]) / (self.bytes[COPY] / self.cold_us[COPY])


def name_of(scaling: Scaling, layout: str) -> str:
    return f"{scaling} {layout}"


def measure_casts(rows: int, cols: int, device: torch.device) -> CastMeasurement:
    """Time every cast of a bf16 matrix. One that raises is told, and the others go on."""
    matrices = [
        torch.randn(rows, cols, device=device, dtype=torch.bfloat16) for _ in range(copies_past_cache(2 * rows * cols, device))
    ]
    casts = {COPY: _Cast(COPY, ()), FBGEMM: _Cast("fbgemm", _forms(Scaling.ROWWISE, (False,)))}
    casts[COMPILED] = _Cast("torch", casts[FBGEMM].forms)
    casts |= {
        name_of(scaling, layout): _Cast("triton", _forms(scaling, transposed))
        for scaling in OURS
        for layout, transposed in LAYOUTS.items()
    }
    casts[BY_ROWS] = _Cast(BY_ROWS, ())
    why_not = {name: reason for name, cast in casts.items() if (reason := cast.why_not(matrices[0]))}
    able = {name: cast for name, cast in casts.items() if name not in why_not}
    calls: dict[str, TimedCall] = {}
    for name, cast in able.items():
        calls[f"warm {name}"] = lambda turn, cast=cast: cast.run(matrices[0])
        calls[f"cold {name}"] = lambda turn, cast=cast: cast.run(matrices[turn % len(matrices)])
    times = {key: timing.median_us for key, timing in time_together(calls, device, turns=max(8, len(matrices))).items()}
    return CastMeasurement(
        rows,
        cols,
        {name: times[f"warm {name}"] for name in able},
        {name: times[f"cold {name}"] for name in able},
        {name: rows * cols * (2 + cast.bytes_written) for name, cast in able.items()},
        why_not,
    )


class _Cast(msgspec.Struct, frozen=True):
    caster: str  # or COPY, or BY_ROWS
    forms: tuple[Form, ...]

    @property
    def bytes_written(self) -> int:
        """Of each value."""
        return len(self.forms) or 2

    def _parts(self) -> list[tuple[Caster, Form]]:
        """Who would make which forms; of the blocks' own cast its rows, of a copy none."""
        if self.caster == BY_ROWS:
            return [(CASTERS.get("triton"), form) for form in _forms(Scaling.ROWWISE, (False,))]
        return [(CASTERS.get(self.caster), form) for form in self.forms]

    def run(self, x: Tensor) -> object:
        if self.caster == COPY:
            return x.clone()
        return cast_by_rows(x) if self.caster == BY_ROWS else CASTERS.get(self.caster).cast(x, self.forms)

    def why_not(self, x: Tensor) -> str | None:
        problem = CastProblem.of(TensorName.X, x)
        refusals = [caster.why_not(form, problem) for caster, form in self._parts()]
        if reason := next((refusal for refusal in refusals if refusal), None):
            return reason
        try:
            self.run(x)
            torch.cuda.synchronize(x.device)
        except Exception as failure:  # any library's any error: the reason is the result
            return told(failure)
        return None


def _forms(scaling: Scaling, transposed: tuple[bool, ...]) -> tuple[Form, ...]:
    static_scale = STATIC_SCALE if scaling is Scaling.STATIC else None
    spec = OperandSpec(Format.E4M3, scaling, contraction_multiple=16, static_scale=static_scale)
    return tuple(Form(spec, is_transposed) for is_transposed in transposed)
