"""What a site costs, where casts and kernels were not timed at all rows."""

import pytest
from planned_survey import BASELINE, baseline, candidate, site, survey

from loka.core.gemm import Role, TensorName
from loka.core.plan import Goal
from loka.core.recipe import Transform
from loka.core.survey import Candidate, CastTime
from loka.planner.costs import SiteCosts
from loka.planner.plan import make_plan

CALLS = {64: 9.0, 100: 1.0}
HIGH = {64: 50.0, 100: 80.0}
OWN = candidate("a", Role.FPROP, {64: 10.0, 100: 16.0}, forms=("row", "row"))


def costs(*casts: CastTime, goal: Goal = Goal.TRAINING) -> SiteCosts:
    return SiteCosts(site("s", (*baseline({Role.FPROP: HIGH}), OWN), casts, calls=CALLS), goal)


def test_a_weight_costs_the_middle_of_its_times_once_a_step() -> None:
    x, w = (
        CastTime(TensorName.X, ("row",), {64: 1.0, 100: 2.0}),
        CastTime(TensorName.W, ("row",), {64: 5.0, 100: 7.0, 200: 500.0}),
    )
    assert costs(x, w).step_us({Role.FPROP: OWN}) == 9 * (10 + 1) + (16 + 2) + 7
    assert costs(x, w, goal=Goal.SERVING).step_us({Role.FPROP: OWN}) == 9 * (10 + 1) + (16 + 2)


def test_rows_whose_cast_was_not_timed_cost_high_precision() -> None:
    x, w = CastTime(TensorName.X, ("row",), {100: 2.0}), CastTime(TensorName.W, ("row",), {100: 7.0})
    assert costs(x, w).step_us({Role.FPROP: OWN}) == 9 * 50 + (16 + 2) + 7


def test_high_precision_at_rows_that_a_kernel_cannot_take_copies_the_weight_once_a_step() -> None:
    """Where it is stored in another dtype than the model multiplies in."""
    high = Candidate(BASELINE, Role.FPROP, "bf16", forms=("bf16", "bf16"), gemm_us=HIGH)
    casts = (
        CastTime(TensorName.X, ("row",), {100: 2.0}),
        CastTime(TensorName.X, ("bf16",), dict.fromkeys(HIGH, 0.0)),
        CastTime(TensorName.W, ("row",), {100: 7.0}),
        CastTime(TensorName.W, ("bf16",), {100: 4.0}),
    )
    own = SiteCosts(site("s", (high, OWN), casts, calls=CALLS), Goal.TRAINING)
    assert own.baseline_us == 9 * 50 + 80 + 4
    assert own.step_us({Role.FPROP: OWN}) == 9 * 50 + (16 + 2) + 7 + 4


def test_two_forms_are_known_where_both_were_timed() -> None:
    both = [
        CastTime(TensorName.X, ("row",), {64: 1.0, 100: 2.0}), CastTime(TensorName.X, ("rowᵀ",), {100: 3.0}),
        *(CastTime(TensorName.W, (form,), {100: 0.0}) for form in ("row", "rowᵀ")), CastTime(TensorName.DY, ("rowᵀ",), HIGH),
    ]  # fmt: skip
    wgrad = candidate("a", Role.WGRAD, {64: 20.0, 100: 30.0}, forms=("rowᵀ", "rowᵀ"))
    roles = baseline({Role.FPROP: HIGH, Role.WGRAD: HIGH})
    own = SiteCosts(site("s", (*roles, OWN, wgrad), tuple(both), calls=CALLS), Goal.TRAINING)
    assert own.step_us({Role.FPROP: OWN, Role.WGRAD: wgrad}) == 9 * (50 + 50) + (16 + 30 + 2 + 3 + 80)


@pytest.mark.parametrize(("goal", "why"), [(Goal.TRAINING, "its cast of w to row was not timed"), (Goal.SERVING, None)])
def test_serving_does_not_ask_what_a_weight_costs(goal: Goal, why: str | None) -> None:
    x = CastTime(TensorName.X, ("row",), {64: 1.0, 100: 2.0})
    assert costs(x, goal=goal).why_not_timed(OWN) == why


def test_the_most_frequent_rows_are_those_of_most_calls() -> None:
    assert costs().most_frequent_m == 64


def test_the_time_of_a_choice_is_that_of_its_product_at_the_most_frequent_rows() -> None:
    high, own = baseline({role: {64: 80.0, 100: 50.0} for role in Role}), candidate("a", Role.FPROP, {64: 16.0, 100: 10.0})
    casts = [CastTime(tensor, ("a",), {64: 0.0, 100: 0.0}) for tensor in (TensorName.X, TensorName.W)]
    (plan,) = make_plan(survey(site("s", (*high, own), tuple(casts), calls=CALLS))).sites
    assert {role: (choice.kernel, choice.time_us) for role, choice in plan.kernels.items()} == {
        Role.FPROP: ("a", 16.0), Role.DGRAD: (BASELINE, 80.0), Role.WGRAD: (BASELINE, 80.0),
    }  # fmt: skip


