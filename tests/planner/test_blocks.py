"""Blocks and chains of them, against brute force over every assignment of a chain."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_survey import baseline, candidate, error, site, survey

import loka
from loka.core.gemm import Role
from loka.core.plan import Goal
from loka.core.survey import BlockCandidate, SiteSurvey

M = 100
ERRORS = {role: error(0.1) for role in Role}


def block(us: float, base: float, cast: float = 0.0, norm: str | None = "norm", **fields: object) -> BlockCandidate:
    plain = {
        "error": ERRORS, "input_cast_us": {M: cast},
        "forward_us": {M: us}, "baseline_forward_us": {M: base}, "training_us": {M: us}, "baseline_training_us": {M: base},
    }  # fmt: skip
    return BlockCandidate("triton.block", norm, "activation", **{**plain, **fields})  # type: ignore[arg-type]


def one(name: str, own_us: float, *blocks: BlockCandidate, **fields: object) -> SiteSurvey:
    """A site of 100 µs in high precision and ``own_us`` by a kernel of its own that needs no cast."""
    own = candidate("a.one", Role.FPROP, {M: own_us}, forms=("fp32", "fp32"))
    return site(name, (*baseline({Role.FPROP: {M: 100.0}}), own), blocks=blocks, **fields)


@st.composite
def chains(draw: st.DrawFn) -> tuple[SiteSurvey, ...]:
    sites = []
    for index in range(draw(st.integers(1, 4))):
        blocks = [
            block(draw(st.floats(20, 200)), 150.0, draw(st.floats(0, 60)), norm=draw(st.sampled_from(["norm", None])))
            for _ in range(draw(st.integers(0, 2)))
        ]
        producer = f"site{index - 1}" if draw(st.booleans()) else None
        sites.append(one(f"site{index}", draw(st.floats(40, 120)), *blocks, producer=producer))
    return tuple(sites)


def brute_force(sites: tuple[SiteSurvey, ...], least: float) -> float:
    """The most that can be saved: every site as itself or as any of its blocks, in every combination."""
    most = 0.0
    for ways in product(*((None, *range(len(s.blocks))) for s in sites)):
        chosen = {s.site: None if way is None else s.blocks[way] for s, way in zip(sites, ways, strict=True)}
        saved = 0.0
        for s in sites:
            candidate_block = chosen[s.site]
            if candidate_block is None:
                own = s.candidates[1].gemm_us[M]
                saved += 100 - own if least * own <= 100 else 0.0
                continue
            front = chosen.get(s.producer) if s.producer else None
            fed = front is not None and front.norm is not None
            us = candidate_block.training_us[M] + (0.0 if fed else candidate_block.input_cast_us[M])
            if least * us > 150.0:
                break
            saved += 150.0 - us
        else:
            most = max(most, saved)
    return most


@settings(max_examples=60)
@given(sites=chains(), least=st.sampled_from([1.0, 1.2, 2.0]))
def test_a_chain_is_chosen_as_a_whole(sites: tuple[SiteSurvey, ...], least: float) -> None:
    plan = loka.make_plan(survey(*sites), min_speedup=least)
    assert sum(s.baseline_us - s.time_us for s in plan.sites) == pytest.approx(brute_force(sites, least))
    by_name = {s.site: s for s in plan.sites}
    for planned in plan.sites:
        if planned.block and planned.block.fp8_input:
            front = by_name[planned.block.producer or ""]
            assert front.block is not None
            assert front.block.norm is not None


def test_a_chain_may_be_as_long_as_a_model_has_sites() -> None:
    sites = [one(f"site{i}", 100.0, block(50.0, 150.0, cast=20.0), producer=f"site{i - 1}" if i else None) for i in range(1500)]
    plan = loka.make_plan(survey(*sites))
    assert sum(s.time_us for s in plan.sites) == pytest.approx(1500 * 50.0 + 20.0)  # the first alone casts its input


def test_giving_back_the_first_of_a_long_chain_gives_back_all_that_is_not_worth_its_cast() -> None:
    """Each by itself is slower than high precision, and the next one then casts its own input."""
    casting = [one(f"site{i}", 100.0, block(50.0, 150.0, cast=120.0), producer=f"site{i - 1}") for i in range(1, 1500)]
    plan = loka.make_plan(survey(one("site0", 100.0, block(50.0, 150.0)), *casting))
    assert all(s.block for s in plan.sites)
    assert not any(s.block for s in plan.giving_back({"site0": "drifted"}).sites)


def test_fp8_from_the_block_in_front_saves_the_cast() -> None:
    """The second block alone is slower than high precision; behind the first it is worth it."""
    first, second = one("a", 100.0, block(50, 150, cast=10)), one("b", 100.0, block(100, 150, cast=60), producer="a")
    plan = loka.make_plan(survey(first, second))
    assert [s.block is not None for s in plan.sites] == [True, True]
    assert plan.sites[1].block is not None
    assert (plan.sites[1].block.fp8_input, plan.sites[1].block.producer) == (True, "a")
    assert [s.time_us for s in plan.sites] == [60, 100]
    alone = loka.make_plan(survey(first, second), keep=["a"]).sites[1]
    assert alone.block is None
    assert [r.reason for r in alone.refused if r.role is None] == ["saves -10 µs a step, the site by itself 0 µs a step"]


def entered(norm_us: float, entry_us: float, cast: float = 20.0, **fields: object) -> BlockCandidate:
    """A block behind a norm that takes ``norm_us`` by itself and ``entry_us`` into FP8; in serving a tenth."""
    times = {"entry_training_us": entry_us, "entry_baseline_training_us": norm_us}
    serving = {"entry_forward_us": entry_us / 10, "entry_baseline_forward_us": norm_us / 10}
    return block(50, 150, cast, entry="front", **{name: {M: us} for name, us in (times | serving).items()}, **fields)


def test_a_norm_in_front_is_run_too_where_that_saves_more_than_a_cast_costs() -> None:
    (planned,) = loka.make_plan(survey(one("a", 100.0, entered(30, 25)))).sites
    assert planned.block is not None
    assert (planned.block.entry, planned.block.fp8_input, planned.block.absorbed) == (
        "front",
        False,
        ("front", "norm", "activation"),
    )
    assert (planned.baseline_us, planned.time_us) == (180, 75)
    assert planned.reason == "2.4× the compiled high-precision block, both with the norm in front"
    (slow,) = loka.make_plan(survey(one("a", 100.0, entered(30, 51)))).sites
    assert slow.block is not None
    assert (slow.block.entry, slow.baseline_us, slow.time_us) == (None, 150, 70)
    (served,) = loka.make_plan(survey(one("a", 100.0, entered(30, 51, cast=3.0))), goal=Goal.SERVING).sites
    assert served.block is not None
    assert (served.block.entry, served.time_us) == ("front", pytest.approx(55.1))


def test_a_norm_in_front_does_not_hold_its_block_up() -> None:
    """With it the block saves 7 µs of 150, without 6 of 100: that is 1.06 times as fast, and the former is not."""
    slow = entered(50, 53, 4.0, training_us={M: 90.0}, baseline_training_us={M: 100.0})
    (planned,) = loka.make_plan(survey(one("a", 100.0, slow)), min_speedup=1.05).sites
    assert planned.block is not None
    assert (planned.block.entry, planned.time_us) == (None, 94)
    behind = loka.make_plan(survey(one("f", 100.0), one("a", 100.0, entered(30, 25), producer="f"))).sites[1]
    assert behind.block is not None
    assert behind.block.entry is None  # what another site feeds has no norm of its own in front


def test_beside_a_norm_in_front_a_triple_pays_for_it_too() -> None:
    """By itself the site saves 60 of its 100 µs. Its block saves 100 of 150, and 5 of the norm's 30."""
    timed = {"epilogue_training_us": {M: 50.0}}
    (planned,) = loka.make_plan(survey(one("a", 40.0, entered(30, 25, **timed)))).sites
    assert planned.block is not None
    assert [r.reason for r in planned.refused if r.kernel == "a.one"] == ["the block triton.block saves 105 µs a step"]
    (own,) = loka.make_plan(survey(one("a", 40.0, entered(30, 80, 59.0, **timed)))).sites
    assert own.block is None
    assert [r.reason for r in own.refused if r.role is None] == ["saves 50 µs a step, the site by itself 60 µs a step"]


