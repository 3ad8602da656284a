"""The choice at one site against brute force over every triple, computed here from the definition of a site's cost."""

import math
from itertools import product

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_survey import BASELINE, baseline, candidate, error, site, survey

import loka
from loka.core.gemm import SOURCES, Role, TensorName
from loka.core.plan import Goal, SitePlan
from loka.core.recipe import Transform
from loka.core.survey import BlockCandidate, Candidate, CastTime, SiteSurvey

M = 100
ALL_ROLES = {role: {M: 100.0} for role in Role}


def single(tensor: TensorName, form: str, us: float, m: int = M) -> CastTime:
    return CastTime(tensor, (form,), {m: us})


def plan_of(one: SiteSurvey, **limits: object) -> SitePlan:
    return loka.make_plan(survey(one), **limits).sites[0]  # type: ignore[arg-type]


def brute_force(one: SiteSurvey, goal: Goal, limit: float, noise: float = math.inf) -> float:
    """The least time of a step over all triples of kernels within ``limit``, each priced call by call, and what follows the
    site with it; fprop has at most ``noise``."""
    roles = list(Role) if goal is Goal.TRAINING else [Role.FPROP]
    at = {(c.role, c.kernel): c for c in one.candidates}
    casts = {(c.tensor, frozenset(c.forms)): c.time_us for c in one.casts}
    measured = sorted(at[Role.FPROP, BASELINE].gemm_us)

    def cast_us(tensor: TensorName, forms: set[str], m: int) -> float:
        forms = {form for form in forms if not form.startswith(("fp32", "bf16"))}
        if not forms:
            return 0.0
        if (tensor, frozenset(forms)) in casts:
            return casts[tensor, frozenset(forms)][m]
        return sum(casts[tensor, frozenset([form])][m] for form in forms)

    def step_us(triple: tuple[Candidate, ...]) -> float:
        reads: dict[TensorName, set[str]] = {}
        for c in triple:
            for source, form in zip(SOURCES[c.role], c.forms, strict=True):
                reads.setdefault(source.tensor, set()).add(form)
        total = cast_us(TensorName.W, reads.get(TensorName.W, set()), M) if goal is Goal.TRAINING else 0.0
        copy_us = casts.get((TensorName.W, frozenset(["bf16"])), {M: 0.0})[M] if goal is Goal.TRAINING else 0.0
        is_plain, was_copied, was_run = all(c.kernel == BASELINE for c in triple), False, False
        for m, count in one.calls.items():
            nearest = next((other for other in measured if other >= m), measured[-1])
            runs = triple if all(nearest in c.gemm_us for c in triple) else [at[role, BASELINE] for role in roles]
            total += count * sum(c.gemm_us[nearest] for c in runs)
            was_run |= runs is triple
            if runs is triple:
                total += count * sum(cast_us(t, forms, nearest) for t, forms in reads.items() if t is not TensorName.W)
            if is_plain or runs is not triple:
                was_copied = True
            else:
                total += count * copy_us * sum(c.kernel == BASELINE and c.role is not Role.WGRAD for c in triple)
        total += copy_us * was_copied
        if not is_plain and not was_run:
            return math.inf  # it takes none of the rows that are there, and is no choice
        if not one.blocks:
            return total
        (beside,) = one.blocks
        if is_plain:
            return sum(count * beside.baseline_training_us[M] for count in one.calls.values())
        return total + sum(count * beside.epilogue_training_us[M] for count in one.calls.values())

    def able(c: Candidate) -> bool:
        if c.kernel == BASELINE:
            return True
        is_quiet = c.role is not Role.FPROP or c.error["mere_floored"].mean <= noise
        return is_quiet and c.why_not is None and c.error["mere_floored"].high <= limit

    triples = product(*([c for c in one.candidates if c.role is role and able(c)] for role in roles))
    return min(step_us(triple) for triple in triples)


times = st.floats(1.0, 100.0)
KERNELS = ("a.one", "a.two", "b.one")
FORMS = {"a.one": "row", "a.two": "row", "b.one": "block"}  # a.one and a.two share their casts


