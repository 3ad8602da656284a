"""The ways to run one site: a triple of kernels, a fused block, or high precision; and why the others do not qualify."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from loka.core.gemm import Role
from loka.core.plan import Goal, Refusal
from loka.core.recipe import Transform
from loka.core.survey import BlockCandidate, Candidate, SiteSurvey, Times
from loka.planner.costs import HIGH_PRECISION, ROLES, SiteCosts, median_us, rows_by_measured
from loka.planner.limits import Limits, why_biased, why_deaf

Kernels = dict[Role, Candidate]
ByRole = dict[Role, list[Candidate]]
Key = tuple[Role, str, Transform]


def key_of(candidate: Candidate) -> Key:
    return candidate.role, candidate.kernel, candidate.transform


@dataclass(frozen=True)
class SiteOption:
    """A triple for one site, its time in a step, and that of the fastest triple with each candidate in it."""

    kernels: Kernels
    time_us: float
    best_with_us: dict[Key, float]

    @property
    def transform(self) -> Transform:
        return next((c.transform for c in self.kernels.values() if c.transform is not Transform.NONE), Transform.NONE)


@dataclass(frozen=True)
class BlockOption:
    """A fused block; ``cast_us`` of its time in a step is saved where the block in front hands it FP8."""

    block: BlockCandidate
    time_us: float
    cast_us: float
    baseline_us: float
    entry: str | None = None  # the norm in front of it, if it runs that too; then there is nothing to cast

    @property
    def saved_us(self) -> float:
        """Of its baseline, where its input comes in high precision."""
        return self.baseline_us - self.time_us

    def step_us(self, fp8_input: bool) -> float:
        return self.time_us - self.cast_us if fp8_input else self.time_us


@dataclass(frozen=True)
class Compiled:
    """A site with norm and activation behind it, compiled as a whole in high precision, and those two alone, in a step."""

    whole_us: float
    epilogue_us: float


def qualified_candidates(costs: SiteCosts, limits: Limits) -> tuple[ByRole, list[Refusal]]:
    """By role the candidates that are able, accurate enough and timed, the baseline aside; and the refusals of the others."""
    qualified: ByRole = {role: [] for role in costs.roles}
    refused = []
    for candidate in costs.site.candidates:
        if candidate.role not in ROLES[costs.goal] or candidate.kernel == costs.site.baseline:
            continue
        why = candidate.why_not or limits.why_not(candidate.role, candidate.error)
        why = why or why_deaf(candidate, limits.goal) or why_biased(candidate) or costs.why_not_timed(candidate)
        if candidate.role not in qualified:
            why = why or f"{costs.site.baseline} was not timed at {candidate.role}, so there is nothing to compare with"
        elif costs.goal is Goal.TRAINING and costs.is_exact(candidate) and not costs.makes_gradients(candidate.kernel):
            why = why or "is for models that serve: it makes no gradients"
        if why:
            refused.append(Refusal(candidate.kernel, why, candidate.role, candidate.transform))
        else:
            qualified[candidate.role].append(candidate)
    return qualified, refused


def fastest_of_alike(costs: SiteCosts, qualified: ByRole) -> tuple[ByRole, list[Refusal]]:
    """Of candidates that read the same casts at the same M, one whose GEMM is nowhere faster than another's cannot be in the
    best triple. (One that is faster at some M can be: other roles may take those alone.)"""
    leaders: ByRole = {}
    refused = []
    for role, candidates in qualified.items():
        alike: dict[tuple[object, ...], list[Candidate]] = {}
        for candidate in sorted(candidates, key=lambda c: (costs.gemm_us(c), c.kernel)):
            faster = alike.setdefault((candidate.forms, candidate.transform, frozenset(candidate.gemm_us)), [])
            leader = next((other for other in faster if costs.is_nowhere_slower(other, candidate)), None)
            if leader is None:
                faster.append(candidate)
            else:
                times = f"{costs.gemm_us(candidate):.4g} µs a step against {costs.gemm_us(leader):.4g}"
                why = f"reads the same casts as {leader.kernel}, whose GEMM is faster: {times}"
                refused.append(Refusal(candidate.kernel, why, role, candidate.transform))
        leaders[role] = [candidate for group in alike.values() for candidate in group]
    return leaders, refused


def fastest_triple(costs: SiteCosts, qualified: ByRole) -> SiteOption | None:
    """The triple that is fastest as a whole, high precision throughout aside; None where nothing else qualifies.

    Ties go to the one with more high precision, then by name.
    """
    best: tuple[tuple[float, int, list[str]], Kernels] | None = None
    best_with: dict[Key, float] = {}
    for kernels in _triples(costs, qualified):
        time_us = costs.step_us(kernels)
        if time_us is None:
            continue
        names = [candidate.kernel for candidate in kernels.values()]
        order = (time_us, sum(name != costs.site.baseline for name in names), names)
        if best is None or order < best[0]:
            best = order, kernels
        for candidate in kernels.values():
            best_with[key_of(candidate)] = min(time_us, best_with.get(key_of(candidate), time_us))
    return None if best is None else SiteOption(best[1], best[0][0], best_with)


def _triples(costs: SiteCosts, qualified: ByRole) -> Iterator[Kernels]:
    for transform in Transform:
        choices = [[costs.baseline[role], *(c for c in qualified[role] if _fits(c, transform))] for role in costs.roles]
        for triple in product(*choices):
            kernels = dict(zip(costs.roles, triple, strict=True))
            # What has no transform in it at all was seen when the transform was NONE.
            is_new = transform is Transform.NONE or any(c.transform is transform for c in triple)
            if is_new and any(c.kernel != costs.site.baseline for c in triple):
                yield kernels


def _fits(candidate: Candidate, transform: Transform) -> bool:
    """A site has one transform. What it does not touch fits as it is: high precision, and dgrad where x alone is centered."""
    untouched = candidate.recipe in HIGH_PRECISION or (transform is Transform.CENTER and candidate.role is Role.DGRAD)
    return candidate.transform is transform or (untouched and candidate.transform is Transform.NONE)


def block_options(site: SiteSurvey, limits: Limits) -> tuple[list[BlockOption], list[Refusal]]:
    """The fused blocks that are able and accurate enough in every role the goal runs; and the refusals of the others."""
    options: list[BlockOption] = []
    refused: list[Refusal] = []
    for block in site.blocks:
        ways = _block_options(site, block, limits.goal)
        errors = (limits.why_not(role, block.error.get(role, {})) for role in _roles_of(block, limits.goal))
        why = block.why_not or next((error for error in errors if error), None) or why_deaf(block, limits.goal)
        if not ways or why:
            refused.append(Refusal(block.kernel, why or "was not timed here"))
        else:
            options += ways
    return options, refused


def _roles_of(block: BlockCandidate, goal: Goal) -> tuple[Role, ...]:
    """The roles whose errors count: in training all but a gradient that nobody asks for. Without either gradient all count, so
    that the block is refused."""
    asked = tuple(role for role in ROLES[goal] if role in block.error)
    return asked if len(asked) > 1 else ROLES[goal]


def _block_options(site: SiteSurvey, block: BlockCandidate, goal: Goal) -> list[BlockOption]:
    """The block by itself, and with the norm in front of it; none where it was not timed."""
    if goal is Goal.TRAINING:
        times, casts = block.training_us, block.training_cast_us or block.input_cast_us
        baseline, weight_us = block.baseline_training_us, median_us(block.weight_cast_us)
        entry, entry_baseline = block.entry_training_us, block.entry_baseline_training_us
    else:
        times, casts = block.forward_us, block.input_cast_us
        baseline, weight_us = block.baseline_forward_us, 0.0
        entry, entry_baseline = block.entry_forward_us, block.entry_baseline_forward_us
    if not times or not baseline:
        return []
    calls = rows_by_measured(site.calls, baseline)
    if not any(m in times for m in calls):
        return []

    def total(by_m: Times) -> float:
        return sum(count * by_m.get(m, 0.0) for m, count in calls.items() if m in times)

    elsewhere_us = sum(count * baseline[m] for m, count in calls.items() if m not in times)  # M it cannot take
    time_us = weight_us + total(times) + elsewhere_us
    baseline_us, cast_us = total(baseline) + elsewhere_us, total(casts)
    options = [BlockOption(block, time_us + cast_us, cast_us, baseline_us)]
    if block.entry is not None and site.producer is None and not elsewhere_us:
        with_norm_us = baseline_us + total(entry_baseline)
        options.append(BlockOption(block, time_us + total(entry), 0.0, with_norm_us, block.entry))
    return options


def compiled_around(site: SiteSurvey, goal: Goal) -> Compiled | None:
    """By the first block that was timed, whether it qualifies or not; None where not at all rows."""
    for block in site.blocks:
        if goal is Goal.TRAINING:
            whole, epilogue = block.baseline_training_us, block.epilogue_training_us
        else:
            whole, epilogue = block.baseline_forward_us, block.epilogue_forward_us
        calls = rows_by_measured(site.calls, whole) if whole else {}
        if calls and set(calls) <= set(epilogue):
            return Compiled(*(sum(count * by_m[m] for m, count in calls.items()) for by_m in (whole, epilogue)))
    return None
