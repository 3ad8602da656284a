"""A site's three GEMMs, each as the problem a kernel sees.

Axes:  M rows of the batch,  K in_features,  N out_features.  A kernel multiplies a (m×k) by b (n×k) into m×n: both
operands have the contracted axis last, so a role decides which stored tensor is transposed on the way in:

    role    computes          a           b           m  n  k
    fprop   y  = x·wᵀ         x           w           M  N  K
    dgrad   dx = dy·w         dy          wᵀ          M  K  N
    wgrad   dw = dyᵀ·x        dyᵀ         xᵀ          N  K  M
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from loka.core.recipe import Format


class Role(StrEnum):
    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"

    def __reduce_ex__(self, proto: object) -> tuple[type["Role"], tuple[str]]:
        """By its value in every Python: 3.11.2 would ask ``getattr``, which torch does not load from a checkpoint."""
        return type(self), (self.value,)


class TensorName(StrEnum):
    """The three tensors of a site that are cast."""

    X = "x"
    DY = "dy"
    W = "w"


@dataclass(frozen=True)
class Source:
    """Where a role takes an operand from: a stored tensor, or its transpose."""

    tensor: TensorName
    transposed: bool


SOURCES: dict[Role, tuple[Source, Source]] = {
    Role.FPROP: (Source(TensorName.X, False), Source(TensorName.W, False)),
    Role.DGRAD: (Source(TensorName.DY, False), Source(TensorName.W, True)),
    Role.WGRAD: (Source(TensorName.DY, True), Source(TensorName.X, True)),
}


@dataclass(frozen=True)
class Device:
    """The hardware a problem runs on, as far as kernels care."""

    type: str  # "cpu" or "cuda"
    name: str
    capability: tuple[int, int] = (0, 0)  # CUDA compute capability; (0, 0) elsewhere

    @property
    def sm(self) -> int:
        return 10 * self.capability[0] + self.capability[1]

    def __str__(self) -> str:
        return f"{self.name} (sm_{self.sm})" if self.type == "cuda" else self.name


@dataclass(frozen=True)
class SiteShape:
    """One linear layer as called: ``m`` rows in, ``k`` in_features, ``n`` out_features."""

    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"


@dataclass(frozen=True)
class GemmProblem:
    """One role's GEMM in its own axes: a (m×k) times b (n×k), contracted over k, into m×n of ``out``. ``across``: rows of x lie
    side by side in every feature, as behind ``x.mT``."""

    role: Role
    m: int
    n: int
    k: int
    out: Format
    device: Device
    across: bool = False

    @classmethod
    def of(cls, role: Role, site: SiteShape, out: Format, device: Device, *, across: bool = False) -> "GemmProblem":
        m, n, k = {
            Role.FPROP: (site.m, site.n, site.k),
            Role.DGRAD: (site.m, site.k, site.n),
            Role.WGRAD: (site.n, site.k, site.m),
        }[role]
        return cls(role, m, n, k, out, device, across)

    def __str__(self) -> str:
        return f"{self.role} m={self.m} n={self.n} k={self.k}"


def by_frequency(calls: Mapping[int, float]) -> list[int]:
    """The M of a site's ``calls`` in a step, the most frequent first; of equally frequent ones, the largest."""
    return sorted(calls, key=lambda m: (-calls[m], -m))


def stand_in(m: int, measured: Iterable[int]) -> int:
    """The M whose times stand for those of ``m``: the nearest measured one above, else the largest."""
    ordered = sorted(measured)
    return next((rows for rows in ordered if rows >= m), ordered[-1])