@st.composite
def surveys(draw: st.DrawFn) -> SiteSurvey:
    rows = [M, 64] if draw(st.booleans()) else [M]
    candidates = list(baseline({role: {m: draw(times) for m in rows} for role in Role}))
    copies = []
    if draw(st.booleans()):  # the weight is stored in another dtype than it is multiplied in
        stored = {Role.FPROP: ("fp32", "bf16"), Role.DGRAD: ("fp32", "bf16ᵀ"), Role.WGRAD: ("fp32", "fp32")}
        candidates = [msgspec.structs.replace(c, forms=stored[c.role]) for c in candidates]
        copy_us = draw(times)
        copies = [CastTime(TensorName.W, (form,), {M: copy_us}) for form in ("bf16", "bf16ᵀ")]
    blocks = [refused_block(draw(times), draw(times))] if draw(st.booleans()) else []
    for kernel, role in product(KERNELS, Role):
        takes = rows if draw(st.integers(0, 3)) else rows[:1]
        forms = tuple(FORMS[kernel] + ("ᵀ" if source.transposed else "") for source in SOURCES[role])
        why_not = "cannot" if draw(st.integers(0, 5)) == 0 else None
        us = {} if why_not else {m: draw(times) for m in takes}
        high = draw(st.sampled_from([0.05, 0.15, 0.25, 0.5]))
        candidates.append(candidate(kernel, role, us, forms=forms, why_not=why_not, error=error(high)))
    casts = [
        CastTime(tensor, forms, dict.fromkeys(rows, draw(times)) if tensor is TensorName.W else {m: draw(times) for m in rows})
        for tensor in TensorName
        for forms in [("block",), ("blockᵀ",), ("row",), ("rowᵀ",), *([("row", "rowᵀ")] if draw(st.booleans()) else [])]
    ]
    calls = draw(st.dictionaries(st.integers(1, 120), st.floats(0.5, 8), min_size=1, max_size=3))
    return site("tower.0", tuple(candidates), (*casts, *copies), calls=calls, blocks=tuple(blocks))


def refused_block(baseline_us: float, epilogue_us: float) -> BlockCandidate:
    """It was timed at the larger rows alone, which stand in for all, and no limit lets it in."""
    whole, epilogue = {M: baseline_us}, {M: epilogue_us}
    return BlockCandidate(
        "triton.block", "norm", "act", error=dict.fromkeys(Role, error(0.9)), forward_us={M: 1.0}, training_us={M: 1.0},
        baseline_forward_us=whole, baseline_training_us=whole, epilogue_forward_us=epilogue, epilogue_training_us=epilogue,
    )  # fmt: skip


@settings(max_examples=80)
@given(
    one=surveys(), goal=st.sampled_from(Goal), limit=st.sampled_from([0.1, 0.2, 0.4]), least=st.sampled_from([1.0, 1.3, 2.0])
)
def test_the_choice_is_the_best_of_all_triples(one: SiteSurvey, goal: Goal, limit: float, least: float) -> None:
    plan = plan_of(one, goal=goal, max_error=limit, min_speedup=least)
    best = brute_force(one, goal, limit)
    if plan.baseline_us >= least * best * (1 + 1e-9) and best < plan.baseline_us * (1 - 1e-9):
        assert plan.is_low_precision
    if plan.is_low_precision:
        assert plan.time_us == pytest.approx(best)
        assert plan.speedup >= least * (1 - 1e-9)
        assert all(choice.error is None or choice.error.high <= limit for choice in plan.kernels.values())
    else:
        assert plan.time_us == plan.baseline_us
    # A reason at every role, and every candidate is chosen or refused.
    roles = list(Role) if goal is Goal.TRAINING else [Role.FPROP]
    assert list(plan.kernels) == roles
    assert plan.reason
    assert all(choice.reason for choice in plan.kernels.values())
    told = {(role, choice.kernel) for role, choice in plan.kernels.items()} | {(r.role, r.kernel) for r in plan.refused}
    assert told >= {(role, kernel) for role in roles for kernel in KERNELS}
    assert plan == plan_of(one, goal=goal, max_error=limit, min_speedup=least)


