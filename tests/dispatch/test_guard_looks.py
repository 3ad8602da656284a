"""Which rows of which calls the Guard looks at."""

import pytest
import torch
from guards import INT8, drifted, guarded, run, train_step
from plans import Tower, batch, plan_for
from torch import nn
from torch.utils.checkpoint import checkpoint

import loka
from loka.core.gemm import Role
from loka.dispatch.guard import MOST_CALLS, _pick
from loka.kernels.executor import SiteKernels


def test_one_example_whose_gradient_takes_a_tensors_whole_range_is_seen() -> None:
    """It lies among few of the rows by lot: what its scale does to all others shows by the row itself."""
    model, guard = guarded(SiteKernels("torch.fp32", "reference.tensorwise", "torch.fp32"), every=1, rows=32)
    healthy = [batch(2000, seed) for seed in range(3)]
    run(model, guard, healthy)
    assert guard.events == []
    weight_M1 = torch.ones(2000, 1)
    weight_M1[1234] = 1e7
    with guard.step():
        model.zero_grad()
        (model(healthy[0]).square() * weight_M1).mean().backward()
    assert {event.role for event in guard.events} == {Role.DGRAD}


TENSORWISE_DGRAD = SiteKernels("torch.fp32", "reference.tensorwise", "torch.fp32")


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_gradients_are_seen_under_checkpointing(use_reentrant: bool | None) -> None:
    """Which runs a site twice: one of the calls gets the gradient."""
    model, guard = guarded(TENSORWISE_DGRAD, every=1, rows=32)
    assert isinstance(model, Tower)
    one_large = torch.ones(2000, 1)
    one_large[1234] = 1e7
    with guard.step():
        x = model.bottom(batch(2000)).relu()
        y = model.top(x) if use_reentrant is None else checkpoint(model.top, x, use_reentrant=use_reentrant)
        (model.head(y).square() * one_large).mean().backward()
    assert ("top.0", Role.DGRAD) in [(event.site, event.role) for event in guard.events]


def test_every_call_of_a_step_is_looked_at() -> None:
    model, guard = guarded(every=1)
    with guard.step():
        for x in (drifted(batch(100)), batch(100), batch(17)):
            model(x).square().mean().backward()
        with torch.no_grad():
            model(batch(10))
    assert [event.site for event in guard.events] == ["bottom"]


def test_the_row_that_a_scale_hangs_on_is_among_those_looked_at() -> None:
    x_MK = torch.randn(10_000, 8)
    x_MK[7_777, 3] = -1e6
    for seed in range(5):
        picked = _pick(x_MK, 16, torch.Generator().manual_seed(seed))
        assert 7_777 in picked
        assert len(picked) == 17


@pytest.mark.parametrize("rows", [31, 32, 33, 34])
def test_so_is_the_row_that_a_gradients_scale_hangs_on(rows: int) -> None:
    """Whichever rows of x are taken: with one row more than are looked at, those are as many as the batch has."""
    for large in range(0, rows, 5):
        model, guard = guarded(SiteKernels("torch.fp32", "reference.tensorwise", "torch.fp32"), every=1, rows=32)
        weight_M1 = torch.ones(rows, 1)
        weight_M1[large] = 1e7
        with guard.step():
            (model(batch(rows)).square() * weight_M1).mean().backward()
        assert {event.role for event in guard.events} == {Role.DGRAD}


def test_calls_that_do_not_train_are_judged_only_where_none_does() -> None:
    model, guard = guarded(every=1)
    with guard.step():
        with torch.no_grad():
            model(drifted(batch(100)))  # an evaluation within the step
        train_step(model, batch(100))
    assert guard.events == []
    with guard.step(), torch.no_grad():
        model(drifted(batch(100)))
    assert [event.site for event in guard.events] == ["bottom"]


def test_of_many_calls_the_first_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, guard = guarded(every=1)
    kept: list[int] = []
    monkeypatch.setattr(guard, "_check", lambda seen: kept.extend(map(len, seen.values())))
    with guard.step():
        for _ in range(MOST_CALLS + 5):
            model(batch(20)).sum().backward()
        model(batch(0)).sum().backward()
    assert kept == [MOST_CALLS, MOST_CALLS]


def test_an_empty_batch_is_nothing_to_judge() -> None:
    model, guard = guarded(every=1)
    with guard.step():
        model(batch(0)).sum().backward()
    assert guard.events == []


def test_calls_inside_of_a_vmap_are_not_looked_at() -> None:
    model, guard = guarded(every=1)
    with guard.step(), torch.no_grad():
        torch.vmap(model)(torch.stack([batch(8, seed) for seed in range(3)]))
    assert guard.events == []


def test_gradients_of_outputs_that_are_written_in_place_are_guarded() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(inplace=True), nn.Linear(32, 1))
    x = torch.randn(16, 3, 24)
    probe = loka.Probe(model, every=1)
    with probe.step():
        model(x).square().mean().backward()
    loka.apply_plan(model, plan_for(model, {"0": INT8}))
    guard = loka.Guard(model, probe.record(), every=1, max_error={Role.WGRAD: 1e-9, Role.FPROP: 1e9, Role.DGRAD: 1e9})
    with guard.step():
        model(x).square().mean().backward()
    assert [(event.site, event.role) for event in guard.events] == [("0", Role.WGRAD)]
