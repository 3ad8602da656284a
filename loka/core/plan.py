"""The Plan: the kernel chosen for every site and role, with the numbers and the reason, chosen or not."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import msgspec

from loka.core.documents import Fields, migrates, read_document, same_fields, write_document
from loka.core.environment import Environment
from loka.core.errors import InvalidFile
from loka.core.estimate import Estimate
from loka.core.files import file_in
from loka.core.gemm import Role
from loka.core.recipe import Format, Transform
from loka.core.survey import Struct
from loka.core.vectors import read_vectors, vectors_beside

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = "loka.plan/6"
same_fields(
    "loka.plan/1",  # without a finer forward: sites are given back whole
    "loka.plan/3",  # without ``entry``: blocks cast their inputs
    "loka.plan/4",  # without ``survey``
    "loka.plan/5",  # without ``feeds_product``: no output is known to be read by a product
)


class Goal(StrEnum):
    TRAINING = "training"  # all three roles of every site
    SERVING = "serving"  # fprop alone, weights cast once and for all


class Choice(Struct, frozen=True):
    """The kernel of one role. ``error`` is None where it is exact: in the model's own precision."""

    kernel: str
    reason: str
    error: Estimate | None = None  # mere_floored
    time_us: float = 0.0  # of the GEMM, at the site's most frequent M


class Refusal(Struct, frozen=True):
    """A kernel that was not chosen at a role; with role None, for the site or block as a whole."""

    kernel: str
    reason: str
    role: Role | None = None
    transform: Transform = Transform.NONE


class BlockPlan(Struct, frozen=True):
    """A site run with the norm and activation behind it as one kernel. ``fp8_input``: the block ``producer`` hands it FP8."""

    kernel: str
    norm: str | None
    activation: str | None
    fp8_input: bool = False
    producer: str | None = None  # a site
    entry: str | None = None  # the norm in front of it, which the block runs too, into FP8
    input_cast_us: float = 0.0  # what ``fp8_input`` saves in a step

    @property
    def absorbed(self) -> tuple[str, ...]:
        """The modules that it runs besides its site, in their order."""
        return tuple(name for name in (self.entry, self.norm, self.activation) if name)


class FinerForward(Struct, frozen=True):
    """How a site runs fastest with less noise in fprop, and as no block: its fallback where the rounding of its forward pass
    costs too much. Rounding of gradients does not show in the loss."""

    kernels: dict[Role, Choice]
    baseline_us: float
    time_us: float


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
    finer: tuple[FinerForward, ...] = ()  # those worth it: fprop in a finer 8-bit format, then in high precision
    read_by: str | None = None  # a function that reads the site's parameters without calling it
    feeds_product: bool = False  # whether a product of the model's own reads its output as it is

    @property
    def is_low_precision(self) -> bool:
        return self.rounds_forward or any(choice.error is not None for choice in self.kernels.values())

    @property
    def rounds_forward(self) -> bool:
        return self.block is not None or self.kernels[Role.FPROP].error is not None

    @property
    def speedup(self) -> float:
        return times_as_fast(self.baseline_us, self.time_us)

    def __str__(self) -> str:
        kernels = {choice.kernel for choice in self.kernels.values()}
        by_role = ", ".join(f"{role} {choice.kernel}" for role, choice in self.kernels.items())
        behind = "" if self.transform is Transform.NONE else f" behind {self.transform}"
        return f"{self.site} {self.k}×{self.n}: {by_role if len(kernels) > 1 else kernels.pop()}{behind}: {self.reason}"

    def in_high_precision(self, kernel: str, reason: str) -> "SitePlan":
        """The same site given back to ``kernel``, its refusals kept and what it gave up added to them."""
        choices = {role: Choice(kernel, reason) for role in self.kernels}
        refused = (*self.refused, *self._given_up_for(choices, reason))
        times = self.baseline_us, self.baseline_us
        known = {"read_by": self.read_by, "feeds_product": self.feeds_product}
        return SitePlan(self.site, self.k, self.n, choices, *times, reason, refused=refused, **known)

    def with_finer_forward(self, kernel: str, reason: str) -> "SitePlan":
        """The same site with its next finer forward; where it has none, with all roles given back to ``kernel``."""
        if not self.finer:
            return self.in_high_precision(kernel, reason)
        forward, *others = self.finer
        choices = forward.kernels | {Role.FPROP: msgspec.structs.replace(forward.kernels[Role.FPROP], reason=reason)}
        refused = (*self.refused, *self._given_up_for(choices, reason))
        return SitePlan(
            self.site,
            self.k,
            self.n,
            choices,
            forward.baseline_us,
            forward.time_us,
            reason,
            refused=refused,
            finer=tuple(others),
            read_by=self.read_by,
            feeds_product=self.feeds_product,
        )

    def _given_up_for(self, choices: Mapping[Role, Choice], reason: str) -> list[Refusal]:
        gave_up = {
            role: choice for role, choice in self.kernels.items() if choice.error or choice.kernel != choices[role].kernel
        }
        return [
            Refusal(choice.kernel, reason, role, self.transform)
            for role, choice in gave_up.items()
            if (choice.kernel, self.transform) != (choices[role].kernel, Transform.NONE)
        ]


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
    survey: str = ""  # the digest of the Survey it was made from
    kernels: tuple[str, ...] = ()  # the only ones it was to choose from; all where none is named

    @property
    def high_precision(self) -> str:
        """The kernel of what the plan leaves as it was."""
        return f"torch.{self.dtype}"

    def moves(self, site: SitePlan) -> bool:
        """Whether the site runs otherwise than without the plan: in low precision, or in high precision on another kernel."""
        return site.is_low_precision or any(choice.kernel != self.high_precision for choice in site.kernels.values())

    def count_moved(self, run: Collection[str] | None = None) -> str:
        """How many sites it moves and where to, in words; of those that are ``run``, all if not given."""
        moved = [site for site in self.sites if self.moves(site) and (run is None or site.site in run)]
        low = sum(site.is_low_precision for site in moved)
        others = f", {len(moved) - low} in {self.dtype} on another kernel" if len(moved) > low else ""
        return f"{low} of {len(self.sites)} sites in low precision{others}"


