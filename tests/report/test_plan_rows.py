"""What the report says of a plan's sites: what was tried, chosen and refused, and by how little."""

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from loka.core.estimate import Estimate
from loka.core.gemm import Role
from loka.core.plan import Choice, Goal, PlanDocument, Refusal
from loka.core.recipe import Transform
from loka.core.survey import Candidate, SiteSurvey, Survey
from loka.planner.plan import make_plan
from loka.report.attempts import Attempt, closest_attempt
from loka.report.page import gather_page
from loka.report.plan_view import MOST_PLACES, draw_map, list_plan, list_rejected
from loka.report.run import read_run
from loka.report.text import MOST_ROWS, WIDE, page_as_text


def around(mean: float) -> Estimate:
    return Estimate(mean, mean, mean, 50)


def attempt(
    *tried: tuple[str, Role, float, float], transform: Transform = Transform.NONE, spread: float = 0.0
) -> Attempt | None:
    """The closest at a site of 100 µs a role, of kernels with an error and a time; dgrad is never transformed. Intervals of
    errors reach ``spread`` to either side."""
    candidates = [
        Candidate("torch.fp32", role, "fp32", error={"mere_floored": around(0.0)}, forms=("fp32", "fp32"), gemm_us={8: 100.0})
        for role in Role
    ] + [
        Candidate(
            kernel, role, "int8 rowwise", Transform.NONE if role is Role.DGRAD else transform,
            error={"mere_floored": Estimate(error, error - spread, error + spread, 50)}, forms=("fp32", "fp32"),
            gemm_us={8: us},
        )
        for kernel, role, error, us in tried
    ]  # fmt: skip
    site = SiteSurvey("s", 64, 64, False, False, {8: 1.0}, "torch.fp32", tuple(candidates), ())
    limits = {Role.FPROP: 0.2, Role.DGRAD: 0.2, Role.WGRAD: 0.6}
    return closest_attempt(site, Goal.TRAINING if len({role for _, role, *_ in tried}) > 1 else Goal.SERVING, limits, 1.05)


class TestAttempts:
    def test_of_what_is_accurate_enough_it_is_the_fastest(self) -> None:
        found = attempt(("slow", Role.FPROP, 0.01, 50.0), ("fast", Role.FPROP, 0.1, 25.0), ("wrong", Role.FPROP, 0.3, 10.0))
        assert found is not None
        assert (found.kernel, found.speedup, found.excess) == ("fast", 4.0, 0.5)

    def test_else_it_is_what_misses_the_limits_by_least(self) -> None:
        found = attempt(("far", Role.FPROP, 0.8, 10.0), ("near", Role.FPROP, 0.3, 80.0), ("slow", Role.FPROP, 0.1, 200.0))
        assert found is not None
        assert (found.kernel, found.excess) == ("near", pytest.approx(1.5))

    def test_a_limit_is_held_against_the_upper_end_of_an_errors_interval(self) -> None:
        found = attempt(("fast", Role.FPROP, 0.15, 25.0), ("sure", Role.FPROP, 0.05, 50.0), spread=0.1)
        assert found is not None
        assert (found.kernel, found.excess) == ("sure", pytest.approx(0.75))

    def test_high_precision_is_no_attempt(self) -> None:
        assert attempt() is None

    def test_its_error_is_that_of_the_role_nearest_to_its_limit(self) -> None:
        found = attempt(("one", Role.FPROP, 0.1, 25.0), ("one", Role.DGRAD, 0.05, 25.0), ("one", Role.WGRAD, 0.15, 25.0))
        assert found is not None
        assert (found.role, found.error.mean, found.excess) == (Role.FPROP, 0.1, 0.5)

    def test_behind_a_centered_x_dgrad_is_the_kernels_own(self) -> None:
        centered = [("one", role, 0.1, 25.0) for role in Role]
        found = attempt(*centered, transform=Transform.CENTER)
        assert found is not None
        assert (found.kernel, found.speedup) == ("one + center", 4.0)


def test_the_table_has_a_row_a_role_and_the_refusals_their_reasons(survey) -> None:
    plan = make_plan(survey, goal=Goal.SERVING).document
    rows = list_plan(plan, survey.document)
    assert [(row.site, row.role, row.kernel) for row in rows][:2] == [
        ("layers.0.hidden", "fprop", "onednn.int8"),
        ("layers.1.hidden", "fprop", "torch.fp32"),
    ]
    assert (rows[0].error, rows[0].error_low, rows[0].limit, rows[0].shape) == (0.02, 0.019, 0.2, "2048×64×128")
    tried, missing = list_rejected(plan)
    assert (tried.kernels, tried.count) == (("onednn.int8",), 3)
    assert missing.kernels == ("torch.rowwise", "torch.tensorwise")  # told together, being refused alike
    assert (missing.count, len(missing.reasons)) == (8, 1)
    assert len(list_plan(make_plan(survey, goal=Goal.TRAINING).document, None)) == 12


