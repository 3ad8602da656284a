"""The plan as a whole: limits, what is kept, and how a refusal of the input reads."""

import math
from pathlib import Path

import pytest
import torch
from planned_survey import BASELINE, ENVIRONMENT, baseline, candidate, site, survey

import loka
from loka.core.errors import InvalidInput
from loka.core.gemm import Role
from loka.core.plan import Goal, Plan
from loka.core.recipe import Transform

M = 100


def fast(name: str, **fields: object):  # type: ignore[no-untyped-def]
    own = candidate("a.one", Role.FPROP, {M: 10.0}, forms=("fp32", "fp32"))
    return site(name, (*baseline({role: {M: 100.0} for role in Role}), own), **fields)


def test_heads_and_what_is_kept_stay_in_high_precision() -> None:
    sites = [fast("towers.0.in"), fast("towers.1.in"), fast("mlp.0"), fast("out", is_head=True)]
    plan = loka.make_plan(survey(*sites), keep=["towers.1", "mlp.*"])
    assert {s.site: s.is_low_precision for s in plan.sites} == {
        "towers.0.in": True, "towers.1.in": False, "mlp.0": False, "out": False,
    }  # fmt: skip
    reasons = {s.site: s.reason for s in plan.sites}
    assert reasons["towers.1.in"] == "kept in high precision by keep='towers.1'"
    assert reasons["out"] == "a prediction head, and heads stay in high precision"
    assert all(choice.kernel == BASELINE for choice in plan.sites[3].kernels.values())
    assert plan.document.keep == ("towers.1", "mlp.*")
    assert {r.reason for r in plan.sites[3].refused} == {reasons["out"]}


def test_what_nothing_can_stand_in_for_stays_with_its_reason() -> None:
    plan = loka.make_plan(survey(fast("a"), fast("b", stays="is a Scaled, and only torch.nn.Linear is swapped")))
    assert [(one.site, one.is_low_precision) for one in plan.sites] == [("a", True), ("b", False)]
    assert plan.sites[1].reason == "is a Scaled, and only torch.nn.Linear is swapped"


def test_a_plan_carries_where_it_comes_from_and_survives_its_file(tmp_path: Path) -> None:
    plan = loka.make_plan(
        survey(fast("a"), fast("b", is_head=True)), goal="serving", max_error={Role.FPROP: 0.3}, min_speedup=1.2
    )
    document = plan.document
    assert (document.fingerprint, document.environment, document.goal) == ("0123456789abcdef", ENVIRONMENT, Goal.SERVING)
    assert document.max_error == {Role.FPROP: 0.3, Role.DGRAD: 0.2, Role.WGRAD: 0.2}
    plan.save(tmp_path)
    assert Plan.load(tmp_path) == plan
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_plan_is_printed_a_site_a_line() -> None:
    made_from = survey(fast("a"), fast("b", is_head=True))
    plan = loka.make_plan(made_from, goal="serving")
    assert str(plan).splitlines() == [
        f"serving on {ENVIRONMENT.device}: 1 of 2 sites in low precision, 1.82× over all sites",
        f"a 64×32: a.one: {plan.sites[0].reason}",
        f"b 64×32: {BASELINE}: a prediction head, and heads stay in high precision",
    ]
    assert repr(plan) == f"<Plan for serving on {ENVIRONMENT.device}: 1 of 2 sites in low precision, 1.82× over all sites>"
    assert repr(made_from) == f"<Survey on {ENVIRONMENT.device}: 8 candidates at 2 sites>"
    training = loka.make_plan(survey(fast("a")))
    assert f"fprop a.one, dgrad {BASELINE}, wgrad {BASELINE}" in str(training)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"goal": "train"}, "goal must be one of training, serving, got 'train'"),
        ({"max_error": 0.0}, "max_error of fprop must be a number above 0, such as 0.2, got 0.0"),
        ({"max_error": math.nan}, "max_error of fprop must be a number above 0"),
        ({"max_error": {Role.DGRAD: -1.0}}, "max_error of dgrad must be a number above 0, such as 0.2, got -1.0"),
        ({"max_error": {"forward": 0.1}}, "max_error names the role 'forward': the roles are fprop, dgrad, wgrad"),
        ({"min_speedup": -1.0}, "min_speedup must be a number, 0 or above, such as 1.05, got -1.0"),
        ({"min_speedup": math.inf}, "min_speedup must be a number, 0 or above"),
        ({"keep": ["tower.0"]}, r"keep='tower.0' matches no site. Did you mean 'towers.0'\?"),
        ({"keep": ["zzz"]}, "keep='zzz' matches no site. The sites are: towers.0"),
    ],
)
def test_bad_limits_say_what_may_be_given(limits: dict, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        loka.make_plan(survey(fast("towers.0")), **limits)


def test_an_empty_survey_has_nothing_to_plan() -> None:
    with pytest.raises(InvalidInput, match="no site to plan for: probe a model with linear layers"):
        loka.make_plan(survey())


def test_a_site_whose_baseline_was_not_timed_stays() -> None:
    own = candidate("a.one", Role.FPROP, {M: 10.0}, forms=("fp32", "fp32"))
    one = loka.make_plan(survey(site("a", (own,)))).sites[0]
    assert one.reason == "its baseline torch.fp32 was not timed, so there is nothing to compare with"
    assert [r.reason for r in one.refused] == [one.reason]
    failed = candidate("torch.fp32", Role.FPROP, {}, why_not="returned NaN or inf")
    one = loka.make_plan(survey(site("a", (own, failed)))).sites[0]
    assert one.reason == "its baseline torch.fp32 was not timed (returned NaN or inf), so there is nothing to compare with"


def test_a_site_that_was_never_called_says_so() -> None:
    one = loka.make_plan(survey(site("a", (), calls={}, notes=("head", "never called while the Probe looked")))).sites[0]
    assert one.reason == "never called while the Probe looked"


def test_a_transform_without_its_vector_is_refused() -> None:
    own = candidate("a.one", Role.FPROP, {M: 10.0}, forms=("fp32", "fp32"), transform=Transform.CENTER)
    with pytest.raises(InvalidInput, match="the survey lacks the vector a/center: measure the record again"):
        loka.make_plan(survey(site("a", (*baseline({Role.FPROP: {M: 100.0}}), own))))


def test_a_plan_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of its files, for each is nothing without the other."""
    transformed = candidate("a.one", Role.FPROP, {M: 10.0}, forms=("fp32", "fp32"), transform=Transform.CENTER)
    centered = site("a", (*baseline({role: {M: 100.0} for role in Role}), transformed))
    before = loka.make_plan(survey(centered, vectors={"a/center": torch.ones(64)}))
    assert before.vectors
    before.save(tmp_path)

    def full(*args: object) -> None:
        raise OSError("No space left on device")

    for other in (loka.make_plan(survey(fast("a"))), before):
        with monkeypatch.context() as patched:
            patched.setattr("loka.core.plan.write_document", full)
            with pytest.raises(OSError, match="No space"):
                other.save(tmp_path)
        assert Plan.load(tmp_path).vectors.keys() == before.vectors.keys()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "plan.safetensors"]
    loka.make_plan(survey(fast("a"))).save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
