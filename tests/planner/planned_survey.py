"""Surveys made by hand: what the planner reads, without measuring anything."""

from loka.core.environment import Environment
from loka.core.estimate import Estimate
from loka.core.gemm import Role
from loka.core.recipe import Format
from loka.core.survey import Candidate, CastTime, SiteSurvey, Survey, SurveyDocument

ENVIRONMENT = Environment("some cpu", "3.12", "0.1.0", {"torch": "2.13.0"}, None, "2026-11-15")
BASELINE = "torch.fp32"


def error(high: float) -> dict[str, Estimate]:
    return {"mere_floored": Estimate(0.9 * high, 0.8 * high, high, 50)}


def candidate(kernel: str, role: Role, us: dict[int, float], **fields: object) -> Candidate:
    """A candidate of 8-bit operands called ``<kernel>`` whose casts are named after it, unless ``forms`` says otherwise."""
    plain = {"recipe": "e4m3 rowwise", "error": error(0.1), "forms": (kernel, f"{kernel}ᵀ" if role is Role.WGRAD else kernel)}
    return Candidate(kernel, role, gemm_us=us, **{**plain, **fields})  # type: ignore[arg-type]


def baseline(us: dict[Role, dict[int, float]]) -> tuple[Candidate, ...]:
    return tuple(Candidate(BASELINE, role, "fp32", forms=("fp32", "fp32"), gemm_us=times) for role, times in us.items())


def site(name: str, candidates: tuple[Candidate, ...], casts: tuple[CastTime, ...] = (), **fields: object) -> SiteSurvey:
    plain = {"k": 64, "n": 32, "has_bias": True, "is_head": False, "calls": {100: 1.0}, "baseline": BASELINE}
    return SiteSurvey(site=name, candidates=candidates, casts=casts, **{**plain, **fields})  # type: ignore[arg-type]


def survey(*sites: SiteSurvey, vectors: dict | None = None) -> Survey:
    return Survey(SurveyDocument("0123456789abcdef", ENVIRONMENT, Format.FP32, sites), vectors or {})
