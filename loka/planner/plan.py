"""``make_plan``: from a Survey the fastest kernels that are accurate enough, with a reason at every site and role."""

import logging
from collections.abc import Iterable, Mapping

from loka.core.errors import InvalidInput, require_kind
from loka.core.gemm import Role
from loka.core.names import given_names
from loka.core.plan import Goal, Plan, PlanDocument, vector_name
from loka.core.survey import Survey
from loka.planner.chains import Ways, choose_blocks
from loka.planner.limits import MAX_ERROR, MIN_SPEEDUP, allowed_alone, check_limits, kept_sites
from loka.planner.site_plan import write_site_plan
from loka.planner.study import study_site

logger = logging.getLogger("loka")


def make_plan(
    survey: Survey,
    *,
    goal: Goal | str = Goal.TRAINING,
    max_error: float | Mapping[Role, float] = MAX_ERROR,
    min_speedup: float = MIN_SPEEDUP,
    keep: Iterable[str] = (),
    kernels: Iterable[str] | None = None,
) -> Plan:
    """Choose kernels for every site and block in ``survey``.

    A site leaves high precision only for kernels whose error (``mere_floored``, the upper end of its confidence interval) is
    within ``max_error`` (one number, or one for each role), which flush neither whole features of x nor many values to zero,
    and which make it at least ``min_speedup`` times as fast, casts included; the fastest such choice wins. Prediction heads
    stay, and so does what ``keep`` names: sites, modules around them, or patterns. ``kernels``, names or patterns, leaves out
    all others that were measured. docs/plan.md has every rule.
    Every choice and every refusal carries its reason. The same survey and limits give the same plan.
    """
    require_kind(survey, Survey, "the survey", "load it with loka.Survey.load(run)")
    limits = check_limits(goal, max_error, min_speedup)
    if not survey.sites:
        raise InvalidInput("the survey has no site to plan for: probe a model with linear layers, then measure it again")
    if survey.document.compiled and limits.goal is Goal.TRAINING:
        raise InvalidInput(
            "this survey was measured for a model that serves compiled, without gradients: plan for serving by it, or measure "
            "the record again without `compiled`"
        )
    patterns = given_names(keep, "keep", "names of sites, or patterns")
    names = () if kernels is None else given_names(kernels, "kernels", "names of kernels, or patterns")
    if kernels is not None and not names:
        raise InvalidInput("kernels names none to plan from: name some, or leave it out for all that were measured")
    if limits.goal is Goal.TRAINING and not any(c.role is not Role.FPROP for site in survey.sites for c in site.candidates):
        logger.warning(
            "plan: this survey is of a model that was probed without gradients, so only forward passes are planned: plan for "
            "serving, or probe training steps, with backward() inside `with probe.step():`"
        )
    kept = kept_sites((site.site for site in survey.sites), patterns)
    surveyed = allowed_alone(survey.sites, names) if names else survey.sites
    studies = {site.site: study_site(site, limits, kept.get(site.site)) for site in surveyed}
    ways = {name: Ways(study.site.producer, study.saved_us, study.blocks) for name, study in studies.items()}
    blocks = choose_blocks(ways, limits.min_speedup)
    sites = tuple(write_site_plan(study, blocks.get(name), limits) for name, study in studies.items())
    document = PlanDocument(
        fingerprint=survey.document.fingerprint,
        environment=survey.document.environment,
        dtype=survey.document.dtype,
        goal=limits.goal,
        max_error=limits.max_error,
        min_speedup=limits.min_speedup,
        sites=sites,
        keep=patterns,
        kernels=names,
        survey=survey.document.digest,
    )
    wanted = [name for site in sites if (name := vector_name(site))]
    missing = [name for name in wanted if name not in survey.vectors]
    if missing:
        raise InvalidInput(f"the survey lacks the vector {missing[0]}: measure the record again")
    return Plan(document, {name: survey.vectors[name] for name in wanted})
