"""Operands: how a kernel wants a tensor cast, and a tensor that was cast that way.

An operand is a matrix with the contracted axis last (see ``loka.core.gemm``). It is taken from a stored tensor as it is
or transposed, and perhaps transformed; the stored tensor with those choices and the spec is a form. Roles that ask for
equal forms share one cast.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from torch import Tensor

from loka.core.recipe import Accumulation, Format, Recipe, Scaling, Transform

NO_STATIC_DGRAD = "a static scale belongs to x behind a norm, and dgrad reads none"


class Layout(StrEnum):
    """How the codes lie in memory."""

    PLAIN = "plain"  # contracted axis contiguous; in high precision any strides
    ONEDNN = "onednn"  # plain, and packed once into oneDNN's own blocks


@dataclass(frozen=True)
class OperandSpec:
    """How an operand must be cast for a kernel. Both axes are zero-padded to the multiples given."""

    format: Format
    scaling: Scaling = Scaling.NONE
    outer_multiple: int = 1
    contraction_multiple: int = 1
    static_scale: float | None = None  # the constant of STATIC scaling
    layout: Layout = Layout.PLAIN

    def __str__(self) -> str:
        return str(self.format) if self.scaling is Scaling.NONE else f"{self.format} {self.scaling}"


@dataclass(frozen=True)
class Form:
    """One cast that a stored tensor is asked for. Kernels know its spec; the transform is the executor's own."""

    spec: OperandSpec
    transposed: bool
    transform: Transform = Transform.NONE

    def __str__(self) -> str:
        return f"{self.spec}ᵀ" if self.transposed else str(self.spec)

    @property
    def key(self) -> str:
        """What tells this form of a tensor from every other, for documents: ``e4m3 rowwise 1x16ᵀ center``."""
        spec = self.spec
        parts = [f"{spec} {spec.outer_multiple}x{spec.contraction_multiple}" if spec.format.is_8bit else str(spec)]
        parts[-1] += "ᵀ" if self.transposed else ""
        parts += [f"scale={spec.static_scale:.9g}"] if spec.static_scale is not None else []
        parts += [spec.layout] if spec.layout is not Layout.PLAIN else []
        parts += [self.transform] if self.transform is not Transform.NONE else []
        return " ".join(parts)


def recipe_of(specs: tuple[OperandSpec, OperandSpec], accumulation: Accumulation) -> Recipe:
    """The recipe of a kernel that multiplies its operands as they are given."""
    a, b = specs
    return Recipe(a.format, a.scaling, b.format, b.scaling, accumulation)


class Operand(NamedTuple):
    """A cast matrix: ``codes`` padded as the spec asks, ``outer`` and ``contraction`` as they were before padding."""

    codes: Tensor
    scale: Tensor | None
    outer: int
    contraction: int
    spec: OperandSpec


def operand_of(form: Form, codes: Tensor, scale: Tensor | None, shape: Sequence[int]) -> Operand:
    """What was cast into ``form`` from a stored tensor of ``shape``."""
    outer, contraction = (shape[1], shape[0]) if form.transposed else (shape[0], shape[1])
    return Operand(codes, scale, outer, contraction, form.spec)


def padded_size(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


MOST_PADDING = 1.25


def padding_refusal(name: str, size: int, multiple: int) -> str | None:
    """Why an axis should not be padded to ``multiple``: the work grows by more than MOST_PADDING, so it cannot pay."""
    padded = padded_size(size, multiple)
    if padded > MOST_PADDING * size:
        return f"{name}={size} would be padded to {padded} (a multiple of {multiple}), {padded / max(size, 1):.2g}× the work"
    return None