def test_a_kernel_that_is_slower_on_the_whole_is_chosen_for_the_rows_that_the_others_take() -> None:
    """Over both numbers of rows fprop takes 5 µs on a.two and 4 on a.one. But other roles take the larger alone, where it is
    1 and 3; the smaller runs in high precision whichever is chosen."""
    gemms = {"a.one": {M: 3.0, 64: 1.0}, "a.two": {M: 1.0, 64: 4.0}}
    candidates = [*baseline({role: {M: 50.0, 64: 1.0} for role in Role})]
    for kernel, role in product(gemms, Role):
        forms = tuple("row" + ("ᵀ" if source.transposed else "") for source in SOURCES[role])
        us = gemms[kernel] if role is Role.FPROP else {M: 10.0}
        candidates.append(candidate(kernel, role, us, forms=forms, error=error(0.05)))
    casts = [CastTime(tensor, (form,), {M: 1.0, 64: 30.0}) for tensor in TensorName for form in ("row", "rowᵀ")]
    plan = plan_of(site("tower.0", tuple(candidates), tuple(casts), calls={M: 1.0, 64: 1.0}))
    assert plan.kernels[Role.FPROP].kernel == "a.two"


@settings(max_examples=80)
@given(one=surveys(), limit=st.sampled_from([0.1, 0.4]), least=st.sampled_from([1.0, 1.3]))
def test_the_best_with_an_exact_forward_is_known_where_it_is_worth_it(one: SiteSurvey, limit: float, least: float) -> None:
    plan = plan_of(one, max_error=limit, min_speedup=least)
    if not plan.rounds_forward:
        assert plan.finer == ()
        return
    plan = msgspec.structs.replace(plan, finer=tuple(f for f in plan.finer if f.kernels[Role.FPROP].error is None))
    best = brute_force(one, Goal.TRAINING, limit, noise=0.0)
    given = plan.with_finer_forward(BASELINE, "for a reason")
    assert not given.rounds_forward
    assert given.kernels[Role.FPROP].reason == "for a reason"
    if plan.baseline_us < least * best * (1 - 1e-9) or best > plan.baseline_us * (1 - 1e-9):
        assert not given.is_low_precision
        assert given.time_us == plan.baseline_us
    elif given.is_low_precision:
        assert given.time_us == pytest.approx(best)
        assert all(choice.error is None or choice.error.high <= limit for choice in given.kernels.values())
    else:
        assert plan.baseline_us == pytest.approx(least * best)
    # What it had and has no more is refused, with the reason.
    lost = {(r, c.kernel) for r, c in plan.kernels.items() if c.error and given.kernels[r].kernel != c.kernel}
    assert {(r.role, r.kernel) for r in given.refused if r.reason == "for a reason"} == lost
    serving = plan_of(one, goal=Goal.SERVING, max_error=limit, min_speedup=least)
    assert all(forward.kernels[Role.FPROP].error for forward in serving.finer)


@settings(max_examples=80)
@given(one=surveys(), goal=st.sampled_from(Goal), limit=st.sampled_from([0.2, 0.4]), least=st.sampled_from([1.0, 1.3]))
def test_a_finer_forward_has_half_the_noise_and_is_the_best_of_those(
    one: SiteSurvey, goal: Goal, limit: float, least: float
) -> None:
    plan = plan_of(one, goal=goal, max_error=limit, min_speedup=least)
    quiet = [forward for forward in plan.finer if forward.kernels[Role.FPROP].error is not None]
    if not plan.is_low_precision or plan.kernels[Role.FPROP].error is None:
        assert not quiet
        return
    noise = plan.kernels[Role.FPROP].error.mean / 2
    best, exact = (brute_force(one, goal, limit, noise=most) for most in (noise, 0.0))
    assert len(quiet) <= 1
    assert list(plan.finer[: len(quiet)]) == quiet, "it comes before the exact one"
    if quiet:
        assert quiet[0].time_us == pytest.approx(best)
        assert best < exact * (1 + 1e-9)
        assert quiet[0].kernels[Role.FPROP].error.mean <= noise * (1 + 1e-9)
        given = plan.with_finer_forward(BASELINE, "for a reason")
        assert (given.kernels[Role.FPROP].reason, given.rounds_forward) == ("for a reason", True)
        assert given.finer == plan.finer[1:]
    elif plan.baseline_us > least * best * (1 + 1e-9):
        assert best == pytest.approx(exact), "an exact one is as fast"