def test_a_block_is_judged_in_every_role_that_runs() -> None:
    bad_backward = {**ERRORS, Role.WGRAD: error(0.5)}
    risky = one("a", 100.0, block(50, 150, error=bad_backward))
    training = loka.make_plan(survey(risky)).sites[0]
    assert training.block is None
    assert [r.reason for r in training.refused if r.role is None] == [
        "mere_floored at wgrad is 0.45 (up to 0.5), over max_error 0.2"
    ]
    assert loka.make_plan(survey(risky), goal="serving").sites[0].block is not None
    assert loka.make_plan(survey(risky), max_error={Role.WGRAD: 0.6}).sites[0].block is not None


def test_a_gradient_that_nobody_asks_for_holds_no_block_up() -> None:
    """The first layer has no dgrad. One that was seen without any gradient is not known to be fit for training."""
    first, unseen = ({role: ERRORS[role] for role in roles} for roles in ((Role.FPROP, Role.WGRAD), (Role.FPROP,)))
    planned = loka.make_plan(survey(one("a", 100.0, block(50, 150, error=first)))).sites[0]
    assert planned.block is not None
    assert "nobody asks for this one" in planned.kernels[Role.DGRAD].reason
    assert loka.make_plan(survey(one("a", 100.0, block(50, 150, error=unseen)))).sites[0].block is None


