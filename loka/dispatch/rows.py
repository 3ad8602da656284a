"""Which numbers of rows a site's kernels take, as plain arithmetic: asked at every call, in a compiled graph as well."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from loka.core.gemm import Device, GemmProblem, Role, SiteShape
from loka.core.recipe import Format
from loka.kernels.contract import Kernel
from loka.kernels.operand import MOST_PADDING, padded_size

_SURELY_ENOUGH = 2**30  # a kernel that takes as many rows takes any number


@dataclass(frozen=True)
class RowLimits:
    """M between ``least`` and ``most``, if there is one, that pads well to every one of ``multiples``."""

    multiples: tuple[int, ...]
    least: int
    most: int | None

    def take(self, m: int) -> bool:
        if m < self.least or (self.most is not None and m > self.most):
            return False
        return all(padded_size(m, multiple) <= MOST_PADDING * m for multiple in self.multiples)


def row_limits(kernels: Mapping[Role, Kernel], k: int, n: int, out: Format, device: Device) -> RowLimits | str:
    """The rows that all of ``kernels`` take at a site of ``k`` by ``n``, or why one of them takes none."""
    multiples, least, most = set(), 0, _SURELY_ENOUGH
    for role, kernel in kernels.items():
        a, b = kernel.operands(role)
        multiples.add(max(a.contraction_multiple, b.contraction_multiple) if role is Role.WGRAD else a.outer_multiple)
        limits = _rows_of(kernel, role, k, n, out, device)
        if isinstance(limits, str):
            return limits
        least, most = max(least, limits[0]), min(most, limits[1])
    return RowLimits(tuple(sorted(multiples - {1})), least, None if most == _SURELY_ENOUGH else most)


def _rows_of(kernel: Kernel, role: Role, k: int, n: int, out: Format, device: Device) -> tuple[int, int] | str:
    """The first and last M that ``kernel`` takes: what it refuses for M alone are too few rows, or too many."""

    def refusal(m: int) -> str | None:
        return kernel.why_not(GemmProblem.of(role, SiteShape(m, k, n), out, device))

    able = next((m for m in (2**power for power in range(31)) if refusal(m) is None), None)
    if able is None:
        return f"{kernel.name} does not take {role} of {k}×{n}: {refusal(2048)}"
    least = _boundary(lambda m: refusal(m) is None, 0, able)
    if refusal(_SURELY_ENOUGH) is None:
        most = _SURELY_ENOUGH
    else:
        most = _boundary(lambda m: refusal(m) is not None, able, _SURELY_ENOUGH) - 1
    return (0 if least == 1 else least), most


def _boundary(holds: Callable[[int], bool], outside: int, inside: int) -> int:
    """The smallest number above ``outside`` at which ``holds``, found by halving; it holds at ``inside``."""
    while inside - outside > 1:
        middle = (outside + inside) // 2
        outside, inside = (outside, middle) if holds(middle) else (middle, inside)
    return inside