def test_a_shared_cast_is_paid_once() -> None:
    """x's row form costs 60: too much for either role alone, worth it for both together where they read the same one."""
    fprop = candidate("a.one", Role.FPROP, {M: 60.0}, forms=("row", "w"))
    wgrad = candidate("a.one", Role.WGRAD, {M: 60.0}, forms=("dyᵀ", "row"))
    casts = (
        single(TensorName.X, "row", 60.0), single(TensorName.W, "w", 1.0), single(TensorName.DY, "dyᵀ", 1.0),
    )  # fmt: skip
    both = plan_of(site("s", (*baseline(ALL_ROLES), fprop, wgrad), casts))
    assert {role: choice.kernel for role, choice in both.kernels.items()} == {
        Role.FPROP: "a.one", Role.DGRAD: BASELINE, Role.WGRAD: "a.one",
    }  # fmt: skip
    assert both.time_us == 60 + 60 + 100 + 60 + 1 + 1
    alone = plan_of(site("s", (*baseline(ALL_ROLES), fprop), casts))
    assert not alone.is_low_precision
    names = "fprop a.one, dgrad torch.fp32, wgrad torch.fp32"
    assert alone.reason == f"the fastest that is accurate enough ({names}) is 0.935× high precision, under 1.05×"
    # Speed may be left out of account: then what is accurate enough runs, the fastest of it.
    assert plan_of(site("s", (*baseline(ALL_ROLES), fprop), casts), min_speedup=0.0).kernels[Role.FPROP].kernel == "a.one"


def test_forms_timed_together_cost_what_they_cost_together() -> None:
    fprop = candidate("a.one", Role.FPROP, {M: 10.0}, forms=("row", "w"))
    wgrad = candidate("a.one", Role.WGRAD, {M: 10.0}, forms=("dyᵀ", "rowᵀ"))
    casts = (
        single(TensorName.X, "row", 20.0), single(TensorName.X, "rowᵀ", 30.0),
        single(TensorName.W, "w", 0.0), single(TensorName.DY, "dyᵀ", 0.0),
    )  # fmt: skip
    apart = plan_of(site("s", (*baseline(ALL_ROLES), fprop, wgrad), casts))
    assert apart.time_us == 10 + 10 + 100 + 20 + 30
    together = CastTime(TensorName.X, ("row", "rowᵀ"), {M: 35.0})
    assert plan_of(site("s", (*baseline(ALL_ROLES), fprop, wgrad), (*casts, together))).time_us == 10 + 10 + 100 + 35


def test_the_weight_is_cast_once_a_step_in_training_and_never_in_serving() -> None:
    fprop = candidate("a.one", Role.FPROP, {M: 10.0}, forms=("row", "w"))
    casts = (single(TensorName.X, "row", 5.0), single(TensorName.W, "w", 70.0))
    one = site("s", (*baseline(ALL_ROLES), fprop), casts, calls={M: 4.0})
    assert plan_of(one, goal="training").time_us == 4 * (10 + 5 + 200) + 70
    assert plan_of(one, goal="serving").time_us == 4 * (10 + 5)


def test_high_precision_is_cast_once_for_both_orders_of_axes() -> None:
    """The transpose of a bf16 weight is a view: 100 µs of products and one cast of 10, not two."""
    roles = [Candidate(BASELINE, Role.FPROP, "bf16", forms=("bf16", "bf16"), gemm_us={100: 40.0})]
    roles += [Candidate(BASELINE, Role.DGRAD, "bf16", forms=("bf16", "bf16ᵀ"), gemm_us={100: 60.0})]
    casts = tuple(CastTime(TensorName.W, (form,), {100: 10.0}) for form in ("bf16", "bf16ᵀ"))
    (planned,) = loka.make_plan(survey(site("a", tuple(roles), casts))).sites
    assert planned.baseline_us == pytest.approx(110.0)


