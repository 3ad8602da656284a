"""One site studied by itself: its fastest triple, the blocks it could be, and why everything else is refused."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from loka.core.gemm import Role
from loka.core.plan import Goal, Refusal
from loka.core.recipe import Transform
from loka.core.survey import GATE, Candidate, SiteSurvey
from loka.planner.costs import ROLES, SiteCosts, times_as_fast
from loka.planner.limits import Limits
from loka.planner.options import (
    BlockOption,
    ByRole,
    SiteOption,
    block_options,
    fastest_of_alike,
    fastest_triple,
    key_of,
    qualified_candidates,
)

QUIETER = 0.5  # of the noise there was: no more may be left in an fprop that is worth changing to


@dataclass(frozen=True)
class Study:
    """What is known of one site before chains are chosen. ``stays`` says why it stays in high precision, if it does."""

    site: SiteSurvey
    costs: SiteCosts
    stays: str | None
    option: SiteOption | None
    blocks: tuple[BlockOption, ...]
    refused: tuple[Refusal, ...]
    qualified: ByRole = field(default_factory=dict)  # what is accurate enough, the fastest and the others

    @property
    def baseline_us(self) -> float:
        return self.costs.baseline_us if self.costs.is_measured else 0.0

    @property
    def saved_us(self) -> float:
        """What its fastest triple saves in a step. Where the site may be a block, that is taken from the block's baseline, norm
        and activation included, as the block's is: it was compiled as a whole, and its parts timed apart add up to more."""
        if self.stays or self.option is None:
            return 0.0
        saved_us = _beside_a_block(self.blocks, self.option)
        return self.baseline_us - self.option.time_us if saved_us is None else saved_us


def study_site(site: SiteSurvey, limits: Limits, kept: str | None) -> Study:
    costs = SiteCosts(site, limits.goal)
    stays = kept or ("a prediction head, and heads stay in high precision" if site.is_head else site.stays)
    stays = stays or (site.stays_serving if limits.goal is Goal.SERVING else None)
    if not stays and not costs.is_measured:
        stays = _why_not_measured(site)
    if stays:
        return Study(site, costs, stays, None, (), _refused_for(site, stays, limits.goal))
    blocks, refused_blocks = block_options(site, limits)
    qualified, refused = qualified_candidates(costs, limits)
    leaders, slower = fastest_of_alike(costs, qualified)
    option = fastest_triple(costs, leaders)
    if option is None:
        stays = "no kernel is able and accurate enough"
        return Study(site, costs, stays, None, tuple(blocks), (*refused, *refused_blocks), qualified)
    stays = _why_stay(costs, option, limits) or _why_no_faster(blocks, option)
    against = f"{_us(costs.baseline_us)} in high precision" if stays else f"{_us(option.time_us)} as chosen"
    for candidate in (c for candidates in leaders.values() for c in candidates):
        if stays or option.kernels[candidate.role] is not candidate:
            at_best_us = option.best_with_us[key_of(candidate)]
            why = f"accurate enough, but with it the site takes at best {_us(at_best_us)} µs a step, {against}"
            refused.append(Refusal(candidate.kernel, why, candidate.role, candidate.transform))
    return Study(site, costs, stays, option, tuple(blocks), (*refused, *slower, *refused_blocks), qualified)


def _us(time_us: float) -> str:
    return f"{time_us:.4g}" if time_us < 1000 else f"{time_us:,.0f}"


def finer_forwards(study: Study, noise: float, limits: Limits) -> tuple[SiteOption, ...]:
    """For a site whose fprop has ``noise``: the fastest option with at most half of it, if that beats the fastest with an exact
    fprop; then the latter. Each only if it is worth it by itself."""
    plain = {role: [c for c in candidates if c.transform is Transform.NONE] for role, candidates in study.qualified.items()}
    quiet = [c for c in plain[Role.FPROP] if c.error[GATE].mean <= QUIETER * noise]
    found: list[SiteOption] = []
    exact: list[Candidate] = []
    for forward in (exact, quiet):
        leaders, _ = fastest_of_alike(study.costs, plain | {Role.FPROP: forward})
        option = fastest_triple(study.costs, leaders)
        if option is None or _why_stay(study.costs, option, limits) or _why_no_faster(study.blocks, option):
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


def _why_stay(costs: SiteCosts, option: SiteOption, limits: Limits) -> str | None:
    if costs.baseline_us >= limits.min_speedup * option.time_us:
        return None
    names = ", ".join(f"{role} {candidate.kernel}" for role, candidate in option.kernels.items())
    speedup = times_as_fast(costs.baseline_us, option.time_us)
    return f"the fastest that is accurate enough ({names}) is {speedup:.3g}× high precision, under {limits.min_speedup:g}×"


def _beside_a_block(blocks: Sequence[BlockOption], option: SiteOption) -> float | None:
    """What the triple saves of a block's baseline; None where what follows the site was not timed."""
    saved = (b.baseline_us - option.time_us - b.epilogue_us for b in blocks if b.epilogue_us is not None)
    return next(saved, None)


def _why_no_faster(blocks: Sequence[BlockOption], option: SiteOption) -> str | None:
    saved_us = _beside_a_block(blocks, option)
    if saved_us is None or saved_us > 0:
        return None
    return f"with norm and activation behind it the fastest that is accurate enough takes {-saved_us:.4g} µs more than compiled"


def _refused_for(site: SiteSurvey, why: str, goal: Goal) -> tuple[Refusal, ...]:
    candidates = [c for c in site.candidates if c.role in ROLES[goal] and c.kernel != site.baseline]
    refused = [Refusal(c.kernel, c.why_not or why, c.role, c.transform) for c in candidates]
    return (*refused, *(Refusal(block.kernel, block.why_not or why) for block in site.blocks))
