"""The contract of a kernel: one way to multiply two cast operands.

A kernel names itself ``provider.variant``, declares an operand spec per operand and role, says why it cannot take a
problem, and multiplies. It never casts: casts are shared between roles and timed apart (``loka.kernels.casting``).
"""

from typing import Protocol

import torch
from torch import Tensor

from loka.core.errors import InvalidInput, KernelUnavailable
from loka.core.gemm import Device, GemmProblem, Role
from loka.core.recipe import Recipe
from loka.core.registry import Registry
from loka.kernels.device import device_of
from loka.kernels.operand import Operand, OperandSpec, padding_refusal
from loka.numerics.formats import format_of


class Kernel(Protocol):
    """What a provider's file implements and registers in ``KERNELS``."""

    @property
    def name(self) -> str: ...

    def recipe(self, role: Role) -> Recipe:
        """What becomes of the numbers, whether in the operands' casts or inside the kernel."""
        ...

    def operands(self, role: Role) -> tuple[OperandSpec, OperandSpec]:
        """The specs of a and b. What they depend on besides the role is fixed for the kernel."""
        ...

    def missing(self, device: Device) -> str | None:
        """Why the kernel cannot run on ``device`` at all (hardware, library), or None. Loads no vendor library."""
        ...

    def why_not(self, problem: GemmProblem) -> str | None:
        """Why this problem's role or shape is refused, or None; asked only where nothing is missing."""
        ...

    def multiply(self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        """a·bᵀ (+ bias over b's outer axis) without padding. Traceable by torch.compile, free of host syncs."""
        ...


KERNELS: Registry[Kernel] = Registry("kernel", "loka.kernels.providers")


def add_kernel(kernel: Kernel) -> None:
    KERNELS.add(kernel.name, kernel)


def is_oracle(name: str) -> bool:
    """Whether the kernel called ``name`` is an oracle: others are compared with it, and nobody times it. Its class has
    ``is_oracle = True``; other classes need not have the attribute."""
    return getattr(KERNELS.get(name), "is_oracle", False)


def why_not(kernel: Kernel, problem: GemmProblem) -> str | None:
    """The whole answer: missing hardware or library, the kernel's own refusal, or padding that cannot pay."""
    if reason := kernel.missing(problem.device):
        return reason
    if reason := kernel.why_not(problem):
        return reason
    a, b = kernel.operands(problem.role)
    contraction_multiple = max(a.contraction_multiple, b.contraction_multiple)
    return (
        padding_refusal("k", problem.k, contraction_multiple)
        or padding_refusal("m", problem.m, a.outer_multiple)
        or padding_refusal("n", problem.n, b.outer_multiple)
    )


def require(kernel: Kernel, device: Device) -> None:
    """Raise, with the reason and the way out, where ``kernel`` cannot run on ``device``."""
    if reason := kernel.missing(device):
        raise KernelUnavailable(
            f"kernel {kernel.name} cannot run on {device}: {reason}. `loka kernels` lists what can run here."
        )


def multiply(kernel: Kernel, role: Role, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Run ``kernel`` on operands cast to its specs. Empty problems never reach a library."""
    if not torch.compiler.is_compiling():
        _check(kernel, role, a, b, out_dtype, bias)
    if _is_empty(a, b):
        out = a.codes.new_zeros((a.outer, b.outer), dtype=out_dtype)
        return out if bias is None else out + bias.to(out_dtype)
    return kernel.multiply(a, b, out_dtype, bias)


def _is_empty(a: Operand, b: Operand) -> bool:
    """For a number of rows that depends on data (``x[mask]``), which an exported program cannot ask for, the answer is no."""
    if not isinstance(a.outer, torch.SymInt):
        return 0 in (a.outer, b.outer, a.contraction)
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # loaded where there is a SymInt

    return guard_or_false(a.outer == 0) or 0 in (b.outer, a.contraction)


def _check(kernel: Kernel, role: Role, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> None:
    """Eager calls only: while tracing, torch itself refuses what does not fit, and the check would cost guards."""
    where = f"kernel {kernel.name}, {role}: a is {_describe(a)}, b is {_describe(b)}"
    if a.contraction != b.contraction:
        raise InvalidInput(f"{where}; they must contract over axes of equal length, got {a.contraction} and {b.contraction}")
    if a.codes.device != b.codes.device:
        raise InvalidInput(f"{where}; they lie on {a.codes.device} and {b.codes.device}: move them to one device")
    for name, operand, spec in zip("ab", (a, b), kernel.operands(role), strict=True):
        if operand.spec != spec:
            raise InvalidInput(f"{where}; it takes {name} cast to {spec}: cast the tensor with kernel.operands({role!r})")
    if bias is not None and bias.shape != (b.outer,):
        raise InvalidInput(f"{where}; bias must have shape ({b.outer},), got {tuple(bias.shape)}")
    format_of(out_dtype)  # refuses dtypes no kernel writes
    require(kernel, device_of(a.codes.device))


def _describe(operand: Operand) -> str:
    return f"{operand.outer}×{operand.contraction} {operand.spec}"
