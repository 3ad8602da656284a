"""The limits of a plan: what a user may ask for, checked, and whether a measured error is within it."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from loka.core.errors import InvalidInput
from loka.core.estimate import Estimate
from loka.core.gemm import Role
from loka.core.names import did_you_mean, matching
from loka.core.plan import Goal
from loka.core.recipe import Accumulation, Format
from loka.core.survey import BLOCK_KERNEL, GATE, BlockCandidate, Candidate, SiteSurvey

MAX_ERROR = 0.2
MIN_SPEEDUP = 1.05
# What the error of an output ruled by a few large values does not show. A floating format reaches over 15 binades and more:
# where it turns values of x into zeros it does not hold their distribution, and where it does so with dy, nothing in front of
# the site learns from those examples. wgrad is exempt: it sums over examples, and the largest rule its error. So is INT8, which
# rounds the smallest values to zero as a matter of course.
MAX_SILENCED = 0.05  # of x's features
MAX_MISREAD = 0.05  # of the features of a block's input, gradient or weight, in casts with one scale for all
MAX_FLUSHED = 0.02  # of the values, by casts to FP8 for fprop or dgrad; a healthy site loses none

Able = TypeVar("Able", Candidate, BlockCandidate)


@dataclass(frozen=True)
class Limits:
    goal: Goal
    max_error: dict[Role, float]
    min_speedup: float

    def why_not(self, role: Role, error: Mapping[str, Estimate]) -> str | None:
        """Why an error does not qualify at ``role``: the upper end of its confidence interval must be within the limit."""
        estimate = error.get(GATE)
        if estimate is None:
            return f"its error at {role} was not measured"
        limit = self.max_error[role]
        if not estimate.high <= limit:
            return f"{GATE} at {role} is {estimate.mean:.3g} (up to {estimate.high:.3g}), over max_error {limit:g}"
        return None


def why_deaf(candidate: Candidate | BlockCandidate, goal: Goal) -> str | None:
    """Why casts lose too much to be used, whatever the error of the output is."""
    if candidate.silenced > MAX_SILENCED:
        return f"its cast of x flushes {candidate.silenced:.0%} of the features to zero, over {MAX_SILENCED:.0%}"
    if isinstance(candidate, BlockCandidate) and goal is Goal.TRAINING and candidate.misread_backward > MAX_MISREAD:
        lost = f"{candidate.misread_backward:.0%} of the features by half and more, over {MAX_MISREAD:.0%}"
        return f"its casts with one scale for all, for backward, distort {lost}"
    if _keeps_rows_apart_in_fp8(candidate) and candidate.flushed > MAX_FLUSHED:
        return f"its casts flush {candidate.flushed:.0%} of the values to zero, over {MAX_FLUSHED:.0%}"
    return None


def why_biased(candidate: Candidate) -> str | None:
    """Why a weight's gradient may not be summed this way: over the steps of training rounding cancels, but a bias adds up."""
    if candidate.role is Role.WGRAD and candidate.recipe.endswith(f" {Accumulation.FAST}"):
        return "sums a batch in the tensor core's own 14 bits and cuts off the rest: a bias, which adds up over steps"
    return None


def _keeps_rows_apart_in_fp8(candidate: Candidate | BlockCandidate) -> bool:
    if isinstance(candidate, BlockCandidate):
        return True
    return candidate.role is not Role.WGRAD and not candidate.recipe.startswith(Format.INT8)


def check_limits(goal: Goal | str, max_error: float | Mapping[Role, float], min_speedup: float) -> Limits:
    """The limits as given, or an error that says what may be given."""
    if goal not in list(Goal):
        raise InvalidInput(f"goal must be one of {', '.join(Goal)}, got {goal!r}")
    given = max_error if isinstance(max_error, Mapping) else dict.fromkeys(Role, max_error)
    unknown = [role for role in given if role not in list(Role)]
    if unknown:
        raise InvalidInput(f"max_error names the role {unknown[0]!r}: the roles are {', '.join(Role)}")
    limits = {role: given.get(role, MAX_ERROR) for role in Role}
    for role, limit in limits.items():
        if not (_is_number(limit) and limit > 0):
            raise InvalidInput(f"max_error of {role} must be a number above 0, such as {MAX_ERROR}, got {limit!r}")
    if not (_is_number(min_speedup) and min_speedup >= 0):
        raise InvalidInput(f"min_speedup must be a number, 0 or above, such as {MIN_SPEEDUP}, got {min_speedup!r}")
    return Limits(Goal(goal), limits, min_speedup)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def kept_sites(sites: Iterable[str], keep: Sequence[str]) -> dict[str, str]:
    """Sites that ``keep`` names, by themselves, by a module around them or by a pattern → the reason."""
    names = list(sites)
    around = list(dict.fromkeys(part for name in names for part in _with_parents(name)))
    kept: dict[str, str] = {}
    for pattern in keep:
        found = set(matching(pattern, around))
        if not found:
            hint = did_you_mean(pattern, names, most=3, cutoff=0.4) or f" The sites are: {', '.join(names)}"
            raise InvalidInput(f"keep={pattern!r} matches no site.{hint}")
        matched = [name for name in names if found.intersection(_with_parents(name))]
        kept.update(dict.fromkeys(matched, f"kept in high precision by keep={pattern!r}"))
    return kept


def allowed_alone(sites: tuple[SiteSurvey, ...], kernels: Sequence[str]) -> tuple[SiteSurvey, ...]:
    """The sites as if no kernel were able beside the baseline but those that ``kernels`` names, by name or by a pattern."""
    known = sorted({BLOCK_KERNEL, *(candidate.kernel for site in sites for candidate in site.candidates)})
    allowed: set[str] = set()
    for pattern in kernels:
        found = matching(pattern, known)
        if not found:
            hint = did_you_mean(pattern, known, most=3, cutoff=0.4) or f" It knows: {', '.join(known)}"
            raise InvalidInput(f"kernels={pattern!r} matches no kernel of this survey.{hint}")
        allowed.update(found)
    return tuple(_with_these_alone(site, allowed) for site in sites)


def _with_these_alone(site: SiteSurvey, allowed: Collection[str]) -> SiteSurvey:
    def judged(one: Able) -> Able:
        may = one.kernel in allowed or one.kernel == site.baseline or one.why_not is not None
        return one if may else msgspec.structs.replace(one, why_not="not among the kernels to plan from")

    candidates, blocks = tuple(map(judged, site.candidates)), tuple(map(judged, site.blocks))
    return msgspec.structs.replace(site, candidates=candidates, blocks=blocks)


def _with_parents(name: str) -> list[str]:
    """``a.b.c`` → ``a``, ``a.b``, ``a.b.c``."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
