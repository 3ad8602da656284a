"""What a recipe does to one sample by definition: cast by the oracle's arithmetic, multiplied at float64."""

import torch
from torch import Tensor

from loka.core.gemm import SOURCES, Role
from loka.core.recipe import Format, Scaling, Transform
from loka.kernels.transforms import undo_behind
from loka.measure.parts import Option, SiteParts, executor_of
from loka.numerics.formats import torch_dtype
from loka.numerics.metrics import flushed_share, relative_rms, saturated_share, silenced_share
from loka.numerics.reference import gemm
from loka.numerics.scaling import Quantized, quantize

OperandKind = tuple[Format, Scaling, float | None, Transform]


class Oracle:
    """Answers for options whose recipes are equal are computed once."""

    def __init__(self, parts: SiteParts) -> None:
        self._parts = parts
        self._cast: dict[tuple[Role, int, OperandKind], Quantized | Tensor] = {}
        self._lost: dict[tuple[Role, int, OperandKind], tuple[float, float]] = {}
        self._silenced: dict[OperandKind, float] = {}
        self._errors: dict[tuple[Role, OperandKind, OperandKind, Transform], float] = {}

    def relative_rms(self, option: Option) -> float:
        """The error that the option's formats, scales and transform explain."""
        a_kind, b_kind = _kinds(option)
        transform = executor_of(option.kernel, option.transform).transform_of(option.role)
        key = (option.role, a_kind, b_kind, transform)
        if key not in self._errors:
            out = gemm(self._operand(option.role, 0, a_kind), self._operand(option.role, 1, b_kind))
            out = self._undone(option.role, transform, out)
            self._errors[key] = relative_rms(out, self._parts.reference(option.role)).item()
        return self._errors[key]

    def lost(self, option: Option) -> tuple[float, float]:
        """The shares of values that the option's casts flushed to zero and saturated: those of the operand that lost more."""
        shares = [self._lost_by(option.role, index, kind) for index, kind in enumerate(_kinds(option))]
        return max(flushed for flushed, _ in shares), max(saturated for _, saturated in shares)

    def silenced(self, option: Option) -> float:
        """The share of x's features of which fprop's cast leaves next to nothing; 0 for the other roles."""
        if option.role is not Role.FPROP:
            return 0.0
        kind, _ = _kinds(option)
        if kind not in self._silenced:
            tensor, operand = self._tensor(Role.FPROP, 0, kind), self._operand(Role.FPROP, 0, kind)
            self._silenced[kind] = silenced_share(tensor, operand).item() if isinstance(operand, Quantized) else 0.0
        return self._silenced[kind]

    def _operand(self, role: Role, index: int, kind: OperandKind) -> Quantized | Tensor:
        if (role, index, kind) not in self._cast:
            format, scaling, static_scale, _ = kind
            tensor = self._tensor(role, index, kind)
            if format.is_8bit:
                self._cast[role, index, kind] = quantize(tensor, format, scaling, static_scale=static_scale)
            else:  # tf32 is at least as fine as bf16
                self._cast[role, index, kind] = tensor.to(torch.bfloat16 if format is Format.TF32 else torch_dtype(format))
        return self._cast[role, index, kind]

    def _lost_by(self, role: Role, index: int, kind: OperandKind) -> tuple[float, float]:
        if (role, index, kind) not in self._lost:
            tensor, operand = self._tensor(role, index, kind), self._operand(role, index, kind)
            shares = (0.0, 0.0)
            if isinstance(operand, Quantized):
                shares = (flushed_share(tensor, operand).item(), saturated_share(tensor, operand).item())
            self._lost[role, index, kind] = shares
        return self._lost[role, index, kind]

    def _tensor(self, role: Role, index: int, kind: OperandKind) -> Tensor:
        source = SOURCES[role][index]
        tensor = self._parts.transformed(source.tensor, kind[3])
        return tensor.t() if source.transposed else tensor

    def _undone(self, role: Role, transform: Transform, out: Tensor) -> Tensor:
        vectors = self._parts.vectors_of(transform, 0)
        if vectors is None:
            return out
        if role is Role.FPROP and vectors.shift_N is not None:
            return out + vectors.shift_N
        dy = self._parts.tensors.dy
        return undo_behind(role, out, transform, vectors, None if dy is None else dy.double().sum(0))


def _kinds(option: Option) -> tuple[OperandKind, OperandKind]:
    """By the recipe and not the spec: some kernels cast an operand inside."""
    recipe, (a, b) = option.recipe, option.forms
    return (
        (recipe.a_format, recipe.a_scaling, a.spec.static_scale, a.transform),
        (recipe.b_format, recipe.b_scaling, b.spec.static_scale, b.transform),
    )
