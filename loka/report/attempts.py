"""What a site would have reached with one kernel in every role: this places a site that the plan left alone on the map."""

from collections.abc import Iterator
from dataclasses import dataclass

from loka.core.estimate import Estimate
from loka.core.gemm import Role
from loka.core.plan import Goal
from loka.core.recipe import Transform
from loka.core.survey import GATE, Candidate, SiteSurvey
from loka.planner.costs import SiteCosts


@dataclass(frozen=True)
class Attempt:
    """One kernel in all of a site's roles. ``error`` is that of the ``role`` nearest to its limit, or furthest past it."""

    kernel: str
    role: Role
    error: Estimate
    excess: float  # error ÷ limit
    speedup: float


def closest_attempt(site: SiteSurvey, goal: Goal, max_error: dict[Role, float], min_speedup: float) -> Attempt | None:
    """The fastest attempt that is accurate and fast enough; if there is none, the one that misses the limits by least."""

    def miss(attempt: Attempt) -> tuple[float, float]:
        return max(attempt.excess, 1.0) * max(min_speedup / attempt.speedup, 1.0), -attempt.speedup

    return min(_attempts(site, goal, max_error), key=miss, default=None)


def _attempts(site: SiteSurvey, goal: Goal, max_error: dict[Role, float]) -> Iterator[Attempt]:
    costs = SiteCosts(site, goal)
    if not costs.is_measured:
        return
    able = [c for c in site.candidates if c.kernel != site.baseline and c.why_not is None and GATE in c.error]
    by_kernel: dict[tuple[str, Transform], dict[Role, Candidate]] = {}
    for candidate in able:
        if candidate.role in costs.roles and costs.why_not_timed(candidate) is None and not costs.is_exact(candidate):
            by_kernel.setdefault((candidate.kernel, candidate.transform), {})[candidate.role] = candidate
    for (kernel, transform), candidates in by_kernel.items():
        # Centering x does not change dgrad, so that role's candidate is the one without a transform.
        kernels = by_kernel.get((kernel, Transform.NONE), {}) | candidates
        time_us = costs.step_us(kernels) if set(kernels) == set(costs.roles) else None
        if not time_us:
            continue
        errors = {role: candidate.error[GATE] for role, candidate in kernels.items()}
        worst = max(errors, key=lambda role: errors[role].high / max_error[role])
        name = kernel if transform is Transform.NONE else f"{kernel} + {transform}"
        yield Attempt(name, worst, errors[worst], errors[worst].high / max_error[worst], costs.baseline_us / time_us)
