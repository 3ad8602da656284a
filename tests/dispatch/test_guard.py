"""The Guard: trips on data that 8 bits no longer hold, and on nothing else."""

import dataclasses
import logging
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from emulated_block import emulate
from guards import INT8, drifted, guarded, record_of, run, train_step
from plans import batch, plan_for, tower
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import loka
from loka.core.errors import InvalidInput
from loka.core.gemm import Role
from loka.core.plan import BlockPlan
from loka.core.recipe import Format, Scaling, Transform
from loka.dispatch.drift import Cast, SiteCasts, feature_energy, predicted_errors
from loka.dispatch.guard import GuardEvent
from loka.dispatch.planned import PlannedLinear
from loka.dispatch.swap import applied_to
from loka.kernels.executor import SiteKernels
from loka.numerics.metrics import mere_floored


def test_it_trips_within_two_checks_and_returns_the_site_once(caplog: pytest.LogCaptureFixture) -> None:
    model, guard = guarded(every=5)
    healthy = [batch(100, seed) for seed in range(20)]
    run(model, guard, healthy)
    assert guard.events == []
    with caplog.at_level(logging.WARNING, logger="loka"):
        run(model, guard, [drifted(x) for x in healthy])
    assert [event.site for event in guard.events] == ["bottom"]
    (event,) = guard.events
    assert event.step <= 20 + 2 * 5
    assert event.error > event.bound > event.recorded_error
    assert event.bound == pytest.approx(1.5 * 0.2)
    assert type(model.bottom) is nn.Linear
    assert isinstance(model.top[0], PlannedLinear)  # behind the drift, its own input is as large but even
    assert len(caplog.records) == 1
    assert "bottom goes back to high precision" in caplog.text
    assert "compiles again" in caplog.text
    loka.restore(model)
    assert type(model.top[0]) is nn.Linear


def test_it_sees_inputs_that_are_given_by_name() -> None:
    model, guard = guarded(every=1)
    with guard.step():
        model.bottom(input=drifted(batch(100)))
    assert [event.site for event in guard.events] == ["bottom"]


def test_what_a_dynamic_scale_takes_in_its_stride_trips_nothing() -> None:
    model, guard = guarded(every=1)
    run(model, guard, [1000 * batch(100, 7), 0.001 * batch(100, 8)])
    model, fp8 = guarded(SiteKernels.same("reference.rowwise"), every=1)
    run(model, fp8, [drifted(batch(100, 9))])  # ten binades, and e4m3 has fifteen
    assert guard.events == fp8.events == []


def test_nan_is_past_every_bound_where_it_stays() -> None:
    """Of one batch, which a loop may skip, it says nothing of the layers."""
    model, guard = guarded(every=10)
    x = batch(100)
    x[3, 3] = torch.nan
    run(model, guard, [x, batch(100), x, x])
    assert guard.events == []
    run(model, guard, [batch(100)] * 6)
    run(model, guard, [x, x])
    assert [(event.step, event.site) for event in guard.events] == [(11, "bottom"), (11, "top.0")]


@pytest.mark.parametrize("first", [True, False])
def test_nan_in_one_call_of_a_step_is_not_made_up_for_by_another(first: bool) -> None:
    model, guard = guarded(every=1)
    x = batch(100)
    x[3, 3] = torch.nan
    for _ in range(2):
        with guard.step():
            for one in (x, batch(100)) if first else (batch(100), x):
                train_step(model, one)
    assert {event.site for event in guard.events} == {"bottom", "top.0"}
    assert all(math.isnan(event.error) for event in guard.events)


def test_between_checks_nothing_is_on_the_model() -> None:
    model, guard = guarded(every=3)
    hooks = []
    model.bottom.register_forward_pre_hook(lambda module, _: hooks.append(len(module._forward_hooks)))
    run(model, guard, [batch(50)] * 6)
    assert hooks == [1, 0, 0, 1, 0, 0]
    assert not model.bottom._forward_hooks


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_is_guarded_and_compiled_again() -> None:
    model = tower()
    record = record_of(model)
    loka.apply_plan(model, plan_for(model, {"bottom": SiteKernels("onednn.int8", "torch.fp32", "torch.fp32")}))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    guard = loka.Guard(compiled, record, every=2)
    run(compiled, guard, [batch(64), batch(64), drifted(batch(64)), drifted(batch(64))])
    assert [event.step for event in guard.events] == [2]
    assert type(model.bottom) is nn.Linear
    torch.testing.assert_close(compiled(batch(64)), model(batch(64)))