@pytest.mark.parametrize("goal", Goal)
def test_the_time_of_the_goal_counts(goal: Goal) -> None:
    slow_backward = one("a", 100.0, block(50, 150, training_us={M: 400.0}, baseline_training_us={M: 300.0}))
    assert (loka.make_plan(survey(slow_backward), goal=goal).sites[0].block is not None) == (goal is Goal.SERVING)


def test_a_kernel_of_the_site_that_saves_more_wins_over_its_block() -> None:
    plan = loka.make_plan(survey(one("a", 20.0, block(120, 150))))
    assert plan.sites[0].block is None
    assert plan.sites[0].kernels[Role.FPROP].kernel == "a.one"
    better = loka.make_plan(survey(one("a", 90.0, block(50, 150)))).sites[0]
    assert better.block is not None
    assert [r.reason for r in better.refused] == ["the block triton.block saves 100 µs a step"]


@pytest.mark.parametrize(
    ("lost", "why"),
    [
        ({"flushed": 0.03}, "flush 3% of the values"),
        ({"silenced": 0.1}, "10% of the feat"),
        ({"misread_backward": 0.1}, "its casts with one scale for all, for backward, distort 10% of the features"),
    ],
)
def test_a_block_whose_casts_lose_too_much_is_refused(lost: dict[str, float], why: str) -> None:
    (planned,) = loka.make_plan(survey(one("a", 100.0, block(20.0, 150.0, **lost)))).sites
    assert planned.block is None
    assert why in next(refusal.reason for refusal in planned.refused if refusal.kernel == "triton.block")
    (planned,) = loka.make_plan(survey(one("a", 100.0, block(20.0, 150.0, flushed=0.01, silenced=0.04)))).sites
    assert planned.block is not None


def test_what_backward_loses_is_nothing_to_serving() -> None:
    deaf = one("a", 100.0, block(20.0, 150.0, misread_backward=0.5))
    assert loka.make_plan(survey(deaf), goal=Goal.SERVING).sites[0].block is not None


def test_a_block_that_cannot_run_says_why() -> None:
    plan = loka.make_plan(survey(one("a", 100.0, BlockCandidate("triton.block", "norm", None, why_not="no Triton here"))))
    assert [r.reason for r in plan.sites[0].refused if r.role is None] == ["no Triton here"]


def test_beside_a_block_a_triple_pays_for_norm_and_activation() -> None:
    """By its parts alone it saves 60 µs, the block 55. But of the 150 of both, what follows takes 30 more from it."""
    parts = {"training_cast_us": {M: 0.0}, "epilogue_training_us": {M: 30.0}}
    (alone,) = loka.make_plan(survey(one("a", 40.0, block(95.0, 150.0)))).sites
    assert alone.block is None
    (fused,) = loka.make_plan(survey(one("a", 70.0, block(95.0, 150.0, **parts)))).sites
    assert fused.block is not None
    (separate,) = loka.make_plan(survey(one("a", 64.0, block(95.0, 150.0, **parts)))).sites
    assert separate.block is None


