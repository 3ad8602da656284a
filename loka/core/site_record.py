"""What a Record holds of each site: facts, weight, the distributions of x and dy, and what stands out.

Axes:  M rows,  K in_features,  N out_features,  D = K + N + 1, a site's x and the two parts of its dy side by side.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from loka.core.errors import InvalidInput
from loka.core.gemm import Role
from loka.core.moments import covariance_of, variance_of
from loka.core.recipe import Format
from loka.core.statistics import Rule, Statistic

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from loka.core.sampling import Sampler

SAME_DIRECTION = 0.9  # the cosine
NEVER_CALLED = "never called"  # a note
NOT_FINITE = "rows with NaN or infinite values were seen and left out"  # another
# What is known of the modules behind a site.
FOLLOWERS = ("norm", "norm_kind", "norm_block", "norm_eps", "activation", "activation_kind")
UNKNOWN_READER = "?"


@dataclass(frozen=True)
class Finding:
    """Something the statistics say about the model, with the numbers behind it and what mends it."""

    site: str
    kind: str  # the name of the rule that found it
    message: str
    numbers: dict[str, float]
    remedy: str | None  # the name of a Mod or a transform; None where there is none


@dataclass(frozen=True)
class SiteFacts:
    """What is known of a site besides its tensors."""

    name: str
    k: int
    n: int
    has_bias: bool
    is_head: bool
    trains: bool  # a gradient of its output was seen
    calls: dict[int, float]  # M → calls in a step
    stays: str | None = None  # why nothing can stand in for it, whatever that would save
    stays_serving: str | None = None  # the same, in serving alone
    norm: str | None = None  # the modules behind it that a block would absorb, and their classes
    norm_kind: str | None = None
    norm_block: int | None = None  # of a BlockNorm: how many features it normalizes together, at most, and its ε
    norm_eps: float | None = None
    activation: str | None = None
    activation_kind: str | None = None
    consumers: tuple[str, ...] = ()
    producer: str | None = None  # the site whose block feeds this one and nothing else
    entry: str | None = None  # the BlockNorm that feeds it and nothing else, and follows no site
    entry_block: int | None = None  # how many features that norm normalizes together, at most
    bias_norms: tuple[float, ...] = ()  # ‖b‖ at even intervals of the run, the oldest first
    notes: tuple[str, ...] = ()
    weight_format: Format = Format.FP32  # what the model keeps the weight in
    needs_dx: bool = True  # whether anything in front of it learns,
    needs_dw: bool = True  # and whether its weight does
    cast_in_step: bool = False  # whether its optimizer casts the weight in the pass that steps it, where kernels can
    read_by: str | None = None  # a function that reads its parameters without calling it
    across: int | None = None  # where x lies transposed, as behind ``x.mT``, how many rows lie across
    feeds_product: bool = False  # whether a product of the model's own, a matmul, reads its output as it is

    @property
    def roles(self) -> tuple[Role, ...]:
        """The GEMMs it runs: fprop, and where it trains those of the gradients that are asked for."""
        asked = {Role.FPROP: True, Role.DGRAD: self.trains and self.needs_dx, Role.WGRAD: self.trains and self.needs_dw}
        return tuple(role for role, is_asked in asked.items() if is_asked)


@dataclass(frozen=True)
class SiteRecord(SiteFacts):
    """One linear layer: the facts, its weight when the Record was taken, and the statistics of its x and dy; all in FP32."""

    weight_NK: "Tensor" = field(kw_only=True)
    bias_N: "Tensor | None" = field(kw_only=True)
    statistics: dict[str, Statistic] = field(kw_only=True)

    @property
    def facts(self) -> SiteFacts:
        """The same without its tensors."""
        return SiteFacts(**{f.name: getattr(self, f.name) for f in dataclasses.fields(SiteFacts)})

    @property
    def mean_K(self) -> "Tensor":
        """μ of x, the vector of the transform ``center``."""
        return self._moments["mean_D"][: self.k]

    @property
    def rms_K(self) -> "Tensor":
        """√E[x²] of every feature."""
        return (variance_of(self._moments) + self._moments["mean_D"].square())[: self.k].sqrt()

    @property
    def rescale_K(self) -> "Tensor":
        """The power of two next to each feature's rms, the vector of the transform ``rescale``; 1 where x is always 0."""
        import torch

        exponent_K = self.rms_K.log2().round().clamp(-60, 60)
        return torch.where(self.rms_K > 0, torch.exp2(exponent_K), 1.0)

    @property
    def was_called(self) -> bool:
        return "moments" in self.statistics

    def sample(self, rows: int, generator: "torch.Generator") -> "tuple[Tensor, Tensor | None]":
        """x_MK, and dy_MN where the site trains, drawn together from what was learned: FP32, on the generator's device."""
        import torch

        with torch.autocast(generator.device.type, enabled=False):
            return self._sampler.draw(rows, generator)

    @cached_property
    def _sampler(self) -> "Sampler":
        from loka.core.sampling import make_sampler

        self._require_values()
        return make_sampler(self.statistics, self.k, self.weight_NK)

    def sample_weight(self, generator: "torch.Generator") -> "Tensor":
        """A weight as it was at some time of the run, drawn from what was learned: for a Probe with ``weights_over_time``."""
        from loka.core.matrix_normal import draw_weight

        if "weights" not in self.statistics:
            raise InvalidInput(
                f"nothing is known of the weights of site {self.name} over time: probe with weights_over_time=True, a run in "
                f"which they are finite"
            )
        return draw_weight(self.statistics["weights"].tensors, generator)

    @property
    def _moments(self) -> "dict[str, Tensor]":
        self._require_values()
        return self.statistics["moments"].tensors

    def _require_values(self) -> None:
        if not self.was_called:
            seen = "saw only NaN or infinite rows" if self.calls else "was never called"
            raise InvalidInput(f"site {self.name} {seen} while the Probe looked: nothing is known of its values")

    def merge(self, other: "SiteRecord", share: float) -> "SiteRecord":
        """The statistics of both; the weight and the bias are this one's. ``share`` is its part of all steps."""
        if (self.k, self.n) != (other.k, other.n):
            raise InvalidInput(f"site {self.name} is {self.k}×{self.n} in one record and {other.k}×{other.n} in the other")
        sizes = sorted(self.calls.keys() | other.calls.keys())
        notes = dict.fromkeys((*self.notes, *other.notes, *self._split_differs(other)))
        return dataclasses.replace(
            self,
            **self._merged_flow(other),
            trains=self.trains or other.trains,
            needs_dx=self.needs_dx or other.needs_dx,
            needs_dw=self.needs_dw or other.needs_dw,
            across=self.across if self.across == other.across else None,
            calls={m: share * self.calls.get(m, 0.0) + (1 - share) * other.calls.get(m, 0.0) for m in sizes},
            notes=tuple(note for note in notes if note != NEVER_CALLED or not sizes),
            statistics=self._merged_statistics(other),
        )

    def _merged_flow(self, other: "SiteRecord") -> dict[str, Any]:
        """What the data flow says, by the records in which the site was called (both, if in neither). A head in one of them is
        a head; what only one of them has in front of it or behind it is no part of a block."""
        called = [site for site in (self, other) if site.calls] or [self, other]
        one, last = called[0], called[-1]

        def alike(names: tuple[str, ...]) -> bool:
            return all(getattr(one, name) == getattr(last, name) for name in names)

        unknown = () if alike(FOLLOWERS) else (UNKNOWN_READER,)
        groups = (FOLLOWERS, ("producer",), ("entry", "entry_block"))
        return {
            "read_by": one.read_by or last.read_by,
            "is_head": one.is_head or last.is_head,
            "stays": one.stays or last.stays,
            "stays_serving": one.stays_serving or last.stays_serving,
            "feeds_product": one.feeds_product or last.feeds_product,
            "consumers": tuple(dict.fromkeys((*one.consumers, *last.consumers, *unknown))),
            **{name: getattr(one, name) if alike(group) else None for group in groups for name in group},
        }

    def alone(self) -> "SiteRecord":
        """Without norm and activation, which are not always the same ones behind it: who reads its output is then unknown."""
        return dataclasses.replace(
            self, **dict.fromkeys(FOLLOWERS), consumers=tuple(dict.fromkeys((*self.consumers, UNKNOWN_READER)))
        )

    def _split_differs(self, other: "SiteRecord") -> tuple[str, ...]:
        """A note where the two Probes split dy along different directions: what is known of its parts is then approximate."""
        from loka.core.gradient_rows import alignment

        references = [
            site.statistics["gradients"].tensors["reference_N"] for site in (self, other) if "gradients" in site.statistics
        ]
        if len(references) < 2 or alignment(*references) > SAME_DIRECTION:
            return ()
        return ("merged from gradients of different directions: their distribution is approximate",)

    def _merged_statistics(self, other: "SiteRecord") -> dict[str, Statistic]:
        """Those of both, or where only one of them has seen gradients, that one's: x without its dy can be paired with none."""
        a, b = self.statistics, other.statistics
        if self.trains != other.trains and a and b:
            return a if self.trains else b
        for name in sorted(a.keys() & b.keys(), key=lambda name: name != "moments"):
            if _shapes(a[name]) != _shapes(b[name]):
                raise InvalidInput(
                    f"site {self.name}: {name} was kept in two forms, {_form(a[name])} and {_form(b[name])}: merge records of "
                    f"Probes with the same memory_budget"
                )
        return {name: a[name].merge(b[name]) if name in a and name in b else a.get(name) or b[name] for name in {**a, **b}}


def _shapes(statistic: Statistic) -> dict[str, tuple[int, ...]]:
    """By tensor; without the number of a sketch's rows, which may differ."""
    return {name: tuple(tensor.shape)[name == "sketch_LD" :] for name, tensor in statistic.tensors.items()}


def _form(statistic: Statistic) -> str:
    return str(covariance_of(statistic.tensors)) if statistic.rule is Rule.MOMENTS else str(_shapes(statistic))
