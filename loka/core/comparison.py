"""The Comparison: a model under a plan beside its high-precision twin, measured in quality and in time.

Twins have the same weights at the start and see the same batches in the same order, so their difference is the plan's doing.
"""

from pathlib import Path

import msgspec

from loka.core.documents import read_document, write_document
from loka.core.environment import Environment
from loka.core.estimate import Estimate
from loka.core.plan import Goal
from loka.core.recipe import Format
from loka.core.survey import Struct

SCHEMA = "loka.comparison/1"
TWINS = "twins"  # the folder of a run below which each twin has its own,
HIGH, OTHER, PLANNED = "high", "other", "planned"  # by these names: in high precision, in another one, by the plan
WAITING = "waiting for the host"  # beside the kinds of work: a GPU that has nothing to do until more is launched


def other_precision(dtype: Format) -> Format:
    """The high precision beside a model's own: bf16 for fp32, tf32 for what is narrower."""
    return Format.BF16 if dtype in (Format.FP32, Format.TF32) else Format.TF32


class QualityPair(Struct, frozen=True):
    """Log-loss on the same held-out examples. ``change`` is relative: (planned − high) ÷ high.

    For serving, one set of weights run both ways. For training, weights that were trained both ways, run in high precision;
    ``other`` is then the change that training in another high precision makes (``other_precision``): one that nobody would
    call harmful, so that what is within it is not the plan's fault.
    """

    goal: Goal
    high_log_loss: float
    planned_log_loss: float
    change: Estimate  # over the pairs of held-out batches, at 95 %
    examples: int
    other: Estimate | None = None


class TimePair(Struct, frozen=True):
    """One batch of ``batch_size`` examples through both twins. ``speedup`` is high ÷ planned over interleaved pairs of runs."""

    goal: Goal  # a whole training step, or a forward pass of the frozen model
    batch_size: int
    high_us: float
    planned_us: float
    speedup: Estimate
    high_by_kind: dict[str, float] = msgspec.field(default_factory=dict)  # µs of a batch by kind of work, as a profiler saw it
    planned_by_kind: dict[str, float] = msgspec.field(default_factory=dict)


class Comparison(Struct, frozen=True):
    """comparison.json"""

    model: str  # in words: "Wukong small on the synthetic stream"
    fingerprint: str
    environment: Environment
    dtype: Format  # of the high-precision twin's GEMMs
    training_steps: int  # that twins were trained apart
    quality: tuple[QualityPair, ...] = ()
    times: tuple[TimePair, ...] = ()

    def save(self, run: str | Path) -> Path:
        """Write comparison.json into the folder ``run``; returns its path."""
        path = Path(run) / "comparison.json"
        write_document(path, SCHEMA, self)
        return path

    @classmethod
    def load(cls, run: str | Path) -> "Comparison":
        return read_document(Path(run) / "comparison.json", SCHEMA, cls, made_by="loka demo")