def test_a_chain_saves_in_training_the_cast_that_wgrad_reads_too() -> None:
    front = one("a", 100.0, block(60.0, 150.0))
    behind = one("b", 100.0, block(90.0, 150.0, 5.0, training_cast_us={M: 25.0}), producer="a")
    for goal, time_us in ((Goal.TRAINING, 90.0), (Goal.SERVING, 90.0)):
        assert loka.make_plan(survey(front, behind), goal=goal).sites[1].time_us == pytest.approx(time_us)
    for goal, time_us in ((Goal.TRAINING, 115.0), (Goal.SERVING, 95.0)):
        (alone,) = loka.make_plan(survey(one("b", 100.0, *behind.blocks)), goal=goal).sites
        assert alone.time_us == pytest.approx(time_us)


def test_a_triple_that_is_slower_with_what_follows_stays() -> None:
    """By its parts 100 → 90 µs; but compiled with norm and activation the site takes 110, and the triple 90 + 30."""
    parts = {"training_cast_us": {M: 0.0}, "epilogue_training_us": {M: 30.0}}
    (planned,) = loka.make_plan(survey(one("a", 90.0, block(109.0, 110.0, **parts)))).sites
    assert not planned.is_low_precision
    told = "(fprop a.one) is 0.917× the compiled high-precision block, norm and activation included, under 1.05×"
    assert planned.reason == f"the fastest that is accurate enough {told}"
    assert [r.reason for r in planned.refused if r.kernel == "a.one"] == [
        "accurate enough, but with it the site takes at best 120 µs a step, 110 in high precision"
    ]
    (unlimited,) = loka.make_plan(survey(one("a", 90.0, block(130.0, 110.0, **parts))), min_speedup=0).sites
    assert (unlimited.baseline_us, unlimited.time_us, unlimited.block) == (110.0, 120.0, None)


def test_a_speedup_is_told_apart_from_the_limit_that_it_is_below() -> None:
    (planned,) = loka.make_plan(survey(one("a", 95.26))).sites
    assert "is 1.0498× high precision, under 1.05×" in planned.reason


@pytest.mark.parametrize("limits", [{"kernels": ["a.one"]}, {"max_error": {Role.FPROP: 0.15}}])
def test_what_follows_a_site_counts_where_its_block_is_refused(limits: dict[str, object]) -> None:
    parts = {"training_cast_us": {M: 0.0}, "epilogue_training_us": {M: 30.0}, "error": dict.fromkeys(Role, error(0.18))}
    (planned,) = loka.make_plan(survey(one("a", 90.0, block(50.0, 110.0, **parts))), **limits).sites
    assert not planned.is_low_precision
    (faster,) = loka.make_plan(survey(one("a", 60.0, block(50.0, 110.0, **parts))), **limits).sites
    assert (faster.baseline_us, faster.time_us) == (110.0, 90.0)
    assert faster.reason == "1.22× the compiled high-precision block, casts included"


def test_the_least_speedup_is_of_a_site_with_what_follows() -> None:
    """By itself 100 → 80 µs; compiled with norm and activation it takes 150, and the kernel with those 149."""
    beside = block(149.0, 150.0, training_cast_us={M: 0.0}, epilogue_training_us={M: 69.0})
    for least, moves in ((1.05, False), (1.0, True)):
        (planned,) = loka.make_plan(survey(one("a", 80.0, beside)), min_speedup=least).sites
        assert planned.is_low_precision is moves


@pytest.mark.parametrize(("calls", "time_us"), [(4.0, 440.0), (0.25, 55.0)])
def test_the_weight_of_a_block_is_cast_once_a_step_however_often_it_is_called(calls: float, time_us: float) -> None:
    casting = block(100.0, 300.0, weight_cast_us={M: 40.0}) if calls > 1 else block(60.0, 300.0, weight_cast_us={M: 40.0})
    (planned,) = loka.make_plan(survey(one("a", 100.0, casting, calls={M: calls}))).sites
    assert planned.block is not None
    assert planned.time_us == time_us
    (served,) = loka.make_plan(survey(one("a", 100.0, casting, calls={M: calls})), goal="serving").sites
    assert served.time_us == time_us - 40.0