class TestPlanRows:
    """What tables and the map say of sites whose numbers were planted one by one."""

    def changed(self, survey: Survey, **fields: object) -> PlanDocument:
        """The plan with other fields at its first site, the one that leaves fp32."""
        plan = make_plan(survey, goal=Goal.SERVING, max_error={Role.FPROP: 0.2, Role.WGRAD: 0.6}).document
        first, *others = plan.sites
        return msgspec.structs.replace(plan, sites=(msgspec.structs.replace(first, **fields), *others))

    def test_the_error_is_that_of_the_role_nearest_to_its_limit_and_each_has_its_own(self, survey) -> None:
        errors = {Role.FPROP: 0.15, Role.WGRAD: 0.3}
        plan = self.changed(survey, kernels={role: Choice("some", "", around(error)) for role, error in errors.items()})
        (point,) = (point for point in draw_map(plan, None).points if point.site == "layers.0.hidden")
        assert (point.error, point.error_text) == (pytest.approx(0.75), "0.15 in fprop, limit 0.2")
        assert [(row.role, row.limit) for row in list_plan(plan, None)][:2] == [("fprop", 0.2), ("wgrad", 0.6)]

    def test_a_site_under_the_plans_own_speed_up_is_not_fast(self, survey) -> None:
        plan = make_plan(survey, goal=Goal.SERVING, min_speedup=4.0).document
        points = {point.site: point for point in draw_map(plan, survey.document).points}
        assert (points["layers.0.hidden"].speedup, points["layers.0.hidden"].is_fast) == (3.0, False)

    def test_the_shape_is_at_the_most_frequent_rows(self, survey) -> None:
        first = msgspec.structs.replace(survey.sites[0], calls={2048: 1.0, 100: 5.0})
        document = msgspec.structs.replace(survey.document, sites=(first, *survey.sites[1:]))
        assert list_plan(self.changed(survey), document)[0].shape == "100×64×128"

    def test_refusals_name_transforms_and_count_all_places_most_frequent_first(self, survey) -> None:
        role, center = Role.FPROP, Transform.CENTER
        often = tuple(Refusal("some", "too slow", role, center) for _ in range(MOST_PLACES + 5))
        plan = self.changed(survey, refused=(Refusal("some", "too wrong", role, center), *often))
        (told,) = (rejection for rejection in list_rejected(plan) if "some" in rejection.kernels[0])
        assert told.kernels == ("some + center",)
        assert [(reason.reason, reason.count, len(reason.where)) for reason in told.reasons] == [
            ("too slow", MOST_PLACES + 5, MOST_PLACES),
            ("too wrong", 1, 1),
        ]

    def test_refusals_that_differ_in_numbers_are_counted_as_one(self, survey) -> None:
        """Or what is said of two sites alike would come before what holds for three, each by its own numbers."""
        slow = [f"with it the site takes at best {time} µs a step, 90.5 as chosen" for time in ("1,200", "101.5", "95")]
        refused = [Refusal("some", reason, Role.FPROP) for reason in (*slow, "a head of 8", "a head of 8")]
        (told,) = (r for r in list_rejected(self.changed(survey, refused=tuple(refused))) if "some" in r.kernels[0])
        assert [(reason.reason, reason.count, len(reason.where)) for reason in told.reasons] == [
            ("with it the site takes at best … µs a step, 90.5 as chosen", 3, 3),
            ("a head of 8", 2, 2),
        ]

    def test_digits_of_names_are_no_numbers(self, survey) -> None:
        reasons = ("writes e4m3, not bf16", "writes e5m2, not bf16", "took … of 8", "took 3 of 8", "(…x64)", "(64x32 and 2x9)")
        refused = tuple(Refusal("some", reason, Role.FPROP) for reason in reasons)
        (told,) = (r for r in list_rejected(self.changed(survey, refused=refused)) if "some" in r.kernels[0])
        assert {reason.reason for reason in told.reasons} == set(reasons)

    def test_shapes_are_numbers(self, survey) -> None:
        refused = tuple(Refusal("some", f"cannot multiply ({m}x64), took 1.{m}ms", Role.FPROP) for m in (7, 256))
        (told,) = (r for r in list_rejected(self.changed(survey, refused=refused)) if "some" in r.kernels[0])
        assert [reason.reason for reason in told.reasons] == ["cannot multiply (…x64), took …ms"]

    def test_the_map_places_no_site_by_a_kernel_that_was_not_to_be_chosen(self, survey) -> None:
        def placed(kernels: list[str] | None) -> int:
            return len(draw_map(make_plan(survey, goal=Goal.SERVING, kernels=kernels).document, survey.document).points)

        assert placed(None) > placed([survey.sites[0].baseline]) == 0

    def test_a_long_plan_shows_the_sites_with_most_time_and_counts_the_rest(self, big_run) -> None:
        page = gather_page(read_run(big_run(MOST_ROWS + 20)))
        out = io.StringIO()
        Console(file=out, width=300).print(page_as_text(page))
        text = out.getvalue()
        assert "and 20 more rows" in text
        by_share = [row.site for row in sorted(page.plan, key=lambda row: -row.share)]
        assert by_share[0] in text
        assert by_share[-1] not in text

    @pytest.mark.parametrize("width", [60, 80, WIDE - 1, WIDE])
    def test_reasons_stand_beside_the_numbers_or_below_them(self, whole_run: Path, width: int) -> None:
        page = gather_page(read_run(whole_run))
        out = io.StringIO()
        Console(file=out, width=width).print(page_as_text(page))
        text = out.getvalue()
        assert max(map(len, text.splitlines())) <= width
        (header,) = [line for line in text.splitlines() if {"site", "role"} <= set(line.split())]
        assert ("why" in header) == (width == WIDE)
        if width < WIDE:
            told = " ".join(text.split())
            assert all(f"{row.site} {row.role}" in told for row in page.plan)
            assert all(f": {row.reason}" in told for row in page.plan)
