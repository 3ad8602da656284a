"""The Survey: for every site and role what each kernel would cost in error and save in time, and why some are not able.

Times are medians in µs by M, the rows of a call. A plan adds them up: the casts a choice of kernels needs, and its GEMMs.
"""

import hashlib
import math
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import msgspec

from loka.core.documents import read_document, same_fields, write_document
from loka.core.environment import Environment
from loka.core.errors import InvalidFile
from loka.core.estimate import Estimate
from loka.core.files import file_in
from loka.core.gemm import Role, TensorName
from loka.core.recipe import Format, Transform
from loka.core.vectors import read_vectors, vectors_beside

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = "loka.survey/8"  # 1 had no misread_backward, and nothing to make it from
same_fields(
    "loka.survey/2",  # without ``entry``: blocks cast their inputs
    "loka.survey/3",  # without ``stays``: apply_plan says then where nothing can stand in for a site
    "loka.survey/4",  # without ``in_step_us``: weights are cast after steps
    "loka.survey/5",  # without ``record``
    "loka.survey/6",  # without ``compiled``: nothing was timed so
    "loka.survey/7",  # without ``feeds_product``: timed as if no product read an output
)
GATE = "mere_floored"  # the one of a candidate's errors that plans are held to
BLOCK_KERNEL = "triton.block"  # the fused kernel of every block
Times = dict[int, float]  # M → µs


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class Fault(StrEnum):
    """How a kernel failed when it was tried. No file has a field for it: its ``why_not`` begins with this word."""

    FAILED = "failed"
    RETURNED = "returned"  # NaN, inf or nonsense
    HUNG = "hung"
    ENDED = "ended"  # its process


class Candidate(Struct, frozen=True):
    """One kernel at one role. Where ``why_not`` is set there are neither errors nor times."""

    kernel: str
    role: Role
    recipe: str
    transform: Transform = Transform.NONE
    why_not: str | None = None
    error: dict[str, Estimate] = {}  # by metric: mere_floored, relative_rms, …
    flushed: float = 0.0  # shares of the values that the casts lost
    saturated: float = 0.0
    silenced: float = 0.0  # share of x's features that fprop's cast all but erases
    forms: tuple[str, ...] = ()  # the keys of the casts it reads, a's and b's
    gemm_us: Times = {}  # with the epilogue; empty for a recipe whose kernel cannot be timed here

    @property
    def fault(self) -> Fault | None:
        """None where it is able, or was refused without being tried."""
        return next((fault for fault in Fault if self.why_not and self.why_not.startswith(fault)), None)


class CastTime(Struct, frozen=True):
    """The time to cast one tensor into several forms at once, so that a plan can share a cast between roles."""

    tensor: TensorName
    forms: tuple[str, ...]  # sorted keys
    time_us: Times
    in_step_us: Times = {}  # of a weight whose optimizer can make it: what it adds to that optimizer's step


class BlockCandidate(Struct, frozen=True):
    """A site with the norm and activation behind it as one fused kernel, against the same in compiled high precision."""

    kernel: str
    norm: str | None  # the modules it absorbs, by name
    activation: str | None
    why_not: str | None = None
    error: dict[Role, dict[str, Estimate]] = {}
    flushed: float = 0.0  # as a Candidate's in fprop, by its own casts of x and w
    silenced: float = 0.0
    misread_backward: float = 0.0  # largest share of features (of x, dz or w) that backward's casts by one scale distort
    input_cast_us: Times = {}  # paid where the module in front hands on no FP8
    training_cast_us: Times = {}  # the same in training, where wgrad reads the input transposed
    forward_us: Times = {}  # serving: nothing saved
    training_us: Times = {}  # forward that saves, and backward
    weight_cast_us: Times = {}  # what the weight's cast adds to a step; in surveys made before 2026-11-19 in ``training_us``
    baseline_forward_us: Times = {}
    baseline_training_us: Times = {}
    epilogue_forward_us: Times = {}  # norm and activation alone, compiled: what stays where the site is no block
    epilogue_training_us: Times = {}
    entry: str | None = None  # the norm in front of it, by name, which may hand it FP8: no input is cast then
    entry_forward_us: Times = {}  # that norm into FP8; in training with its gradient
    entry_training_us: Times = {}
    entry_baseline_forward_us: Times = {}  # the same norm compiled in high precision
    entry_baseline_training_us: Times = {}


