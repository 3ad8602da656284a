"""What a site's forward pass may go back to when a plan costs too much: less noise first, exact last, each where it pays."""

import torch
from planned_survey import BASELINE, baseline, candidate, error, site, survey

import loka
from loka.core.gemm import Role
from loka.core.plan import SitePlan
from loka.core.recipe import Transform

M = 100
EXACT = ("fp32", "fp32")


def planned(**fprop_us: float) -> SitePlan:
    """A site whose fprop could run on a (noisy), b (quiet), c (nearly as noisy), d (quiet, and centered) or e (half as noisy
    as the upper end of a's interval, but not as its mean), each in µs."""
    noise = {"a": 0.18, "b": 0.05, "c": 0.12, "d": 0.05, "e": 0.095}
    forward = [
        candidate(
            name, Role.FPROP, {M: us}, error=error(noise[name]), forms=EXACT,
            transform=Transform.CENTER if name == "d" else Transform.NONE,
        )
        for name, us in fprop_us.items()
    ]  # fmt: skip
    gradients = [candidate("g", role, {M: 10.0}, forms=EXACT) for role in (Role.DGRAD, Role.WGRAD)]
    gradients += [candidate("g", Role.WGRAD, {M: 10.0}, forms=EXACT, transform=Transform.CENTER)]
    candidates = (*baseline({role: {M: 60.0} for role in Role}), *forward, *gradients)
    return loka.make_plan(survey(site("s", candidates), vectors={"s/center": torch.ones(64)})).sites[0]


def finer(one: SitePlan) -> list[str]:
    return [forward.kernels[Role.FPROP].kernel for forward in one.finer]


def test_less_noise_comes_before_none() -> None:
    one = planned(a=10.0, b=20.0, c=15.0)
    assert one.kernels[Role.FPROP].kernel == "a"
    assert finer(one) == ["b", BASELINE]  # c is faster, but not half as noisy
    assert [forward.time_us for forward in one.finer] == [40.0, 80.0]
    assert {forward.kernels[Role.DGRAD].kernel for forward in one.finer} == {"g"}


def test_what_is_finer_must_be_faster_than_exact() -> None:
    assert finer(planned(a=10.0, b=61.0)) == [BASELINE]


def test_a_finer_forward_has_no_transform_of_its_own() -> None:
    assert finer(planned(a=10.0, d=12.0)) == [BASELINE]


def test_giving_back_goes_down_the_list() -> None:
    one = planned(a=10.0, b=20.0)
    quieter = one.with_finer_forward(BASELINE, "costs too much")
    exact = quieter.with_finer_forward(BASELINE, "still does")
    whole = exact.with_finer_forward(BASELINE, "and still")
    kernels = [{role: choice.kernel for role, choice in each.kernels.items()} for each in (quieter, exact, whole)]
    assert [each[Role.FPROP] for each in kernels] == ["b", BASELINE, BASELINE]
    assert [each[Role.WGRAD] for each in kernels] == ["g", "g", BASELINE]
    assert [refusal.kernel for refusal in quieter.refused if refusal.reason == "costs too much"] == ["a"]


def test_what_is_finer_has_half_of_the_mean_noise() -> None:
    assert finer(planned(a=10.0, e=12.0)) == [BASELINE]