@pytest.mark.parametrize("transform", Transform)
@pytest.mark.parametrize("fprop", ["reference.rowwise", "reference.static"])
def test_predicted_errors_are_those_of_the_executor(fprop: str, transform: Transform) -> None:
    """Against casts and GEMMs that really run, at every role, on features of different sizes."""
    torch.manual_seed(0)
    scale_K = torch.exp2(torch.arange(48).remainder(7) - 3.0)
    x, dy = (scale_K * (1 + torch.randn(64, 48))).requires_grad_(), 1e-3 * torch.randn(64, 32)
    kernels = SiteKernels(fprop, "reference.tensorwise_e5m2", "reference.blockwise")
    vector_K = None if transform is Transform.NONE else scale_K
    module = loka.LokaLinear.from_linear(nn.Linear(48, 32, bias=False), kernels, transform, vector_K)
    w = module.weight.detach()
    y = module(x)
    y.backward(dy)
    errors = predicted_errors(SiteCasts.of(module.executor), x.detach(), dy, w, vector_K, None)
    assert x.grad is not None
    assert module.weight.grad is not None
    expected = {
        Role.FPROP: mere_floored(y.detach(), x.detach() @ w.t(), axis=1),
        Role.DGRAD: mere_floored(x.grad, dy @ w, axis=1),
        Role.WGRAD: mere_floored(module.weight.grad, dy.t() @ x.detach(), axis=0),
    }
    assert {role: float(error) for role, error in errors.items()} == pytest.approx(
        {role: float(error) for role, error in expected.items()}, rel=1e-3
    )


def test_a_feature_that_is_flushed_counts_with_its_share_of_the_record() -> None:
    """Half the recorded output comes from features that int8 flushes once the others have grown: √½ of it is lost."""
    cast = Cast(Format.INT8, Scaling.ROWWISE)
    x, w = torch.randn(256, 8), torch.ones(4, 8)
    energy = feature_energy(x, w, Transform.NONE, None)
    assert energy.sum() == pytest.approx(1)
    assert energy[:4].sum() == pytest.approx(0.5, abs=0.1)
    grown = torch.cat([1e6 * x[:, :4], x[:, 4:]], 1)
    errors = predicted_errors(SiteCasts({Role.FPROP: (cast, cast)}), grown, None, w, None, energy)
    assert float(errors[Role.FPROP]) == pytest.approx(float(energy[4:].sum().sqrt()), abs=0.02)
    without = predicted_errors(SiteCasts({Role.FPROP: (cast, cast)}), grown, None, w, None, None)
    assert without[Role.FPROP] < 0.05  # the output alone does not show it


def test_a_features_share_is_that_of_the_output_which_it_makes() -> None:
    """E[x²]·‖w‖² of it, whatever it is multiplied by on one side and divided by on the other."""
    x, w = torch.tensor([[1.0, -2.0], [1.0, 2.0]]), torch.tensor([[3.0, 1.0], [4.0, 0.0]])
    for transform, vector in ((Transform.NONE, None), (Transform.RESCALE, torch.tensor([4.0, 0.5]))):
        energy = feature_energy(x, w, transform, vector)
        torch.testing.assert_close(energy, torch.tensor([1 * 25.0, 4 * 1.0]) / 29)
    centered = feature_energy(x, w, Transform.CENTER, torch.tensor([0.5, 0.0]))
    torch.testing.assert_close(centered, torch.tensor([0.25 * 25.0, 4 * 1.0]) / 10.25)


def test_a_blocks_input_is_judged_as_wgrad_reads_it() -> None:
    """One row a million times as large: row scales do not notice, and one scale for all flushes every other row."""
    x, w = torch.randn(256, 32), torch.randn(16, 32)
    energy = feature_energy(x, w, Transform.NONE, None)
    sound = predicted_errors(SiteCasts.of_block(), x, None, w, None, energy)
    assert 0.01 < float(sound[Role.WGRAD]) < 0.05
    grown = x.clone()
    grown[3, 5] = 1e6
    errors = predicted_errors(SiteCasts.of_block(), grown, None, w, None, energy)
    assert float(errors[Role.FPROP]) < 0.2
    assert float(errors[Role.WGRAD]) > 0.9