def test_without_fprops_baseline_nothing_is_measured() -> None:
    failed = candidate("torch.fp32", Role.FPROP, {}, why_not="returned NaN")
    assert not SiteCosts(site("s", (failed, *baseline({Role.DGRAD: HIGH}), OWN), calls=CALLS), Goal.TRAINING).is_measured


def test_a_weight_in_two_forms_costs_both_casts() -> None:
    """They were timed one by one, at different rows, of which a weight knows nothing."""
    casts = [
        *(CastTime(TensorName.X, (form,), dict.fromkeys(HIGH, 0.0)) for form in ("row", "rowᵀ")),
        *(CastTime(TensorName.DY, (form,), dict.fromkeys(HIGH, 0.0)) for form in ("row", "rowᵀ")),
        CastTime(TensorName.W, ("row",), {64: 5.0}), CastTime(TensorName.W, ("rowᵀ",), {100: 3.0}),
    ]  # fmt: skip
    dgrad = candidate("a", Role.DGRAD, {64: 20.0, 100: 30.0}, forms=("row", "rowᵀ"))
    roles = baseline({Role.FPROP: HIGH, Role.DGRAD: HIGH})
    own = SiteCosts(site("s", (*roles, OWN, dgrad), tuple(casts), calls=CALLS), Goal.TRAINING)
    assert own.step_us({Role.FPROP: OWN, Role.DGRAD: dgrad}) == 9 * (10 + 20) + (16 + 30) + 5 + 3


@pytest.mark.parametrize(
    ("fprop", "dgrad", "us"),
    [
        ("one", "oneᵀ", 1.0),  # both in the step
        ("one", "row", 20.0 + 7.0),  # no step makes these two
        ("one", "bf16ᵀ", 2.0 + 10 * 4.0),  # what is held is made in the step, a copy in high precision in every call
        ("bf16", "bf16ᵀ", 10 * 8.0),  # for each role
        ("row", "row", 7.0),
    ],
)
def test_casts_that_an_optimizer_makes_cost_what_they_add_to_its_step(fprop: str, dgrad: str, us: float) -> None:
    free = dict.fromkeys(HIGH, 0.0)
    casts = [
        *(CastTime(tensor, (form,), free) for tensor in (TensorName.X, TensorName.DY) for form in ("one", "row", "bf16")),
        CastTime(TensorName.W, ("one",), {64: 20.0}, in_step_us={64: 2.0}),
        CastTime(TensorName.W, ("oneᵀ",), {64: 20.0}, in_step_us={64: 3.0}),
        CastTime(TensorName.W, ("one", "oneᵀ"), {64: 30.0}, in_step_us={64: 1.0}),
        CastTime(TensorName.W, ("row",), {64: 7.0}), CastTime(TensorName.W, ("bf16",), {64: 4.0}),
        CastTime(TensorName.W, ("bf16ᵀ",), {64: 4.0}),
    ]  # fmt: skip
    of_x, of_dy = fprop, dgrad.removesuffix("ᵀ")
    chosen = {
        Role.FPROP: candidate("a", Role.FPROP, free, forms=(of_x, fprop)),
        Role.DGRAD: candidate("a", Role.DGRAD, free, forms=(of_dy, dgrad)),
    }
    roles = baseline({Role.FPROP: HIGH, Role.DGRAD: HIGH})
    for goal, expected in ((Goal.TRAINING, us), (Goal.SERVING, 0.0)):
        own = SiteCosts(site("s", (*roles, *chosen.values()), tuple(casts), calls=CALLS), goal)
        assert own.step_us({role: chosen[role] for role in own.roles}) == expected


@pytest.mark.parametrize("centered", [Role.FPROP, Role.WGRAD])
def test_casts_of_a_centered_site_are_made_behind_the_step(centered: Role) -> None:
    """Centering leaves the weight's forms as they are, but what is added behind its product is made of the weight too."""
    free = dict.fromkeys(HIGH, 0.0)
    read = ((TensorName.X, "one"), (TensorName.X, "one center"), (TensorName.DY, "oneᵀ"))
    of_weight = CastTime(TensorName.W, ("one",), {64: 20.0}, in_step_us={64: 2.0})
    casts = (*(CastTime(tensor, (form,), free) for tensor, form in read), of_weight)
    of_x = {role: "one center" if role is centered else "one" for role in (Role.FPROP, Role.WGRAD)}
    forms = {Role.FPROP: (of_x[Role.FPROP], "one"), Role.WGRAD: ("oneᵀ", of_x[Role.WGRAD])}
    plain = {role: candidate("a", role, free, forms=pair) for role, pair in forms.items()}
    behind = {centered: candidate("a", centered, free, forms=forms[centered], transform=Transform.CENTER)}
    own = SiteCosts(site("s", baseline({Role.FPROP: HIGH, Role.WGRAD: HIGH}), casts, calls=CALLS), Goal.TRAINING)
    assert own.step_us(plain) == 2.0
    assert own.step_us(plain | behind) == 20.0