def test_a_block_whose_forward_is_given_back_is_none_and_the_one_behind_it_casts_again() -> None:
    fprop, wgrad = baseline({Role.FPROP: {M: 100.0}, Role.WGRAD: {M: 100.0}})
    own = candidate("a.one", Role.WGRAD, {M: 20.0}, forms=("fp32", "fp32"))
    front = site("a", (fprop, wgrad, own), blocks=(block(60.0, 250.0, epilogue_training_us={M: 50.0}),))
    behind = one("b", 100.0, block(90.0, 150.0, 30.0), producer="a")
    plan = loka.make_plan(survey(front, behind))
    assert [s.block is not None and s.block.fp8_input for s in plan.sites] == [False, True]
    a, b = plan.giving_back_forward({"a": "it costs too much"}).sites
    assert (a.block, a.rounds_forward, a.baseline_us, a.time_us) == (None, False, 250.0, 170.0)  # both with what follows
    assert {role: choice.kernel for role, choice in a.kernels.items()} == {
        Role.FPROP: "torch.fp32", Role.DGRAD: "torch.fp32", Role.WGRAD: "a.one",
    }  # fmt: skip
    assert b.block is not None
    assert (b.block.fp8_input, b.block.producer) == (False, None)
    fast_block = block(60.0, 165.0, epilogue_training_us={M: 50.0})
    (slow,) = loka.make_plan(survey(site("a", (fprop, wgrad, own), blocks=(fast_block,)))).sites
    assert slow.finer == (), "beside what compiled blocks take, it is no gain"


def test_a_block_that_loses_the_one_in_front_pays_for_its_cast_again_and_goes_where_that_is_too_much() -> None:
    """It takes 110 of 200 µs with FP8 handed to it, and its cast 60, or 100."""
    for cast, stays in ((60.0, True), (100.0, False)):
        first, second = one("a", 100.0, block(40.0, 100.0)), one("b", 200.0, block(110.0, 200.0, cast), producer="a")
        plan = loka.make_plan(survey(first, second))
        before = plan.sites[1]
        assert before.block is not None
        assert (before.time_us, before.block.fp8_input) == (110.0, True)
        behind = plan.giving_back({"a": "gone"}).sites[1]
        assert behind.is_low_precision is stays
        assert behind.time_us == (110.0 + cast if stays else 200.0)
        assert "without a in front" in behind.reason


def test_a_block_that_takes_no_time_is_no_accident() -> None:
    """A small one's time without its cast may come out as 0."""
    (plan,) = loka.make_plan(survey(one("a", 100.0, block(0.0, 100.0)))).sites
    assert plan.block is not None
    assert "inf×" in plan.reason


def test_a_block_that_takes_no_time_stays_when_another_site_is_given_back() -> None:
    """Nothing has become slower there."""
    plan = loka.make_plan(survey(one("a", 100.0, block(0.0, 100.0)), one("b", 50.0)))
    assert [site.is_low_precision for site in plan.giving_back({"b": "gone"}).sites] == [True, False]


def test_where_a_block_cannot_take_an_m_it_costs_what_high_precision_does() -> None:
    both = {M: 150.0, 7: 30.0}
    partly = block(60.0, 150.0, baseline_training_us=both, baseline_forward_us=both)
    (planned,) = loka.make_plan(survey(one("a", 100.0, partly, calls={M: 2.0, 7: 3.0}))).sites
    assert (planned.time_us, planned.baseline_us) == (2 * 60 + 3 * 30, 2 * 150 + 3 * 30)


def test_a_block_that_casts_its_own_input_names_nobody_in_front() -> None:
    first, second = one("a", 100.0), one("b", 100.0, block(40.0, 150.0, 10.0), producer="a")
    planned = loka.make_plan(survey(first, second)).sites[1]
    assert planned.block is not None
    assert (planned.block.fp8_input, planned.block.producer, planned.block.input_cast_us) == (False, None, 0.0)


@pytest.mark.parametrize("norm", ["norm", None])
def test_fp8_is_handed_on_behind_a_norm_alone(norm: str | None) -> None:
    """Without one nothing bounds the values, and no scale is known before they are."""
    first, second = (
        one("first", 99.0, block(20.0, 150.0, norm=norm)),
        one("second", 99.0, block(20.0, 150.0, 50.0), producer="first"),
    )
    planned = {site.site: site for site in loka.make_plan(survey(first, second)).sites}
    assert planned["first"].block is not None
    assert planned["second"].block is not None
    assert planned["second"].block.fp8_input is (norm is not None)
    assert planned["second"].time_us == (20.0 if norm else 70.0)


