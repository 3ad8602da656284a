"""Which forward passes go back where rounding costs too much: the least time for the cost that must go."""

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from loka.core.gemm import Role
from loka.core.plan import Choice, FinerForward, SitePlan
from loka.dispatch.give_back import too_costly, too_slow
from loka.dispatch.loss_change import LossChange


def site(name: str, saves_us: float, exact_saves_us: float | None = None) -> SitePlan:
    """That saves so much of 1,000 µs, and with its forward pass in high precision still so much, or nothing."""
    kernels = {role: Choice("reference.rowwise", "") for role in Role}
    finer = () if exact_saves_us is None else (FinerForward(kernels, 1000.0, 1000.0 - exact_saves_us),)
    return SitePlan(name, 64, 64, kernels, 1000.0, 1000.0 - saves_us, "", finer=finer)


def cost(value: float) -> LossChange:
    return LossChange(value, value, value)


def test_what_saves_much_stays_though_it_costs_most() -> None:
    sites = [site("large", 500.0), site("small", 5.0), site("tiny", 1.0)]
    alone = {"large": cost(4e-5), "small": cost(2e-5), "tiny": cost(3e-5)}
    assert too_costly(sites, alone, cost(9e-5), limit=5e-5) == ("tiny", "small")
    assert too_costly(sites, alone, cost(9e-5), limit=6.1e-5) == ("tiny",)


def test_only_what_the_forward_pass_saves_counts() -> None:
    sites = [site("gradients alone are worth it", 500.0, 499.0), site("forward is", 50.0)]
    alone = dict.fromkeys((one.site for one in sites), cost(4e-5))
    assert too_costly(sites, alone, cost(8e-5), limit=5e-5) == ("gradients alone are worth it",)


def test_a_block_is_taken_from_its_own_baseline() -> None:
    """It saves 300 of 1,500 µs with its norm, and without being a block 250 of 1,000: 50 by its forward pass."""
    block = msgspec.structs.replace(site("block", 0.0, 250.0), baseline_us=1500.0, time_us=1200.0)
    sites = [block, site("layer", 100.0)]
    alone = dict.fromkeys(("block", "layer"), cost(4e-5))
    assert too_costly(sites, alone, cost(8e-5), limit=5e-5) == ("block",)


def test_what_the_whole_costs_more_is_shared_out() -> None:
    sites = [site("a", 3.0), site("b", 2.0), site("c", 1.0)]
    alone = dict.fromkeys("abc", cost(1e-5))
    assert too_costly(sites, alone, cost(3e-5), limit=2e-5) == ("c",)
    assert too_costly(sites, alone, cost(6e-5), limit=2e-5) == ("b", "c")
    assert too_costly(sites, alone, cost(6e-5), limit=1.9e-5) == ("a", "b", "c")


def test_what_breaks_the_loss_goes_by_itself() -> None:
    sites = [site("a", 3.0), site("b", 2.0)]
    assert too_costly(sites, {"a": cost(math.nan), "b": cost(1e-3)}, cost(math.nan), limit=1e-5) == ("a",)
    assert too_costly(sites, {"a": cost(1e-3), "b": cost(2e-3)}, cost(math.nan), limit=1e-5) == ("b",)
    assert too_costly(sites, {"a": cost(0.0), "b": cost(-1e-9)}, cost(1e-3), limit=1e-5) == ("a",)


@given(
    sites=st.lists(st.tuples(st.floats(0, 1e-3), st.floats(-10, 1e4)), min_size=1, max_size=12),
    more=st.floats(0.5, 4),
    limit=st.floats(0, 1e-3),
)
def test_some_go_and_the_rest_is_within_the_limit(sites: list[tuple[float, float]], more: float, limit: float) -> None:
    costs = {str(index): one for index, (one, _) in enumerate(sites)}
    whole = max(more * sum(costs.values()), 1.001 * limit + 1e-12)
    plans = [site(str(index), saves) for index, (_, saves) in enumerate(sites)]
    gone = too_costly(plans, {name: cost(one) for name, one in costs.items()}, cost(whole), limit)
    assert gone
    assert list(gone) == sorted(gone, key=lambda name: -costs[name])
    kept = sum(costs[name] for name in costs if name not in gone)
    if len(gone) > 1:
        assert max(1.0, whole / sum(costs.values())) * kept <= limit * (1 + 1e-9)


def test_one_large_site_may_be_worth_more_than_all_that_are_cheap() -> None:
    sites = [site("large", 40.0), site("cheap", 2.0), site("cheaper", 1.0)]
    alone = {"large": cost(5e-5), "cheap": cost(2e-6), "cheaper": cost(5e-7)}  # by what they save for it, the cheap ones first
    assert too_costly(sites, alone, cost(5.25e-5), limit=5e-5) == ("cheap", "cheaper")


def test_what_lowers_the_loss_pays_for_nobody_else() -> None:
    """By chance on these batches: it is free, and the room it leaves is the limit's."""
    sites = [site(name, saves) for name, saves in (("a", 4.0), ("b", 3.0), ("c", 2.0), ("lucky", 1.0))]
    alone = {**dict.fromkeys("abc", cost(4e-5)), "lucky": cost(-4e-5)}
    assert too_costly(sites, alone, cost(9e-5), limit=5e-5) == ("b", "c")


def test_what_cancels_in_the_whole_still_counts_by_itself() -> None:
    sites = [site("a", 3.0), site("b", 2.0), site("c", 1.0)]
    alone = dict.fromkeys("abc", cost(4e-5))
    assert too_costly(sites, alone, cost(6e-5), limit=5e-5) == ("b", "c")


def test_of_a_slow_plan_a_quarter_of_the_sites_goes_those_that_save_least() -> None:
    sites = [site(name, saves) for name, saves in (("a", 40.0), ("b", 10.0), ("c", 30.0), ("d", 20.0), ("e", 50.0))]
    assert too_slow(sites) == ("b", "d")
    assert too_slow(sites[:4]) == ("b",)
    assert too_slow(sites[:1]) == ("a",)
