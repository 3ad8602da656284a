"""What a site costs in a step for any choice of kernels: its distinct casts and its GEMMs, over all M it is called with.

A cast that several roles read is paid once; where the forms asked for were not timed together, their single times are added.
The weight is cast to 8 bits once a step in training, not once a call, and never in serving. Where its optimizer makes just
these casts in the pass that steps it (for a site with a transform it never does), they cost what they add to the step. A copy
of it in another dtype is made once a step where the site is as it was, and for each role and call where a part of it is in 8
bits. An M that was not measured costs what the nearest measured one above it does. At an M where the baseline was timed and a
kernel was not, the kernel cannot run: there the site runs, and costs, as in high precision.
"""

import statistics
from collections.abc import Iterable
from functools import cached_property

from loka.core.gemm import SOURCES, Role, TensorName, by_frequency, stand_in
from loka.core.plan import Goal
from loka.core.recipe import Format, Transform
from loka.core.survey import Candidate, SiteSurvey, Times

HIGH_PRECISION = frozenset(str(format) for format in Format if not format.is_8bit)  # forms, and recipes, without scales
ROLES: dict[Goal, tuple[Role, ...]] = {Goal.TRAINING: tuple(Role), Goal.SERVING: (Role.FPROP,)}


def rows_by_measured(calls: Times, measured: Iterable[int]) -> dict[int, float]:
    """Calls in a step by the M whose times stand for them."""
    measured = list(measured)
    weights: dict[int, float] = {}
    for m, count in calls.items():
        rows = stand_in(m, measured)
        weights[rows] = weights.get(rows, 0.0) + count
    return weights


def median_us(times: Times) -> float:
    """Of what does not depend on M."""
    return statistics.median(times.values()) if times else 0.0


