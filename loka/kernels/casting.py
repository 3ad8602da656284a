"""Casting a stored tensor into every form its roles ask for.

A caster is added like a kernel, with its name in ``PREFERENCE``. Each form goes to the first caster there that takes it, and a
caster gets all of its forms in one call, so that it can read the tensor as few times as possible.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from loka.core.gemm import Device, TensorName
from loka.core.recipe import Format, Transform
from loka.core.registry import Registry
from loka.kernels.device import device_of
from loka.kernels.operand import Form, Operand
from loka.kernels.stepping import AdamStep
from loka.kernels.transforms import TransformVectors, apply_to
from loka.numerics.formats import format_of, torch_dtype


@dataclass(frozen=True)
class CastProblem:
    """A stored tensor as casters see it: which one it is, its shape and format, and where it lies."""

    tensor: TensorName
    rows: int
    cols: int
    format: Format
    device: Device

    @classmethod
    def of(cls, name: TensorName, tensor: Tensor) -> "CastProblem":
        return cls(name, tensor.shape[0], tensor.shape[1], format_of(tensor.dtype), device_of(tensor.device))


class Caster(Protocol):
    """One implementation of casts to 8-bit forms."""

    def why_not(self, form: Form, problem: CastProblem) -> str | None:
        """Why this caster does not write ``form`` of that tensor, or None."""
        ...

    def cast(self, tensor: Tensor, forms: Sequence[Form]) -> list[Operand]:
        """The operands of ``forms``, in their order. ``tensor`` is 2-D; traceable by torch.compile."""
        ...


@runtime_checkable
class Rewriter(Protocol):
    """A caster that can write operands again where they lie: in one read, by what it remembers of the tensor."""

    def remember(self, tensor: Tensor, forms: Sequence[Form]) -> Tensor: ...

    def rewriting(self, tensor: Tensor, operands: Mapping[Form, Operand], memory: Tensor) -> Callable[[], None]:
        """A function that writes ``operands`` again from the values that ``tensor`` has when it is called."""
        ...


@runtime_checkable
class Stepper(Rewriter, Protocol):
    """A rewriter that can make a step of Adam in the same pass."""

    def rewriting(
        self, tensor: Tensor, operands: Mapping[Form, Operand], memory: Tensor, adam: AdamStep | None = None
    ) -> Callable[[], None]:
        """The same; with ``adam`` the function makes that step first, and casts the values behind it."""
        ...

    def can_step(self, tensor: Tensor, forms: Sequence[Form]) -> bool:
        """Whether ``rewriting`` takes an ``adam`` here."""
        ...


@runtime_checkable
class Summer(Protocol):
    """A caster that sums a tensor's columns as it reads them."""

    def cast_and_sum(self, tensor: Tensor, forms: Sequence[Form]) -> tuple[list[Operand], Tensor]:
        """What ``cast`` returns, and the sums in FP32."""
        ...


CASTERS: Registry[Caster] = Registry("caster", "loka.kernels.providers")

PREFERENCE = ("onednn", "triton", "fbgemm", "torch")  # fastest first where able; torch takes everything


def choose_caster(form: Form, problem: CastProblem) -> str:
    """The caster that writes ``form`` of this tensor."""
    return next(name for name in PREFERENCE if name in CASTERS and CASTERS.get(name).why_not(form, problem) is None)


def cast(
    name: TensorName, tensor: Tensor, forms: Sequence[Form], vectors: TransformVectors | None = None
) -> tuple[Operand, ...]:
    """Cast the 2-D ``tensor`` into all ``forms``: high-precision ones by dtype alone, the others by their casters."""
    operands: dict[Form, Operand] = {}
    for transform, share in _by_transform(forms).items():
        made, _ = _cast_alike(name, apply_to(name, tensor, transform, vectors), share)
        operands.update(made)
    return tuple(operands[form] for form in forms)


def cast_and_sum(name: TensorName, tensor: Tensor, forms: Sequence[Form]) -> tuple[tuple[Operand, ...], Tensor]:
    """``cast`` without transforms, and the sums of the tensor's columns in FP32: in the same read, if a caster can."""
    assert all(form.transform is Transform.NONE for form in forms), "sums are of the tensor as it is"
    operands, sum_C = _cast_alike(name, tensor, forms, summed=True)
    return tuple(operands[form] for form in forms), tensor.sum(0, dtype=torch.float32) if sum_C is None else sum_C


def _cast_alike(
    name: TensorName, tensor: Tensor, forms: Sequence[Form], *, summed: bool = False
) -> tuple[dict[Form, Operand], Tensor | None]:
    """The operands of ``forms``, and the columns' sums if they were asked for and a caster could make them."""
    operands = {form: cast_high_precision(tensor, form) for form in forms if not form.spec.format.is_8bit}
    sum_C = None
    for name_of_caster, share in _by_caster(name, tensor, [form for form in forms if form not in operands]).items():
        caster = CASTERS.get(name_of_caster)
        if summed and sum_C is None and isinstance(caster, Summer):
            made, sum_C = caster.cast_and_sum(tensor, share)
        else:
            made = caster.cast(tensor, share)
        operands.update(zip(share, made, strict=True))
    return operands, sum_C


def rewriter_of(name: TensorName, tensor: Tensor, forms: Sequence[Form]) -> Rewriter | None:
    """The one caster that can rewrite all ``forms`` of ``tensor`` where they lie, if there is one."""
    if any(form.transform is not Transform.NONE or not form.spec.format.is_8bit for form in forms):
        return None
    casters = list(_by_caster(name, tensor, forms))
    caster = CASTERS.get(casters[0]) if len(casters) == 1 else None
    return caster if isinstance(caster, Rewriter) else None


def cast_high_precision(tensor: Tensor, form: Form) -> Operand:
    """A change of dtype, and for the transpose a view: high-precision GEMMs take either order of axes."""
    codes = tensor.to(torch_dtype(form.spec.format))
    codes = codes.t() if form.transposed else codes
    return Operand(codes, None, codes.shape[0], codes.shape[1], form.spec)


def _by_transform(forms: Sequence[Form]) -> dict[Transform, list[Form]]:
    shares: dict[Transform, list[Form]] = {}
    for form in forms:
        shares.setdefault(form.transform, []).append(form)
    return shares


def _by_caster(name: TensorName, tensor: Tensor, forms: Sequence[Form]) -> dict[str, list[Form]]:
    if not forms:
        return {}
    problem = CastProblem.of(name, tensor)
    shares: dict[str, list[Form]] = {}
    for form in forms:
        shares.setdefault(choose_caster(form, problem), []).append(form)
    return shares
