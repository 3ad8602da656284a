"""One site studied by itself: its fastest triple, the blocks it could be, and why everything else is refused."""

from dataclasses import dataclass, field, replace

from loka.core.gemm import Role
from loka.core.plan import Goal, Refusal, times_as_fast
from loka.core.recipe import Transform
from loka.core.survey import GATE, SiteSurvey
from loka.planner.costs import ROLES, SiteCosts
from loka.planner.limits import Limits
from loka.planner.options import (
    BlockOption,
    ByRole,
    Compiled,
    SiteOption,
    block_options,
    compiled_around,
    fastest_of_alike,
    fastest_triple,
    key_of,
    qualified_candidates,
)

QUIETER = 0.5  # of the noise there was: no more may be left in an fprop that is worth changing to


@dataclass(frozen=True)
class Study:
    """What is known of one site before chains are chosen. ``stays`` says why it stays in high precision, if it does.

    Where the site may be a block, all of its times hold norm and activation too, and high precision is both compiled as a
    whole: timed apart, parts add up to more.
    """

    site: SiteSurvey
    costs: SiteCosts
    compiled: Compiled | None
    stays: str | None
    option: SiteOption | None
    blocks: tuple[BlockOption, ...]
    refused: tuple[Refusal, ...]
    qualified: ByRole = field(default_factory=dict)  # what is accurate enough, the fastest and the others

    @property
    def baseline_us(self) -> float:
        if self.compiled is not None:
            return self.compiled.whole_us
        return self.costs.baseline_us if self.costs.is_measured else 0.0

    @property
    def baseline(self) -> str:
        return self.site.baseline if self.compiled is None else "the compiled high-precision block"

    @property
    def saved_us(self) -> float:
        """What its fastest triple saves in a step."""
        return 0.0 if self.stays or self.option is None else self.baseline_us - self.with_epilogue_us(self.option.time_us)

    def with_epilogue_us(self, time_us: float) -> float:
        return time_us if self.compiled is None else time_us + self.compiled.epilogue_us

    def why_slow(self, option: SiteOption, limits: Limits) -> str | None:
        time_us = self.with_epilogue_us(option.time_us)
        if self.baseline_us >= limits.min_speedup * time_us:
            return None
        names = ", ".join(f"{role} {candidate.kernel}" for role, candidate in option.kernels.items())
        against = "high precision" if self.compiled is None else f"{self.baseline}, norm and activation included"
        speedup = _below(times_as_fast(self.baseline_us, time_us), limits.min_speedup)
        return f"the fastest that is accurate enough ({names}) is {speedup}× {against}, under {limits.min_speedup:g}×"


def study_site(site: SiteSurvey, limits: Limits, kept: str | None) -> Study:
    costs, compiled = SiteCosts(site, limits.goal), compiled_around(site, limits.goal)
    stays = kept or ("a prediction head, and heads stay in high precision" if site.is_head else site.stays)
    stays = stays or (site.stays_serving if limits.goal is Goal.SERVING else None)
    if not stays and not costs.is_measured:
        stays = _why_not_measured(site)
    if stays:
        return Study(site, costs, compiled, stays, None, (), _refused_for(site, stays, limits.goal))
    blocks, refused_blocks = block_options(site, limits)
    qualified, refused = qualified_candidates(costs, limits)
    leaders, slower = fastest_of_alike(costs, qualified)
    option = fastest_triple(costs, leaders)
    if option is None:
        stays = "no kernel is able and accurate enough"
        return Study(site, costs, compiled, stays, None, tuple(blocks), (*refused, *refused_blocks), qualified)
    study = Study(site, costs, compiled, None, option, tuple(blocks), (), qualified)
    stays, time_us = study.why_slow(option, limits), study.with_epilogue_us(option.time_us)
    against = f"{_us(study.baseline_us)} in high precision" if stays else f"{_us(time_us)} as chosen"
    for candidate in (c for candidates in leaders.values() for c in candidates):
        if stays or option.kernels[candidate.role] is not candidate:
            at_best_us = study.with_epilogue_us(option.best_with_us[key_of(candidate)])
            why = f"accurate enough, but with it the site takes at best {_us(at_best_us)} µs a step, {against}"
            refused.append(Refusal(candidate.kernel, why, candidate.role, candidate.transform))
    return replace(study, stays=stays, refused=(*refused, *slower, *refused_blocks))


def _below(value: float, limit: float) -> str:
    """In as many digits, three at least, as it takes to tell it from the limit that it is below."""
    told = (f"{value:.{digits}g}" for digits in range(3, 17))
    return next((text for text in told if float(text) < limit), f"{value:g}")


def _us(time_us: float) -> str:
    return f"{time_us:.4g}" if time_us < 1000 else f"{time_us:,.0f}"


def finer_forwards(study: Study, noise: float, limits: Limits) -> tuple[SiteOption, ...]:
    """For a site whose fprop has ``noise``: the fastest option with at most half of it, if that beats the fastest with an exact
    fprop; then the latter. Each only if it is worth it by itself."""
    plain = {role: [c for c in candidates if c.transform is Transform.NONE] for role, candidates in study.qualified.items()}
    quiet = [c for c in plain[Role.FPROP] if c.error[GATE].mean <= QUIETER * noise]
    found: list[SiteOption] = []
    exact = [c for c in plain[Role.FPROP] if study.costs.is_exact(c)]
    for forward in (exact, quiet):
        leaders, _ = fastest_of_alike(study.costs, plain | {Role.FPROP: forward})
        option = fastest_triple(study.costs, leaders)
        if option is None or study.why_slow(option, limits):
            continue
        if not found or option.time_us < found[-1].time_us:
            found.append(option)
    return tuple(reversed(found))


def _why_not_measured(site: SiteSurvey) -> str:
    if not site.candidates and site.notes:
        return site.notes[-1]  # never called
    failure = next((c.why_not for c in site.candidates if c.kernel == site.baseline and c.why_not), None)
    told = f" ({failure})" if failure else ""
    return f"its baseline {site.baseline} was not timed{told}, so there is nothing to compare with"


def _refused_for(site: SiteSurvey, why: str, goal: Goal) -> tuple[Refusal, ...]:
    candidates = [c for c in site.candidates if c.role in ROLES[goal] and c.kernel != site.baseline]
    refused = [Refusal(c.kernel, c.why_not or why, c.role, c.transform) for c in candidates]
    return (*refused, *(Refusal(block.kernel, block.why_not or why) for block in site.blocks))