class SiteCosts:
    """Adds up the times of one site in a Survey for a goal."""

    def __init__(self, site: SiteSurvey, goal: Goal) -> None:
        self.site = site
        self.goal = goal
        timed = [c for c in site.candidates if c.kernel == site.baseline and c.why_not is None and c.gemm_us]
        self.baseline: dict[Role, Candidate] = {c.role: c for c in timed if c.role in ROLES[goal]}
        self.roles = tuple(role for role in ROLES[goal] if role in self.baseline)
        self._casts = {(cast.tensor, cast.forms): cast.time_us for cast in site.casts}
        self._in_step = {cast.forms: cast.in_step_us for cast in site.casts if cast.tensor is TensorName.W and cast.in_step_us}
        self._free = {read for candidate in self.baseline.values() for read in _reads(candidate)}
        self._sums: dict[tuple[TensorName, tuple[str, ...]], Times | None] = {}

    @property
    def is_measured(self) -> bool:
        """Whether there is a baseline to compare with: fprop's at least, and at an M that all its roles share."""
        return Role.FPROP in self.baseline and bool(self.calls)

    @cached_property
    def calls(self) -> dict[int, float]:
        """Calls in a step by measured M."""
        measured = [set(candidate.gemm_us) for candidate in self.baseline.values()]
        shared = set.intersection(*measured) if measured else set()
        return rows_by_measured(self.site.calls, shared) if shared else {}

    @property
    def most_frequent_m(self) -> int:
        return by_frequency(self.calls)[0]

    @cached_property
    def baseline_us(self) -> float:
        return sum(count * self._call_us(self.baseline, m) for m, count in self.calls.items()) + self._plain_weight_us

    def step_us(self, kernels: dict[Role, Candidate]) -> float | None:
        """The time of a step with ``kernels``, casts shared; None where they take none of the M measured."""
        able = [m for m in self.calls if self._takes(kernels, m)]
        if not able:
            return None
        total = self._weight_us(kernels, sum(self.calls[m] for m in able))
        if len(able) < len(self.calls):
            total += self._plain_weight_us
        for m, count in self.calls.items():
            total += count * self._call_us(kernels if m in able else self.baseline, m)
        return total

    def why_not_timed(self, candidate: Candidate) -> str | None:
        """What is missing to know the candidate's cost, or None."""
        if not candidate.gemm_us:
            return "its GEMM was not timed: no kernel runs it here, or its error is far over any sensible limit"
        for tensor, form in _reads(candidate):
            is_paid = tensor is not TensorName.W or self.goal is Goal.TRAINING
            if is_paid and self._cast_times(tensor, (form,)) is None:
                return f"its cast of {tensor} to {form} was not timed"
        return None if self._takes({candidate.role: candidate}, *self.calls) else "takes none of the rows that were seen"

    def gemm_us(self, candidate: Candidate) -> float:
        """A step's GEMMs of this candidate at the M it takes."""
        return sum(count * candidate.gemm_us.get(m, 0.0) for m, count in self.calls.items())

    def is_exact(self, candidate: Candidate) -> bool:
        """Whether it multiplies as the baseline does, on another kernel."""
        return candidate.recipe == self.baseline[candidate.role].recipe

    def makes_gradients(self, kernel: str) -> bool:
        """Whether it is able in another role than fprop."""
        return any(c.kernel == kernel and c.role is not Role.FPROP and c.why_not is None for c in self.site.candidates)

    def is_nowhere_slower(self, one: Candidate, other: Candidate) -> bool:
        """Of two that take the same M: whether ``one``'s GEMM is nowhere slower than ``other``'s."""
        return all(one.gemm_us[m] <= other.gemm_us[m] for m in self.calls if m in other.gemm_us)

    def _takes(self, kernels: dict[Role, Candidate], *rows: int) -> bool:
        casts = [self._cast_times(tensor, forms) or {} for tensor, forms in _forms(kernels) if tensor is not TensorName.W]
        times = [candidate.gemm_us for candidate in kernels.values()]
        return any(all(m in known for known in (*times, *casts)) for m in rows)

    def _call_us(self, kernels: dict[Role, Candidate], m: int) -> float:
        casts = (self._cast_times(tensor, forms) or {} for tensor, forms in _forms(kernels) if tensor is not TensorName.W)
        return sum(candidate.gemm_us[m] for candidate in kernels.values()) + sum(times.get(m, 0.0) for times in casts)

    @cached_property
    def _plain_weight_us(self) -> float:
        """Of the site as it was: one copy a step, if its weight is of another dtype."""
        return 0.0 if self.goal is Goal.SERVING else self._weight_cast_us(dict(_forms(self.baseline)).get(TensorName.W, ()))

    def _weight_us(self, kernels: dict[Role, Candidate], calls: float) -> float:
        if self.goal is Goal.SERVING:
            return 0.0
        read = [form for candidate in kernels.values() for tensor, form in _reads(candidate) if tensor is TensorName.W]
        copies_us = sum(self._weight_cast_us((form,)) for form in read if _is_high_precision(form))
        held = tuple(sorted({form for form in read if not _is_high_precision(form)}))
        is_plain = all(candidate.transform is Transform.NONE for candidate in kernels.values())
        in_step = self._in_step.get(held) if is_plain else None
        return calls * copies_us + (median_us(in_step) if in_step else self._weight_cast_us(held))

    def _weight_cast_us(self, forms: tuple[str, ...]) -> float:
        return median_us(self._cast_times(TensorName.W, forms) or {})

    def _cast_times(self, tensor: TensorName, forms: tuple[str, ...]) -> Times | None:
        """The time to cast ``tensor`` into all ``forms`` by M; None where a form that costs something was not timed."""
        if (tensor, forms) not in self._sums:
            self._sums[tensor, forms] = self._together(tensor, forms)
        return self._sums[tensor, forms]

    def _together(self, tensor: TensorName, forms: tuple[str, ...]) -> Times | None:
        if (tensor, forms) in self._casts:
            return self._casts[tensor, forms]
        return self._one_by_one(tensor, forms)

    def _one_by_one(self, tensor: TensorName, forms: tuple[str, ...]) -> Times | None:
        singles = [self._casts.get((tensor, (form,)), self._if_free(tensor, form)) for form in forms]
        if any(times is None for times in singles):
            return None
        known = [times for times in singles if times is not None]
        if tensor is TensorName.W:  # its casts do not depend on M, and forms may have been timed at different M
            return {0: sum(map(median_us, known))}
        shared = set.intersection(*(set(times) for times in known))
        return {m: sum(times[m] for times in known) for m in shared}

    def _if_free(self, tensor: TensorName, form: str) -> Times | None:
        """What high precision reads as it is costs nothing, so nobody timed it."""
        return dict.fromkeys(self.calls, 0.0) if (tensor, form) in self._free else None


def _is_high_precision(form: str) -> bool:
    return form.removesuffix("ᵀ") in HIGH_PRECISION


def _reads(candidate: Candidate) -> list[tuple[TensorName, str]]:
    """The tensors and forms of a's and b's casts; none for a high-precision kernel that names none."""
    return [(source.tensor, form) for source, form in zip(SOURCES[candidate.role], candidate.forms, strict=False)]


def _forms(kernels: dict[Role, Candidate]) -> list[tuple[TensorName, tuple[str, ...]]]:
    """Every tensor that ``kernels`` read, with the distinct forms they ask for. In high precision the transpose is a view."""
    forms: dict[TensorName, set[str]] = {}
    for candidate in kernels.values():
        for tensor, form in _reads(candidate):
            forms.setdefault(tensor, set()).add(form)
    views = {tensor: {f"{form}ᵀ" for form in keys & HIGH_PRECISION} for tensor, keys in forms.items()}
    return [(tensor, tuple(sorted(keys - views[tensor]))) for tensor, keys in forms.items()]