def test_serving_counts_what_follows_a_site_as_serving_runs_it() -> None:
    """The kernel by itself saves 50 µs of 150 and leaves 1 behind it in serving, where a block saves 20."""
    slow = block(130.0, 150.0, epilogue_forward_us={M: 1.0}, epilogue_training_us={M: 1000.0})
    (planned,) = loka.make_plan(survey(one("a", 50.0, slow)), goal=Goal.SERVING).sites
    assert planned.block is None
    assert planned.kernels[Role.FPROP].kernel == "a.one"


def test_what_follows_a_site_counts_only_where_it_was_timed_at_all_rows() -> None:
    calls = {64: 1.0, M: 1.0}
    times = {"forward_us": {M: 130.0}, "baseline_forward_us": dict.fromkeys(calls, 150.0), "epilogue_forward_us": {M: 5.0}}
    own = candidate("a.one", Role.FPROP, dict.fromkeys(calls, 50.0), forms=("fp32", "fp32"))
    candidates = (*baseline({Role.FPROP: dict.fromkeys(calls, 100.0)}), own)
    surveyed = survey(site("a", candidates, blocks=(block(130.0, 150.0, **times),), calls=calls))
    (planned,) = loka.make_plan(surveyed, goal=Goal.SERVING).sites
    assert planned.kernels[Role.FPROP].kernel == "a.one"


def test_a_block_that_saves_less_by_itself_is_worth_what_it_opens_behind_it() -> None:
    """By a kernel of its own the first saves 80 µs, as a block 70; but behind the block the second saves 50 more."""
    first, second = one("a", 20.0, block(80.0, 150.0)), one("b", 100.0, block(100.0, 150.0, 60.0), producer="a")
    assert [s.block is not None for s in loka.make_plan(survey(first, second)).sites] == [True, True]


def test_what_lies_behind_a_site_counts_whichever_way_the_site_runs() -> None:
    """The second saves 50 µs behind either, so the first runs as it saves most: 80 by itself, as a block 70."""
    first, second = one("a", 20.0, block(80.0, 150.0)), one("b", 50.0, producer="a")
    assert [s.block for s in loka.make_plan(survey(first, second)).sites] == [None, None]


def test_a_norm_in_front_is_left_alone_where_the_block_cannot_take_all_rows() -> None:
    """At those rows the site, and the norm with it, runs in high precision."""
    both = {M: 150.0, 7: 30.0}
    (planned,) = loka.make_plan(
        survey(one("a", 100.0, entered(30.0, 1.0, baseline_training_us=both), calls={M: 2.0, 7: 3.0}))
    ).sites
    assert planned.block is not None
    assert (planned.block.entry, planned.time_us) == (None, 2 * (50 + 20) + 3 * 30)


def test_beside_a_block_each_other_kernel_is_refused_once() -> None:
    (planned,) = loka.make_plan(survey(one("a", 99.0, block(50.0, 150.0)))).sites
    assert planned.block is not None
    assert [refusal.kernel for refusal in planned.refused] == ["a.one"]


def test_a_kernel_that_a_fed_block_beats_is_told_what_the_block_saves_there() -> None:
    first, second = one("a", 100.0, block(50.0, 150.0, 10.0)), one("b", 90.0, block(100.0, 150.0, 60.0), producer="a")
    refused = loka.make_plan(survey(first, second)).sites[1].refused
    assert [refusal.reason for refusal in refused] == ["the block triton.block saves 50 µs a step"]


def test_where_no_kernel_is_accurate_enough_a_block_still_says_why_it_is_not() -> None:
    wrong = candidate("a.one", Role.FPROP, {M: 20.0}, forms=("fp32", "fp32"), error=error(0.5))
    unable = BlockCandidate("triton.block", "norm", None, why_not="no Triton here")
    (planned,) = loka.make_plan(survey(site("a", (*baseline({Role.FPROP: {M: 100.0}}), wrong), blocks=(unable,)))).sites
    assert {refusal.kernel: refusal.reason for refusal in planned.refused} == {
        "a.one": "mere_floored at fprop is 0.45 (up to 0.5), over max_error 0.2",
        "triton.block": "no Triton here",
    }
