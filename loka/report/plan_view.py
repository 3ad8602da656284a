"""The plan as the page shows it: the map of sites, the table of kernels, and what was rejected."""

import re
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from loka.core.estimate import Estimate
from loka.core.gemm import Role, by_frequency
from loka.core.plan import PlanDocument, SitePlan
from loka.core.recipe import Transform
from loka.core.survey import GATE, SiteSurvey, SurveyDocument
from loka.planner.limits import allowed_alone
from loka.report.attempts import closest_attempt
from loka.report.page_data import MapPoint, PlanRow, RejectedFor, Rejection, SiteMap
from loka.report.words import number

_NUMBER = re.compile(r"(?<![A-WYZa-wyz_.\d])\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")  # but not the digits of a name such as e4m3
_ANY, _HOLE = "…", "\0"  # stand for a number when reasons are shown, and when they are compared: no reason holds the latter
MOST_PLACES = 30  # sites named for one reason; the count says how many there are


def shares(plan: PlanDocument) -> dict[str, float]:
    """Each site's share of the time that all sites take in high precision."""
    total = sum(site.baseline_us for site in plan.sites)
    return {site.site: site.baseline_us / total if total else 0.0 for site in plan.sites}


def draw_map(plan: PlanDocument, survey: SurveyDocument | None) -> SiteMap:
    """Chosen sites as planned; if there is a survey, the others with the kernel that came closest."""
    if survey and plan.kernels:
        survey = msgspec.structs.replace(survey, sites=allowed_alone(survey.sites, plan.kernels))
    surveyed, share = _by_name(survey), shares(plan)
    one_limit = len(set(plan.max_error.values())) == 1
    points, off = [], []
    for site in plan.sites:
        point = _point(site, surveyed.get(site.site), plan, share[site.site], one_limit)
        if point is None:
            off.append((site.site, site.reason))
        else:
            points.append(point)
    return SiteMap(
        points=tuple(sorted(points, key=lambda point: (-point.share, point.site))),
        max_error=next(iter(plan.max_error.values())) if one_limit else 1.0,
        min_speedup=plan.min_speedup,
        error_axis=f"error ({GATE})" if one_limit else "error ÷ the role's limit",
        off_the_map=tuple(off),
    )


def _point(site: SitePlan, surveyed: SiteSurvey | None, plan: PlanDocument, share: float, one_limit: bool) -> MapPoint | None:
    role, error = _worst(site, plan.max_error)
    if error is not None:
        kernel = ", ".join(dict.fromkeys(choice.kernel for choice in site.kernels.values() if choice.error))
        speedup, is_chosen = site.speedup, True
    elif plan.moves(site):
        return None  # it has no error
    else:
        attempt = closest_attempt(surveyed, plan.goal, plan.max_error, plan.min_speedup) if surveyed else None
        if attempt is None:
            return None
        role, kernel, error, speedup, is_chosen = attempt.role, attempt.kernel, attempt.error, attempt.speedup, False
    limit = plan.max_error[role]
    return MapPoint(
        site=site.site,
        shape=_shape(site, surveyed),
        kernel=kernel,
        error=error.mean if one_limit else error.mean / limit,
        error_text=f"{number(error.mean)} in {role}, limit {number(limit)}",
        speedup=speedup,
        share=share,
        is_safe=error.high <= limit,
        is_fast=speedup >= plan.min_speedup,
        is_chosen=is_chosen,
        reason=site.reason,
    )


def _worst(site: SitePlan, max_error: dict[Role, float]) -> tuple[Role, Estimate | None]:
    """The low-precision role whose error is nearest to its limit."""
    errors = [(role, choice.error) for role, choice in site.kernels.items() if choice.error is not None]
    return max(errors, key=lambda pair: pair[1].high / max_error[pair[0]], default=(Role.FPROP, None))


def _by_name(survey: SurveyDocument | None) -> dict[str, SiteSurvey]:
    return {site.site: site for site in survey.sites} if survey else {}


def _shape(site: SitePlan, surveyed: SiteSurvey | None) -> str:
    """rows×in×out at the most frequent number of rows."""
    if surveyed is None or not surveyed.calls:
        return f"{site.k}×{site.n}"
    return f"{by_frequency(surveyed.calls)[0]}×{site.k}×{site.n}"


def list_plan(plan: PlanDocument, survey: SurveyDocument | None) -> tuple[PlanRow, ...]:
    """A row for each role of each site."""
    surveyed, share = _by_name(survey), shares(plan)
    return tuple(
        PlanRow(
            site=site.site,
            role=role,
            shape=_shape(site, surveyed.get(site.site)),
            kernel=choice.kernel,
            is_low_precision=choice.error is not None,
            speedup=site.speedup,
            share=share[site.site],
            reason=choice.reason,
            transform="" if site.transform is Transform.NONE else str(site.transform),
            fused=" → ".join(site.block.absorbed) if site.block else "",
            error=choice.error.mean if choice.error else None,
            error_low=choice.error.low if choice.error else None,
            error_high=choice.error.high if choice.error else None,
            limit=plan.max_error[role],
        )
        for site in plan.sites
        for role, choice in site.kernels.items()
    )


def list_rejected(plan: PlanDocument) -> tuple[Rejection, ...]:
    """Refusals, those with most reasons first: so kernels that were tried and lost come before those that cannot run here.
    Reasons that differ only in their numbers are given once."""
    places: dict[str, dict[str, list[tuple[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for site in plan.sites:
        for refusal in site.refused:
            kernel = refusal.kernel if refusal.transform is Transform.NONE else f"{refusal.kernel} + {refusal.transform}"
            where = site.site if refusal.role is None else f"{site.site} {refusal.role}"
            places[kernel][_NUMBER.sub(_HOLE, refusal.reason)].append((refusal.reason, where))
    alike: dict[tuple[RejectedFor, ...], list[str]] = defaultdict(list)
    for kernel, reasons in places.items():
        alike[_most_frequent_first(reasons)].append(kernel)
    rejections = [
        Rejection(tuple(kernels), len(kernels) * sum(reason.count for reason in reasons), reasons)
        for reasons, kernels in alike.items()
    ]
    return tuple(sorted(rejections, key=lambda rejection: (-len(rejection.reasons), -rejection.count, rejection.kernels)))


def _most_frequent_first(reasons: dict[str, list[tuple[str, str]]]) -> tuple[RejectedFor, ...]:
    told = []
    for alike in reasons.values():
        texts, where = zip(*alike, strict=True)
        told.append(RejectedFor(_in_one(texts), len(where), where[:MOST_PLACES]))
    return tuple(sorted(told, key=lambda reason: (-reason.count, reason.reason)))


def _in_one(texts: Sequence[str]) -> str:
    """One sentence for several that differ only in their numbers, with … for each number that is not the same in all."""
    numbers = [same[0] if len(set(same)) == 1 else _ANY for same in zip(*map(_NUMBER.findall, texts), strict=True)]
    words = _NUMBER.split(texts[0])
    return "".join(word + number for word, number in zip(words, [*numbers, ""], strict=True))