@dataclass(frozen=True, repr=False)
class Plan:
    """The document, and the vectors of the transforms it chose (``<site>/center``, ``<site>/rescale``).

    ``print(plan)`` shows a line for each site.
    """

    document: PlanDocument
    vectors: "dict[str, Tensor]" = field(default_factory=dict)

    @property
    def sites(self) -> tuple[SitePlan, ...]:
        return self.document.sites

    @property
    def total(self) -> str:
        """What it comes to, in words."""
        before, behind = sum(site.baseline_us for site in self.sites), sum(site.time_us for site in self.sites)
        return f"{self.document.count_moved()}, {times_as_fast(before, behind):.2f}× over all sites"

    def __repr__(self) -> str:
        return f"<Plan for {self.document.goal} on {self.document.environment.device}: {self.total}>"

    def __str__(self) -> str:
        return "\n".join([f"{self.document.goal} on {self.document.environment.device}: {self.total}", *map(str, self.sites)])

    def giving_back(self, reasons: Mapping[str, str]) -> "Plan":
        """The plan with the sites of ``reasons`` in high precision; a block behind one of them casts its own input again."""
        return self._changing(reasons, SitePlan.in_high_precision)

    def giving_back_forward(self, reasons: Mapping[str, str]) -> "Plan":
        """The same for fprop alone, to a finer format or to high precision; for the whole site where neither is worth it."""
        return self._changing(reasons, SitePlan.with_finer_forward)

    def with_alone(self, site: str) -> "Plan":
        """The plan for ``site`` alone, to try it by itself: whether or not it then pays."""
        others = {other.site: "tried without" for other in self.sites if self.document.moves(other) and other.site != site}
        return self._changed(others, SitePlan.in_high_precision)

    def _changing(self, reasons: Mapping[str, str], change: Callable[[SitePlan, str, str], SitePlan]) -> "Plan":
        """With what follows: a block that must cast its own input again and no longer pays goes too, then perhaps the next."""
        before, plan = self, self._changed(reasons, change)
        while slower := plan._no_longer_worth_it(before):
            before, plan = plan, plan._changed(slower, SitePlan.in_high_precision)
        return plan

    def _changed(self, reasons: Mapping[str, str], change: Callable[[SitePlan, str, str], SitePlan]) -> "Plan":
        sites = tuple(
            change(site, self.document.high_precision, reasons[site.site])
            if site.site in reasons
            else _without_producer(site, reasons)
            for site in self.sites
        )
        wanted = {vector_name(site) for site in sites}
        vectors = {name: vector for name, vector in self.vectors.items() if name in wanted}
        return Plan(msgspec.structs.replace(self.document, sites=sites), vectors)

    def _no_longer_worth_it(self, before: "Plan") -> dict[str, str]:
        """The blocks that are slower than they were, and too slow now, with the reason."""
        least = self.document.min_speedup
        return {
            now.site: f"{now.reason}, under {least:g}×"
            for then, now in zip(before.sites, self.sites, strict=True)
            if now.block and then.block and now.time_us > then.time_us and now.speedup < least
        }

    def save(self, run: str | Path) -> Path:
        """Write plan.json, and plan.safetensors where there are vectors, into the folder ``run``; returns the former."""
        folder = Path(run)
        with vectors_beside(folder / "plan.safetensors", self.vectors):
            write_document(folder / "plan.json", SCHEMA, self.document)
        return folder / "plan.json"

    @classmethod
    def load(cls, run: str | Path) -> "Plan":
        """Read a plan by its folder or by the path of its plan.json."""
        path = file_in(run, "plan.json")
        made_by = f"loka plan {quote(str(path.parent))}"
        document = read_document(path, SCHEMA, PlanDocument, made_by=made_by)
        plan = cls(document, read_vectors(path.with_suffix(".safetensors")))
        if wrong := _what_is_wrong(plan):
            raise InvalidFile(f"{path}: {wrong}. Make it again with `{made_by}`")
        return plan


