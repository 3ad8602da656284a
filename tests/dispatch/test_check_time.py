"""What the joint check times: steps with the casts of their weights, and plans that are slow as a whole give sites back."""

import statistics

import msgspec
import pytest
from checked import BATCHES, SITES, check
from plans import ROWWISE, plan_for, tower
from torch import nn

import loka
from loka.core.plan import Goal, Plan
from loka.core.progress import Lines
from loka.dispatch.plan_trial import Trial
from loka.dispatch.planned import PlannedLinear


def test_a_plan_that_is_slower_as_a_whole_gives_back_what_saves_least() -> None:
    plan = plan_for(tower(), dict.fromkeys(SITES, ROWWISE))
    saves = {"bottom": 30.0, "top.0": 10.0, "top.2": 20.0, "head": 0.0}
    sites = tuple(msgspec.structs.replace(site, time_us=100 - saves[site.site]) for site in plan.sites)
    slow = Plan(msgspec.structs.replace(plan.document, sites=sites), {})
    checked = check(slow, max_loss_change=1.0, min_speedup=1.2, repeats=3)  # float64 emulation is never that fast
    assert checked.given_back == ("top.0", "top.2", "bottom")
    assert checked.rounds[0].speedup < 1
    assert "ran" in next(site.reason for site in checked.plan.sites if site.site == "top.0")


def test_the_first_pass_of_each_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the plan and without it in turn: the first compiles, packs and allocates."""
    passes_us = iter([900.0, 50.0, 10.0, 30.0])
    monkeypatch.setattr("loka.dispatch.plan_trial.Trial._pass_us", lambda self: next(passes_us))
    (only,) = check(plan_for(tower(), {"bottom": ROWWISE}), max_loss_change=1.0).rounds
    assert only.speedup == 3.0


@pytest.mark.parametrize(
    ("speedups", "timed"),
    [
        ([1.3, 1.2, 1.4], 3),
        ([0.8, 0.75, 0.85], 3),
        ([0.9, 1.1, 1.3, 1.2, 1.2, 1.2], 6),
        ([0.9, 1.1, 0.8, 1.0, 1.2, 0.7, 0.9, 1.3, 0.95, 1.05, 1.0, 0.98], 12),
    ],
    ids=["fast", "slow", "fast, known later", "never known"],
)
def test_a_plan_is_timed_until_it_is_known_whether_it_is_fast_enough(
    speedups: list[float], timed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise alone gives no site back, as long as more turns can tell it from a plan that is too slow."""
    turns = iter([1.0, *speedups, *(99 * [1.0])])
    taken: list[float] = []

    def time_both(self: Trial, applied: object) -> tuple[float, float]:
        taken.append(next(turns))
        return 100.0, 100 * taken[-1]

    monkeypatch.setattr(Trial, "_time_both", time_both)
    first = check(plan_for(tower(), {"bottom": ROWWISE}), max_loss_change=1.0, min_speedup=1.0, repeats=3).rounds[0]
    assert taken == [1.0, *speedups][: 1 + timed]
    assert first.speedup == pytest.approx(statistics.median(speedups))


def test_it_shows_every_round_and_every_site_that_it_tries(capsys: pytest.CaptureFixture[str]) -> None:
    check(plan_for(tower(), dict.fromkeys(SITES, ROWWISE)), max_loss_change=1e-9, min_speedup=0.0, repeats=1, progress=Lines())
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("3 sites by the plan: loss ")
    assert [line.split("  ")[:2] for line in told[1:4]] == [[f"{n}/3", f"{site} by itself"] for n, site in enumerate(SITES, 1)]
    assert told[4].startswith("given back: ")
    assert told[-1].startswith("0 sites by the plan: ")


def test_what_a_step_casts_is_asked_once_a_pass_and_not_while_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in high precision would not pay for the answer, which takes as long as an optimizer has parameters."""
    now, asked = Trial._now, []
    monkeypatch.setattr("loka.dispatch.plan_trial.is_cast_in_step", lambda weight: bool(asked.append("asked")))
    monkeypatch.setattr(Trial, "_now", lambda self: (asked.append("now"), now(self))[1])
    check(plan_for(tower(), {"bottom": ROWWISE}), max_loss_change=1.0, repeats=1)
    assert asked == 2 * ["asked", "now", "now", "now", "now"]  # by the plan, and without it


def test_a_slow_plan_of_many_sites_takes_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled model is compiled in every one of them."""
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(16)), nn.Linear(24, 1))
    plan = plan_for(model, {str(index): ROWWISE for index in range(16)})
    sites = tuple(msgspec.structs.replace(site, time_us=100.0 - index) for index, site in enumerate(plan.sites))
    slow = Plan(msgspec.structs.replace(plan.document, sites=sites), {})
    monkeypatch.setattr(
        "loka.dispatch.plan_trial.Trial._speedup", lambda self, applied: 1.5 if len(applied.sites) <= 5 else 0.5
    )
    checked = loka.check_plan(model, slow, BATCHES, loss=lambda m, x: 1 + m(x).square().mean(), max_loss_change=1.0)
    assert [len(one.gave_back) for one in checked.rounds] == [4, 3, 3, 2, 0]
    assert checked.given_back == tuple(str(index) for index in range(12))  # what saves least went first
    assert sum(site.is_low_precision for site in checked.plan.sites) == 4


@pytest.mark.parametrize(("goal", "per_pass"), [(Goal.TRAINING, len(BATCHES)), (Goal.SERVING, 0)])
def test_a_training_step_pays_for_the_casts_of_weights(goal: Goal, per_pass: int, monkeypatch: pytest.MonkeyPatch) -> None:
    casts = []
    monkeypatch.setattr(PlannedLinear, "recast_after_step", lambda self: casts.append(self))
    plan = plan_for(tower(), {"bottom": ROWWISE}, goal=goal)
    check(plan, max_loss_change=1.0, repeats=4)
    assert len(casts) == (1 + 4) * per_pass  # high precision casts none
    monkeypatch.setattr("loka.dispatch.plan_trial.is_cast_in_step", lambda weight: True)
    check(plan, max_loss_change=1.0, repeats=4)
    assert len(casts) == 2 * (1 + 4) * per_pass  # no step can make its casts
    monkeypatch.setattr(PlannedLinear, "can_step", lambda self: True)
    check(plan, max_loss_change=1.0, repeats=4)
    assert len(casts) == 2 * (1 + 4) * per_pass


def test_a_step_casts_no_weight_of_two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    casts = []
    monkeypatch.setattr(PlannedLinear, "recast_after_step", lambda self: casts.append(self))
    monkeypatch.setattr(PlannedLinear, "can_step", lambda self: True)
    monkeypatch.setattr("loka.dispatch.plan_trial.is_cast_in_step", lambda weight: True)
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(3)), nn.Linear(24, 1))
    model[1].weight = model[0].weight
    plan, loss = plan_for(model, {str(index): ROWWISE for index in range(3)}), lambda m, x: 1 + m(x).square().mean()
    loka.check_plan(model, plan, BATCHES, loss=loss, max_loss_change=1.0, min_speedup=0, repeats=1)
    assert len(casts) == (1 + 1) * len(BATCHES) * 2  # of the two, and not of the third