class SiteSurvey(Struct, frozen=True):
    site: str
    k: int
    n: int
    has_bias: bool
    is_head: bool
    calls: dict[int, float]  # M → calls in a step
    baseline: str  # the high-precision kernel that a model of this dtype runs on without LoKA
    candidates: tuple[Candidate, ...]
    casts: tuple[CastTime, ...]
    blocks: tuple[BlockCandidate, ...] = ()
    producer: str | None = None  # the block whose output is this site's input and nothing else's: a chain may hand on FP8
    notes: tuple[str, ...] = ()
    stays: str | None = None  # why nothing can stand in for it, whatever that would save
    stays_serving: str | None = None  # the same when it serves
    read_by: str | None = None  # a function that reads its parameters without calling it
    feeds_product: bool = False  # whether a product of the model's own reads its output as it is


class Ceiling(Struct, frozen=True):
    """How much of a step LoKA can reach at all (Amdahl): were all of it free, the step would be 1/(1−covered) times as fast."""

    step_us: float  # of a whole training step, as the Probe saw it
    sites_us: float  # of the sites' GEMMs in it, and of the norms and activations that blocks can take over, by the baseline
    uncovered: tuple[str, ...] = ()  # linear layers, norms and activations that are function calls, and attention

    @property
    def covered(self) -> float:
        return min(1.0, self.sites_us / self.step_us) if self.step_us else 0.0


class SurveyDocument(Struct, frozen=True):
    """survey.json"""

    fingerprint: str  # of the model: its sites and their shapes
    environment: Environment
    dtype: Format  # what the model's GEMMs run in without LoKA
    sites: tuple[SiteSurvey, ...]
    ceiling: Ceiling | None = None
    findings: tuple[str, ...] = ()
    record: str = ""  # the id of the Record it was measured on
    compiled: bool = False  # whether forward on a CPU was timed as torch.compile makes it, casts of x in the time of the GEMM

    @property
    def digest(self) -> str:
        """Sixteen hex digits by which a Plan names the Survey it was made from."""
        # As it would be read from its file, where 1 becomes 1.0.
        as_read = msgspec.convert(msgspec.to_builtins(self, str_keys=True), SurveyDocument, str_keys=True)
        return hashlib.sha256(msgspec.json.encode(as_read)).hexdigest()[:16]


@dataclass(frozen=True, repr=False)
class Survey:
    """The document, and the vectors of the transforms it surveyed (``<site>/center``, ``<site>/rescale``)."""

    document: SurveyDocument
    vectors: "dict[str, Tensor]" = field(default_factory=dict)

    @property
    def sites(self) -> tuple[SiteSurvey, ...]:
        return self.document.sites

    @property
    def ceiling(self) -> Ceiling | None:
        return self.document.ceiling

    def __repr__(self) -> str:
        measured = sum(len(site.candidates) + len(site.blocks) for site in self.sites)
        return f"<Survey on {self.document.environment.device}: {measured} candidates at {len(self.sites)} sites>"

    def save(self, run: str | Path) -> Path:
        """Write survey.json, and survey.safetensors where there are vectors, into the folder ``run``; returns the former."""
        folder = Path(run)
        with vectors_beside(folder / "survey.safetensors", self.vectors):
            write_document(folder / "survey.json", SCHEMA, self.document)
        return folder / "survey.json"

    @classmethod
    def load(cls, run: str | Path) -> "Survey":
        """Read a Survey by its folder or by the path of its survey.json."""
        path = file_in(run, "survey.json")
        made_by = f"loka measure {quote(str(path.parent))}"
        document = read_document(path, SCHEMA, SurveyDocument, made_by=made_by)
        for site in document.sites:
            if not all(0 < calls < math.inf for calls in site.calls.values()):
                raise InvalidFile(f"{path}: the calls of {site.site} are no numbers above 0. Make it again with `{made_by}`")
        return cls(document, read_vectors(path.with_suffix(".safetensors")))
