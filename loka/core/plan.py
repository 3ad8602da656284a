"""The Plan: the kernel chosen for every site and role, with the numbers and the reason, chosen or not."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from loka.core.documents import read_document, write_document
from loka.core.environment import Environment
from loka.core.estimate import Estimate
from loka.core.gemm import Role
from loka.core.recipe import Format, Transform
from loka.core.survey import Struct
from loka.core.vectors import read_vectors, write_vectors

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = "loka.plan/1"


class Goal(StrEnum):
    TRAINING = "training"  # all three roles of every site
    SERVING = "serving"  # fprop alone, weights cast once and for all


class Choice(Struct, frozen=True):
    """The kernel of one role. In high precision ``error`` is None."""

    kernel: str
    reason: str
    error: Estimate | None = None  # mere_floored
    time_us: float = 0.0  # of the GEMM, at the site's most frequent M


class Refusal(Struct, frozen=True):
    """A kernel that was not chosen at a role; role None speaks of the site or block as a whole."""

    kernel: str
    reason: str
    role: Role | None = None
    transform: Transform = Transform.NONE


class BlockPlan(Struct, frozen=True):
    """A site run with the norm and activation behind it as one kernel. ``fp8_input``: the block in front hands it FP8."""

    kernel: str
    norm: str | None
    activation: str | None
    fp8_input: bool = False


class SitePlan(Struct, frozen=True):
    """One site. Its times are of a whole step: all its calls, casts included."""

    site: str
    k: int
    n: int
    kernels: dict[Role, Choice]
    baseline_us: float
    time_us: float
    reason: str
    transform: Transform = Transform.NONE
    block: BlockPlan | None = None
    refused: tuple[Refusal, ...] = ()

    @property
    def is_low_precision(self) -> bool:
        return self.block is not None or any(choice.error is not None for choice in self.kernels.values())

    @property
    def speedup(self) -> float:
        return self.baseline_us / self.time_us if self.time_us else 1.0


class PlanDocument(Struct, frozen=True):
    """plan.json"""

    fingerprint: str
    environment: Environment  # where its Survey was measured
    dtype: Format
    goal: Goal
    max_error: dict[Role, float]
    min_speedup: float
    sites: tuple[SitePlan, ...]
    keep: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The document, and the vectors of the transforms it chose (``<site>/center``, ``<site>/rescale``)."""

    document: PlanDocument
    vectors: "dict[str, Tensor]" = field(default_factory=dict)

    @property
    def sites(self) -> tuple[SitePlan, ...]:
        return self.document.sites

    def save(self, run: str | Path) -> Path:
        """Write plan.json, and plan.safetensors where there are vectors, into the folder ``run``; returns the former."""
        folder = Path(run)
        write_vectors(folder / "plan.safetensors", self.vectors)
        write_document(folder / "plan.json", SCHEMA, self.document)
        return folder / "plan.json"

    @classmethod
    def load(cls, run: str | Path) -> "Plan":
        """Read a plan by its folder or by the path of its plan.json."""
        path = Path(run)
        path = path if path.suffix == ".json" else path / "plan.json"
        document = read_document(path, SCHEMA, PlanDocument, made_by=f"loka plan {path.parent}")
        return cls(document, read_vectors(path.with_suffix(".safetensors")))
