"""Kernels that multiply as high precision does, only faster: chosen for serving, and not counted as low precision."""

import pytest
from planned_survey import baseline, candidate, error, site, survey

import loka
from loka.core.gemm import Role
from loka.core.plan import Goal, Plan
from loka.core.survey import SiteSurvey

M, LEFT, INT8 = 100, "torch.fp32_left", "onednn.int8"


def left(us: float):  # type: ignore[no-untyped-def]
    return candidate(LEFT, Role.FPROP, {M: us}, recipe="fp32", forms=("fp32", "fp32"), error=error(1e-6))


def int8(us: float):  # type: ignore[no-untyped-def]
    return candidate(INT8, Role.FPROP, {M: us}, recipe="int8 rowwise", forms=("fp32", "fp32"))


def measured(name: str, *own, high: float = 100.0) -> SiteSurvey:  # type: ignore[no-untyped-def]
    return site(name, (*baseline({role: {M: high} for role in Role}), *own))


def kernels_of(plan: Plan) -> dict[str, str]:
    return {one.site: one.kernels[Role.FPROP].kernel for one in plan.sites}


def test_the_faster_of_both_is_chosen_and_an_exact_one_has_no_error() -> None:
    plan = loka.make_plan(
        survey(measured("a", left(60.0), int8(70.0)), measured("b", left(60.0), int8(50.0)), measured("c", left(99.0))),
        goal=Goal.SERVING,
    )
    assert kernels_of(plan) == {"a": LEFT, "b": INT8, "c": "torch.fp32"}
    a, b, c = plan.sites
    choice = a.kernels[Role.FPROP]
    assert (choice.error, choice.reason, choice.time_us) == (None, "fp32, as without a plan, on a faster kernel", 60.0)
    assert a.reason == "1.67× torch.fp32, casts included"
    assert [one.is_low_precision for one in plan.sites] == [False, True, False]
    assert [plan.document.moves(one) for one in plan.sites] == [True, True, False]
    assert b.kernels[Role.FPROP].error is not None
    assert c.kernels[Role.FPROP].kernel == "torch.fp32"


def test_what_stays_in_high_precision_is_counted_apart() -> None:
    """Of all sites, or of those that run."""
    plan = loka.make_plan(
        survey(measured("a", left(60.0)), measured("b", int8(50.0)), measured("c"), measured("d", left(70.0))),
        goal=Goal.SERVING,
    )
    words = "1 of 4 sites in low precision, 2 in fp32 on another kernel"
    assert plan.document.count_moved() == words
    assert plan.total == f"{words}, {400 / (60 + 50 + 100 + 70):.2f}× over all sites"
    assert plan.document.count_moved({"a", "b"}) == "1 of 4 sites in low precision, 1 in fp32 on another kernel"
    assert plan.document.count_moved({"b", "c"}) == "1 of 4 sites in low precision"


def test_training_is_told_that_no_gradients_go_through_it() -> None:
    plan = loka.make_plan(survey(measured("a", left(10.0))), goal=Goal.TRAINING)
    assert kernels_of(plan) == {"a": "torch.fp32"}
    assert [r.reason for r in plan.sites[0].refused] == ["is for models that serve: it makes no gradients"]


def test_an_exact_kernel_that_makes_gradients_too_may_train() -> None:
    own = (candidate("a.fp32", role, {M: 50.0}, recipe="fp32", forms=("fp32", "fp32"), error=error(1e-6)) for role in Role)
    (only,) = loka.make_plan(survey(measured("a", *own)), goal=Goal.TRAINING).sites
    assert {choice.kernel for choice in only.kernels.values()} == {"a.fp32"}
    assert not only.is_low_precision


@pytest.mark.parametrize(("exact_us", "finer"), [(80.0, [LEFT]), (99.0, [])])
def test_a_forward_that_hurts_in_8_bits_goes_to_the_exact_kernel(exact_us: float, finer: list[str]) -> None:
    """Where that is worth it by itself."""
    plan = loka.make_plan(survey(measured("a", left(exact_us), int8(50.0))), goal=Goal.SERVING)
    (only,) = plan.sites
    assert only.kernels[Role.FPROP].kernel == INT8
    assert [one.kernels[Role.FPROP].kernel for one in only.finer] == finer


def test_behind_a_finer_format_the_exact_kernel_is_the_last() -> None:
    finer = candidate("onednn.finer", Role.FPROP, {M: 70.0}, recipe="int8 rowwise", forms=("fp32", "fp32"), error=error(0.02))
    plan = loka.make_plan(survey(measured("a", left(80.0), int8(50.0), finer)), goal=Goal.SERVING)
    (only,) = plan.sites
    assert [one.kernels[Role.FPROP].kernel for one in only.finer] == ["onednn.finer", LEFT]
    forwards = []
    for _ in range(3):
        plan = plan.giving_back_forward({"a": "it hurts"})
        forwards.append(kernels_of(plan)["a"])
    assert forwards == ["onednn.finer", LEFT, "torch.fp32"]
    assert [refusal.kernel for refusal in plan.sites[0].refused][-3:] == [INT8, "onednn.finer", LEFT]


def test_a_site_given_back_or_tried_without_is_as_it_was() -> None:
    plan = loka.make_plan(survey(measured("a", left(60.0)), measured("b", left(60.0)), measured("c")), goal=Goal.SERVING)
    assert kernels_of(plan.giving_back({"a": "slow"})) == {"a": "torch.fp32", "b": LEFT, "c": "torch.fp32"}
    assert kernels_of(plan.with_alone("a")) == {"a": LEFT, "b": "torch.fp32", "c": "torch.fp32"}


def test_a_plan_of_them_alone_survives_its_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    plan = loka.make_plan(survey(measured("a", left(60.0))), goal=Goal.SERVING)
    plan.save(tmp_path)
    assert Plan.load(tmp_path).document == plan.document