def test_an_m_that_the_kernel_cannot_take_costs_high_precision() -> None:
    fprop = candidate("a.one", Role.FPROP, {M: 10.0}, forms=("fp32", "w"))
    one = site(
        "s", (*baseline({Role.FPROP: {M: 100.0, 7: 9.0}}), fprop), (single(TensorName.W, "w", 0.0),), calls={M: 3.0, 7: 1.0}
    )
    assert plan_of(one, goal="serving").time_us == 3 * 10 + 9
    assert plan_of(one, goal="serving").baseline_us == 3 * 100 + 9


def test_a_transform_is_the_whole_sites() -> None:
    """fprop is rescued by centering, wgrad by rescaling alone: the site can have one of them."""
    bad = error(0.9)
    row = {"forms": ("row", "w")}
    candidates = (
        *baseline(ALL_ROLES),
        candidate("a.one", Role.FPROP, {M: 10.0}, **row, error=bad),
        candidate("a.one", Role.FPROP, {M: 20.0}, forms=("row center", "w"), transform=Transform.CENTER),
        candidate("a.one", Role.WGRAD, {M: 30.0}, forms=("dyᵀ", "rowᵀ rescale"), transform=Transform.RESCALE),
        candidate("a.one", Role.DGRAD, {M: 40.0}, forms=("dy", "wᵀ")),
    )
    casts = tuple(
        single(tensor, form, 0.0)
        for tensor, forms in {
            TensorName.X: ("row", "row center", "rowᵀ rescale"), TensorName.W: ("w", "wᵀ"), TensorName.DY: ("dy", "dyᵀ"),
        }.items()
        for form in forms
    )  # fmt: skip
    vectors = {"s/center": torch.zeros(64), "s/rescale": torch.ones(64)}
    plan = loka.make_plan(survey(site("s", candidates, casts), vectors=vectors))
    one = plan.sites[0]
    assert one.transform is Transform.CENTER
    # dgrad reads no x, so it needs no centered twin.
    assert [one.kernels[role].kernel for role in Role] == ["a.one", "a.one", BASELINE]
    assert one.time_us == 20 + 40 + 100
    assert plan.vectors.keys() == {"s/center"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"error": error(0.3)}, "mere_floored at fprop is 0.27 (up to 0.3), over max_error 0.2"),
        ({"error": {}}, "its error at fprop was not measured"),
        ({"silenced": 0.4}, "its cast of x flushes 40% of the features to zero, over 5%"),
        ({"flushed": 0.2}, "its casts flush 20% of the values to zero, over 2%"),
        ({"why_not": "needs sm_90", "error": {}, "us": {}}, "needs sm_90"),
        ({"us": {}}, "its GEMM was not timed: no kernel runs it here, or its error is far over any sensible limit"),
        ({"forms": ("unknown", "w")}, "its cast of x to unknown was not timed"),
        ({"us": {8: 1.0}}, "takes none of the rows that were seen"),
        ({"us": {M: 101.0}}, "accurate enough, but with it the site takes at best 302 µs a step, 300 in high precision"),
    ],
)
def test_refusals_say_why(changes: dict, reason: str) -> None:
    fields = {"us": {M: 10.0}, "forms": ("row", "w"), **changes}
    casts = (single(TensorName.X, "row", 1.0), single(TensorName.W, "w", 0.0))
    one = plan_of(site("s", (*baseline(ALL_ROLES), candidate("a.one", Role.FPROP, fields.pop("us"), **fields)), casts))
    assert [refusal.reason for refusal in one.refused] == [reason]
    assert not one.is_low_precision