@pytest.mark.parametrize("transform", [Transform.CENTER, Transform.RESCALE])
def test_a_site_whose_x_is_changed_in_front_of_its_cast_is_guarded_too(transform: Transform) -> None:
    """Features around 3, which is nothing to either of them: no check trips on what the Record knows."""
    model = tower()
    probe = loka.Probe(model, every=1)
    with probe.step():
        train_step(model, 3 + batch(200))
    record = probe.record()
    vector_K = record.sites["bottom"].mean_K if transform is Transform.CENTER else record.sites["bottom"].rescale_K
    vectors = {f"bottom/{transform}": vector_K.bfloat16().float()}
    loka.apply_plan(model, plan_for(model, {"bottom": SiteKernels.same("reference.rowwise")}, vectors=vectors))
    guard = loka.Guard(model, record, every=1)
    run(model, guard, [3 + batch(200, seed) for seed in range(2, 5)])
    assert guard.events == []


def test_what_a_norm_bounds_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain's first block reads its norm's codes: a drift in front of it trips nothing, and nothing waits for it."""
    emulate(monkeypatch)
    torch.manual_seed(0)
    model = nn.Sequential(loka.BlockNorm(24), nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    record = record_of(model)
    assert record.sites["1"].entry == "0"
    blocks = {"1": BlockPlan("triton.block", None, "2", entry="0"), "3": BlockPlan("triton.block", None, "4")}
    loka.apply_plan(model, plan_for(model, blocks))
    guard = loka.Guard(model, record, every=1)
    assert list(guard._sites) == ["3"]
    run(model, guard, [1e4 * batch()])
    assert not guard.events


def test_mistakes_get_a_message() -> None:
    model = tower()
    record = record_of(model)
    with pytest.raises(InvalidInput, match="no plan is applied"):
        loka.Guard(model, record)
    loka.apply_plan(model, plan_for(model, {"bottom": INT8}))
    with pytest.raises(InvalidInput, match="every must be a whole number, at least 1, got 0"):
        loka.Guard(model, record, every=0)
    for wrong in (-1, "0.1", {"fprop": -1}, {"forward": 0.1}):
        with pytest.raises(InvalidInput, match="max_error must be a number above 0, or one for each of fprop, dgrad, wgrad"):
            loka.Guard(model, record, max_error=wrong)
    plan_limit = loka.Guard(model, record).bounds[Role.WGRAD]
    assert loka.Guard(model, record, max_error={Role.FPROP: 0.4}).bounds[Role.FPROP] == 0.4
    assert loka.Guard(model, record, max_error={"fprop": 0.4}).bounds[Role.WGRAD] == plan_limit
    other = nn.Sequential(nn.Linear(24, 2))
    with pytest.raises(InvalidInput, match="the record is of another model"):
        loka.Guard(model, record_of(other))


def test_a_batch_whose_gradients_are_no_numbers_is_asked_once_more() -> None:
    model, guard = guarded(every=100)
    with guard.step():
        (model(batch(50)).sum() * torch.inf).backward()  # which a training loop skips
    assert guard.events == []
    run(model, guard, [batch(50)])
    assert guard.events == []
    run(model, guard, [batch(50)] * 98)
    for _ in range(2):
        with guard.step():
            (model(batch(50)).sum() * torch.inf).backward()
    assert {event.site for event in guard.events} == {"bottom", "top.0"}


def test_a_guard_of_a_plan_that_is_gone_says_so() -> None:
    model, guard = guarded(every=1)
    plan = applied_to(model)
    assert plan is not None
    loka.restore(model)
    loka.apply_plan(model, plan.plan)
    with pytest.raises(InvalidInput, match="make a new Guard"), guard.step():
        pass


def test_errors_are_the_same_inside_autocast() -> None:
    _, guard = guarded(every=1)
    watched = guard._sites["bottom"]
    x, dy = batch(64), torch.randn(64, 32)
    outside = watched.errors(x, dy)
    with torch.autocast("cpu", torch.bfloat16):
        inside = watched.errors(x, dy)
    assert {role: float(error) for role, error in inside.items()} == {role: float(error) for role, error in outside.items()}


@pytest.mark.parametrize("change", [parametrizations.weight_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)])
@pytest.mark.parametrize("guarded_first", [False, True])
def test_a_layer_that_is_parametrized_or_pruned_later_is_left_alone(
    guarded_first: bool, change: Callable[[nn.Module], object]
) -> None:
    """It runs in high precision; the others are watched."""
    model, guard = guarded(every=1, max_error=1e-9)
    change(model.bottom)
    if not guarded_first:
        guard = loka.Guard(model, record_of(tower()), every=1, max_error=1e-9)
    run(model, guard, [batch(100)])
    assert [event.site for event in guard.events] == ["top.0"]


def test_what_a_user_has_put_on_a_layer_is_not_lost_when_it_drifts() -> None:
    model, guard = guarded(every=1)
    model.bottom.register_buffer("gain", torch.full((), 2.0))
    for _ in range(2):  # it goes on watching
        with pytest.raises(InvalidInput, match="bottom holds gain too"):
            run(model, guard, [drifted(batch(100))])
    assert (guard.events, float(model.bottom.gain)) == ([], 2.0)


def test_a_site_that_is_called_in_turns_with_another_is_given_back_too() -> None:
    """Its NaN is decided by its own next call; and a doubt that no call follows is dropped after as many steps."""

    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(24, 32), nn.Linear(24, 32)

        def forward(self, x: Tensor, turn: str = "a") -> Tensor:
            return getattr(self, turn)(x)

    torch.manual_seed(0)
    model, bad = Turns(), torch.full((40, 24), torch.nan)
    probe = loka.Probe(model, every=1)
    for turn in "ab":
        with probe.step():
            model(batch(), turn).square().mean().backward()
    loka.apply_plan(model, plan_for(model, dict.fromkeys("ab", INT8)))
    guard = loka.Guard(model, probe.record(), every=5)
    for x, turn in ((bad, "a"), (batch(), "b"), (bad, "a")):
        with guard.step():
            model(x, turn).square().mean().backward()
    assert [event.site for event in guard.events] == ["a"]
    guard.resume(5, ())
    for turn, is_doubted in (("b", True), *(("a", step < 4) for step in range(5))):
        with guard.step():
            model(bad if turn == "b" else batch(), turn).square().mean().backward()
        assert bool(guard._doubtful) is is_doubted
    assert [event.site for event in guard.events] == ["a"]


def test_nobody_doubts_a_site_that_was_given_back() -> None:
    """Every step would be a check."""
    model, guard = guarded(every=100)
    bad = batch().clone()
    bad[0] = torch.nan
    for x, has_backward in ((bad, True), (bad, False)):  # as of a loop that skips a loss that is no number
        with guard.step():
            loss = model(x).square().mean()
            if has_backward:
                loss.backward()
    assert guard.events
    assert not guard._doubtful


def test_what_a_guard_found_is_loaded_by_a_process_that_knows_it_not(tmp_path: Path) -> None:
    """It is loaded with weights_only, before the Guard is made."""
    model, guard = guarded(max_error=1e-9, every=1)
    with guard.step():
        train_step(model, batch())
    assert guard.events
    torch.save({"guard": guard.state_dict()}, tmp_path / "checkpoint.pt")
    script = f"import torch, loka; print(torch.load({str(tmp_path / 'checkpoint.pt')!r})['guard']['steps_seen'])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    _, again = guarded(max_error=1e-9, every=1)
    again.load_state_dict(torch.load(tmp_path / "checkpoint.pt")["guard"])
    assert (again.steps_seen, again.events) == (1, guard.events)


def test_a_resumed_guard_counts_on() -> None:
    model, guard = guarded(every=5)
    guard.resume(7, [])
    assert guard.steps_seen == 7
    checks: list[int] = []
    guard._check = lambda seen: checks.append(guard.steps_seen - 1)  # type: ignore[method-assign]
    run(model, guard, [batch(20)] * 5)
    assert checks == [10]


def test_a_resumed_guard_looks_at_the_rows_that_it_would_have_looked_at() -> None:
    errors = []
    for steps_before in (0, 2):
        model, guard = guarded(every=1, rows=16)
        guard.resume(steps_before, ())
        run(model, guard, [batch(300, 0), batch(300, 1), drifted(batch(300, 2))][steps_before:])
        errors.append([(event.step, event.error) for event in guard.events])
    assert len(errors[0]) == 1
    assert errors[0] == errors[1]


def test_what_is_no_state_of_a_guard_is_refused() -> None:
    _, guard = guarded()
    for state in ({}, {"events": []}, None):
        with pytest.raises(InvalidInput, match="give what its state_dict"):
            guard.load_state_dict(state)


def test_a_guard_is_resumed_with_its_own_events_once() -> None:
    _, guard = guarded(every=5)
    site = next(iter(guard._sites))
    event = GuardEvent(3, site, Role.FPROP, 1.0, 0.1, 0.2)
    with pytest.raises(InvalidInput, match="nowhere is no site of the plan that is applied"):
        guard.resume(7, [event, dataclasses.replace(event, site="nowhere")])
    assert guard.steps_seen == 0
    assert guard.events == []
    unknown = dataclasses.replace(event, error=math.nan, step=4)
    for _ in range(2):
        guard.resume(7, [event, event, unknown])
    assert [told.step for told in guard.events] == [3, 4]
