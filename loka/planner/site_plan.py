"""What a plan says of one site: the choice at every role with its numbers and reason, and what was refused."""

from collections.abc import Iterable

from loka.core.gemm import Role
from loka.core.plan import BlockPlan, Choice, FinerForward, Refusal, SitePlan, times_as_fast
from loka.core.survey import GATE, SiteSurvey
from loka.planner.costs import ROLES, SiteCosts
from loka.planner.limits import Limits, why_biased
from loka.planner.options import BlockOption, SiteOption
from loka.planner.study import Study, finer_forwards


def write_site_plan(study: Study, block: tuple[BlockOption, bool] | None, limits: Limits) -> SitePlan:
    if block is not None:
        return _as_block(study, *block, limits)
    site, costs, option = study.site, study.costs, study.option
    not_chosen = tuple(
        Refusal(other.block.kernel, f"saves {_saved(other)}, the site by itself {study.saved_us:.4g} µs a step")
        for other in _best_of_each(study.blocks)
    )
    refused = (*study.refused, *not_chosen)
    if study.stays or option is None:
        stays = study.stays or "nothing was measured"
        choices = {role: Choice(site.baseline, stays) for role in ROLES[limits.goal]}
        times = study.baseline_us, study.baseline_us
        known = {"read_by": site.read_by, "feeds_product": site.feeds_product}
        return SitePlan(site.site, site.k, site.n, choices, *times, stays, refused=refused, **known)
    choices = {role: _choice(costs, option, role, limits) for role in ROLES[limits.goal]}
    time_us = study.with_epilogue_us(option.time_us)
    reason = f"{times_as_fast(study.baseline_us, time_us):.3g}× {study.baseline}, casts included"
    return SitePlan(
        site=site.site,
        k=site.k,
        n=site.n,
        kernels=choices,
        baseline_us=study.baseline_us,
        time_us=time_us,
        reason=reason,
        transform=option.transform,
        refused=refused,
        finer=_finer(study, choices[Role.FPROP], limits),
        read_by=site.read_by,
        feeds_product=site.feeds_product,
    )


def _finer(study: Study, forward: Choice, limits: Limits) -> tuple[FinerForward, ...]:
    if forward.error is None:
        return ()  # it is exact
    return tuple(
        FinerForward(
            {role: _choice(study.costs, option, role, limits) for role in ROLES[limits.goal]},
            study.baseline_us,
            study.with_epilogue_us(option.time_us),
        )
        for option in finer_forwards(study, forward.error.mean, limits)
    )


def _choice(costs: SiteCosts, option: SiteOption, role: Role, limits: Limits) -> Choice:
    site = costs.site
    if role not in option.kernels:
        return Choice(site.baseline, _not_asked(role))
    candidate = option.kernels[role]
    time_us = candidate.gemm_us.get(costs.most_frequent_m, 0.0)
    if candidate.kernel == site.baseline:
        return Choice(site.baseline, _why_baseline(site, role), time_us=time_us)
    if costs.is_exact(candidate):
        return Choice(candidate.kernel, f"{candidate.recipe}, as without a plan, on a faster kernel", time_us=time_us)
    estimate = candidate.error[GATE]
    reason = f"{candidate.recipe}: {GATE} up to {estimate.high:.3g}, within {limits.max_error[role]:g}"
    return Choice(candidate.kernel, reason, estimate, time_us)


def _why_baseline(site: SiteSurvey, role: Role) -> str:
    able = [c for c in site.candidates if c.role is role and c.kernel != site.baseline and c.why_not is None]
    if able and all(why_biased(candidate) for candidate in able):
        return "no kernel that was measured here sums a batch in full, as gradients of weights need: name one that does, or all"
    return "no kernel that is accurate enough here makes the site faster"


def _as_block(study: Study, option: BlockOption, fp8_input: bool, limits: Limits) -> SitePlan:
    site, block = study.site, option.block
    time_us = option.step_us(fp8_input)
    reason = f"{times_as_fast(option.baseline_us, time_us):.3g}× the compiled high-precision block"
    if fp8_input:
        reason += ", input in FP8"
    elif option.entry:
        reason += ", both with the norm in front"
    choices = {}
    for role in ROLES[limits.goal]:
        if role not in block.error:
            choices[role] = Choice(block.kernel, _not_asked(role))
            continue
        estimate = block.error[role][GATE]
        why = f"fused block: {GATE} up to {estimate.high:.3g}, within {limits.max_error[role]:g}"
        choices[role] = Choice(block.kernel, why, estimate)
    instead = f"the block {block.kernel} saves {option.baseline_us - time_us:.4g} µs a step"
    chosen = study.option.kernels if study.option and not study.stays else {}
    also = [Refusal(c.kernel, instead, role, c.transform) for role, c in chosen.items() if c.kernel != site.baseline]
    others = [
        Refusal(other.block.kernel, f"saves {_saved(other)}; {instead}")
        for other in _best_of_each(study.blocks)
        if other.block is not block
    ]
    return SitePlan(
        site=site.site,
        k=site.k,
        n=site.n,
        kernels=choices,
        baseline_us=option.baseline_us,
        time_us=time_us,
        reason=reason,
        block=BlockPlan(
            block.kernel,
            block.norm,
            block.activation,
            fp8_input,
            producer=site.producer if fp8_input else None,
            entry=option.entry,
            input_cast_us=option.step_us(False) - time_us,
        ),
        refused=(*study.refused, *also, *others),
        finer=_finer(study, choices[Role.FPROP], limits),
        read_by=site.read_by,
        feeds_product=site.feeds_product,
    )


def _best_of_each(options: Iterable[BlockOption]) -> list[BlockOption]:
    """Of the ways to run a block the one that saves most."""
    best: dict[int, BlockOption] = {}
    for option in options:
        known = best.get(id(option.block))
        if known is None or option.saved_us > known.saved_us:
            best[id(option.block)] = option
    return list(best.values())


def _not_asked(role: Role) -> str:
    return f"{role} was not measured: no gradient was seen here, or nobody asks for this one"


def _saved(option: BlockOption) -> str:
    return f"{option.saved_us:.4g} µs a step"