@migrates("loka.plan/2")
def _with_one_finer_forward(fields: Fields) -> Fields:
    """Its sites know of one finer forward, an exact one."""
    sites = fields.get("sites")
    if not isinstance(sites, list):
        return fields  # no plan: reading on will say so
    return {**fields, "sites": [_with_list_of_finer(site) if isinstance(site, dict) else site for site in sites]}


def _with_list_of_finer(site: Fields) -> Fields:
    exact = site.get("exact_forward")
    return {**{name: value for name, value in site.items() if name != "exact_forward"}, "finer": [exact] if exact else []}


def times_as_fast(baseline_us: float, time_us: float) -> float:
    """A small block's time without its cast may come out as 0; where nothing was measured, both are."""
    if not time_us:
        return math.inf if baseline_us else 1.0
    return baseline_us / time_us


def digest_of_plan(run: str | Path) -> str:
    """Sixteen hex digits that tell a plan's files from any others, wherever they lie."""
    path = file_in(run, "plan.json")
    files = [file.read_bytes() for file in (path, path.with_suffix(".safetensors")) if file.exists()]
    return hashlib.sha256(b"\n".join(files)).hexdigest()[:16]


def vector_name(site: SitePlan) -> str | None:
    """The name of the vector that a site's transform needs."""
    return None if site.transform is Transform.NONE else f"{site.site}/{site.transform}"


def _without_producer(site: SitePlan, gone: Mapping[str, str]) -> SitePlan:
    """The site, casting its input itself where the block that handed it FP8 is among those ``gone``."""
    if site.block is None or site.block.producer not in gone:
        return site
    block = msgspec.structs.replace(site.block, fp8_input=False, producer=None, input_cast_us=0.0)
    alone = msgspec.structs.replace(site, block=block, time_us=site.time_us + site.block.input_cast_us)
    reason = f"{alone.speedup:.3g}× the compiled high-precision block, without {site.block.producer} in front"
    return msgspec.structs.replace(alone, reason=reason)


def _what_is_wrong(plan: Plan) -> str | None:
    """What a schema cannot say: sites named once, with a kernel; vectors of the right length; chains that lead to a block."""
    named = Counter(site.site for site in plan.sites)
    blocks = {site.site for site in plan.sites if site.block}
    for role in Role:
        if not 0 < plan.document.max_error.get(role, 0.0) < math.inf:
            return f"its max_error of {role} is no number above 0"
    for site in plan.sites:
        if named[site.site] > 1:
            return f"it names the site {site.site} twice"
        if Role.FPROP not in site.kernels:
            return f"it names no kernel for fprop of {site.site}"
        if any(forward.kernels.keys() != site.kernels.keys() for forward in site.finer):
            return f"a finer forward of {site.site} names other roles than the site"
        if (vector := vector_name(site)) is not None:
            shape = tuple(plan.vectors[vector].shape) if vector in plan.vectors else None
            if shape != (site.k,):
                return f"the vector {vector} should have {site.k} values, " + (f"it is {shape}" if shape else "it is missing")
        if site.block and (wrong := _what_is_wrong_in_front(site.block, blocks)):
            return f"{site.site} {wrong}"
    return None


def _what_is_wrong_in_front(block: BlockPlan, blocks: Collection[str]) -> str | None:
    if block.producer is not None and block.entry is not None:
        return f"takes FP8 from {block.producer} and from the norm {block.entry}: it can be one alone"
    if block.fp8_input and block.producer not in blocks:
        return f"takes FP8 from {block.producer}, which is no block of the plan"
    return None