def test_a_refusal_tells_the_best_that_the_site_could_be_with_it() -> None:
    """In whichever order triples are tried: dgrad has a faster kernel and a slower one."""
    times = {Role.FPROP: {"a": 10.0, "b": 20.0}, Role.DGRAD: {"c": 10.0, "d": 30.0}}
    able = [candidate(kernel, role, {M: us}) for role, of_role in times.items() for kernel, us in of_role.items()]
    casts = [single(SOURCES[c.role][index].tensor, form, 0.0) for c in able for index, form in enumerate(c.forms)]
    one = plan_of(site("s", (*baseline(ALL_ROLES), *able), tuple(casts)))
    assert {refusal.kernel: refusal.reason for refusal in one.refused} == {
        "b": "accurate enough, but with it the site takes at best 130 µs a step, 120 as chosen",
        "d": "accurate enough, but with it the site takes at best 140 µs a step, 120 as chosen",
    }


@pytest.mark.parametrize(("recipe", "refused"), [("e4m3 tensorwise", [Role.DGRAD]), ("int8 rowwise", [])])
def test_a_gradient_that_is_cast_to_zeros_is_refused_where_rows_stay_apart(recipe: str, refused: list[Role]) -> None:
    """dgrad's rows are examples, each with a gradient to pass on; wgrad sums over them. INT8 rounds to zero as ever."""
    forms = {Role.DGRAD: ("dy", "wᵀ"), Role.WGRAD: ("dyᵀ", "rowᵀ")}
    low = [candidate("a.one", role, {M: 10.0}, forms=forms[role], flushed=0.3, recipe=recipe) for role in forms]
    named = zip((TensorName.DY, TensorName.W, TensorName.DY, TensorName.X), ("dy", "wᵀ", "dyᵀ", "rowᵀ"), strict=True)
    one = plan_of(site("s", (*baseline(ALL_ROLES), *low), tuple(single(tensor, form, 1.0) for tensor, form in named)))
    assert [refusal.role for refusal in one.refused] == refused
    assert {refusal.reason for refusal in one.refused} <= {"its casts flush 30% of the values to zero, over 2%"}
    assert [role for role in Role if one.kernels[role].kernel == "a.one"] == [role for role in forms if role not in refused]


def test_gradients_of_weights_are_summed_in_full() -> None:
    """Whatever the error: in the demo's survey on an H200 that of wgrad at one site was three times as large by a fast sum."""
    forms = {Role.FPROP: ("row", "w"), Role.DGRAD: ("dy", "wᵀ"), Role.WGRAD: ("dyᵀ", "rowᵀ")}
    low = [
        candidate(f"a.{name}", role, {M: us}, forms=forms[role], recipe=recipe)
        for role in Role
        for name, us, recipe in (("fast", 10.0, "e4m3 rowwise fast"), ("full", 11.0, "e4m3 rowwise"))
    ]
    tensors = (TensorName.X, TensorName.W, TensorName.DY, TensorName.W, TensorName.DY, TensorName.X)
    read = [form for of_role in forms.values() for form in of_role]
    casts = tuple(single(tensor, form, 1.0) for tensor, form in zip(tensors, read, strict=True))
    one = plan_of(site("s", (*baseline(ALL_ROLES), *low), casts))
    assert [one.kernels[role].kernel for role in Role] == ["a.fast", "a.fast", "a.full"]
    (refusal,) = [refusal for refusal in one.refused if refusal.role is Role.WGRAD]
    assert refusal.kernel == "a.fast"
    assert refusal.reason.startswith("sums a batch in the tensor core's own 14 bits")
    without = [option for option in low if (option.kernel, option.role) != ("a.full", Role.WGRAD)]
    told = plan_of(site("s", (*baseline(ALL_ROLES), *without), casts)).kernels[Role.WGRAD]
    assert told.reason.startswith("no kernel that was measured here sums a batch in full")
    slow = candidate("a.full", Role.WGRAD, {M: 1000.0}, forms=forms[Role.WGRAD], recipe="e4m3 rowwise")
    told = plan_of(site("s", (*baseline(ALL_ROLES), *without, slow), casts)).kernels[Role.WGRAD]
    assert told.reason == "no kernel that is accurate enough here makes the site faster"


def test_of_kernels_with_the_same_casts_the_faster_wins() -> None:
    casts = (single(TensorName.X, "row", 1.0),)
    slow, fast = (
        candidate(f"a.{name}", Role.FPROP, {M: us}, forms=("row", "fp32")) for name, us in (("slow", 30.0), ("fast", 20.0))
    )
    one = plan_of(site("s", (*baseline(ALL_ROLES), slow, fast), casts), goal="serving")
    assert one.kernels[Role.FPROP].kernel == "a.fast"
    assert [r.reason for r in one.refused] == ["reads the same casts as a.fast, whose GEMM is faster: 30 µs a step against 20"]


def test_too_small_a_gain_leaves_the_site_alone() -> None:
    casts = (single(TensorName.X, "row", 1.0),)
    fprop = candidate("a.one", Role.FPROP, {M: 95.0}, forms=("row", "fp32"))
    one = plan_of(site("s", (*baseline(ALL_ROLES), fprop), casts), goal="serving")
    assert not one.is_low_precision
    assert one.reason == "the fastest that is accurate enough (fprop a.one) is 1.04× high precision, under 1.05×"


def test_a_site_without_gradients_is_planned_by_its_fprop() -> None:
    casts = (single(TensorName.X, "row", 1.0), single(TensorName.W, "w", 1.0))
    fprop = candidate("a.one", Role.FPROP, {M: 10.0}, forms=("row", "w"))
    one = plan_of(site("s", (*baseline({Role.FPROP: {M: 100.0}}), fprop), casts))
    assert one.kernels[Role.FPROP].kernel == "a.one"
    assert "no gradient was seen here" in one.kernels[Role.WGRAD].reason


def test_a_weights_cast_is_paid_for_whatever_m_it_was_timed_at() -> None:
    """Beside a form that is free: nothing was timed for both at one M."""
    fprop = candidate("a.one", Role.FPROP, {M: 10.0}, forms=("fp32", "w"))
    one = site("s", (*baseline(ALL_ROLES), fprop), (single(TensorName.W, "w", 50.0, m=7),))
    assert plan_of(one, goal="training").time_us == 10 + 50 + 200


def test_an_error_at_the_limit_is_within_it() -> None:
    at = candidate("a.one", Role.FPROP, {M: 10.0}, forms=("fp32", "fp32"), error=error(0.2))
    one = site("s", (*baseline({Role.FPROP: {M: 100.0}}), at))
    assert plan_of(one, goal="serving", max_error=0.2).is_low_precision
    assert not plan_of(one, goal="serving", max_error=0.1999).is_low_precision


def test_of_equally_fast_triples_the_one_with_more_high_precision_is_chosen() -> None:
    same = candidate("a.one", Role.FPROP, {M: 100.0}, forms=("fp32", "fp32"))
    faster = candidate("a.one", Role.WGRAD, {M: 20.0}, forms=("fp32", "fp32"))
    plan = plan_of(site("s", (*baseline(ALL_ROLES), same, faster)))
    assert [choice.kernel for choice in plan.kernels.values()] == [BASELINE, BASELINE, "a.one"]


def test_what_is_refused_for_time_says_its_own_and_that_of_what_was_chosen() -> None:
    """Both in µs of a step, which calls the site four times; of a kernel that mixes with others, that of the best mix."""
    fast, slow = (candidate(kernel, Role.FPROP, {M: us}, forms=("fp32", "fp32")) for kernel, us in (("a", 30.0), ("b", 60.0)))
    other = candidate("c", Role.FPROP, {M: 50.0})
    wgrad = candidate("a", Role.WGRAD, {M: 20.0}, forms=("fp32", "fp32"))
    casts = (single(TensorName.X, "c", 0.0), single(TensorName.W, "c", 0.0))
    plan = plan_of(site("s", (*baseline(ALL_ROLES), fast, slow, other, wgrad), casts, calls={M: 4.0}))
    reasons = {refusal.kernel: refusal.reason for refusal in plan.refused}
    assert reasons["b"] == "reads the same casts as a, whose GEMM is faster: 240 µs a step against 120"
    assert reasons["c"].endswith(f"at best {4 * (50 + 100 + 20)} µs a step, {4 * (30 + 100 + 20)} as chosen")
