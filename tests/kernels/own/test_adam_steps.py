"""What ``measure`` times of casts in a step: both ways make the same step of Adam, and leave the weight where it is."""

import weakref
from functools import partial

import pytest
import torch

from loka.core.gemm import Role, SiteShape, TensorName
from loka.core.recipe import Format, Scaling
from loka.kernels.operand import Form, OperandSpec
from loka.measure.adam_steps import AdamSteps
from loka.measure.parts import Option, SiteParts, SiteTensors
from loka.measure.site_survey import _cast_times
from loka.measure.speed import NO_CAST, Speeds, TimedShape
from loka.measure.timing import Timing

ONE, ROWS = (OperandSpec(Format.E4M3, scaling, contraction_multiple=16) for scaling in (Scaling.TENSORWISE, Scaling.ROWWISE))
PLAIN, TRANS = (Form(ONE, transposed) for transposed in (False, True))


@pytest.fixture
def parts(where: torch.device, monkeypatch: pytest.MonkeyPatch) -> SiteParts:
    if where.type == "cpu":
        monkeypatch.setattr("loka.kernels.providers.triton.missing_triton", lambda device: None)
    return SiteParts(SiteTensors.random(SiteShape(32, 48, 64), torch.float32, where, copies=2))


@pytest.mark.parametrize("forms", [(PLAIN,), (TRANS,), (PLAIN, TRANS)])
def test_steps_are_torchs_and_casts_those_of_the_weight(forms: tuple[Form, ...], parts: SiteParts) -> None:
    assert parts.can_step(forms)
    weights, theirs = [weight_NK.clone() for weight_NK in parts.tensors.weights], AdamSteps(parts.tensors.weights[0], 2)
    for turn in range(2):
        for one, other in zip(parts._adam.of(turn), theirs.of(turn), strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                other.copy_(one)
    for turn in range(3):  # the third is the first weight's again
        parts.step(forms, turn)
    for turn in (0, 1, 2):  # torch steps both in the first turn, and in the third
        theirs.by_torch(turn)
    assert torch.equal(parts.tensors.weights[0], weights[0])
    assert torch.equal(parts.tensors.weights[1], weights[1])
    once, twice = theirs.of(1), theirs.of(0)
    torch.testing.assert_close(parts._adam.of(0).average, twice.average, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parts._adam.of(0).square, twice.square, rtol=1e-5, atol=1e-6)
    beta = 0.9  # the second weight was stepped by torch once more than by ours
    ours = parts._adam.of(1)
    torch.testing.assert_close(beta * ours.average + (1 - beta) * ours.gradient, once.average, rtol=1e-5, atol=1e-6)


def test_only_one_scale_for_all_is_cast_in_a_step(parts: SiteParts) -> None:
    rows = Form(ROWS, False)
    assert not parts.can_step((rows,))
    assert not parts.can_step((PLAIN, Form(ROWS, True)))
    assert not parts.can_step((Form(OperandSpec(Format.BF16), False),))


def test_what_is_added_is_the_difference_to_a_step_without_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    both, rows = (PLAIN, TRANS), (Form(ROWS, False),)
    planted = {NO_CAST: 100.0, (PLAIN,): 103.0, (TRANS,): "failed", both: 99.0}
    asked: list[tuple[Form, ...]] = []

    def time(self: Speeds, calls: dict[tuple[Form, ...], partial], shape: TimedShape) -> dict[tuple[Form, ...], float | str]:
        asked.extend(calls)
        return {forms: planted[forms] for forms in calls}

    monkeypatch.setattr(Speeds, "_time", time)
    monkeypatch.setattr(SiteParts, "can_step", lambda self, forms: forms != rows)
    speeds, sets = Speeds(torch.device("cpu")), [(PLAIN,), (TRANS,), both, rows]
    shape = TimedShape(SiteShape(16, 32, 32), Format.FP32, Format.FP32, has_bias=False, cast_in_step=True)
    expected = {(PLAIN,): 3.0, both: 0.0}
    assert speeds.in_step_us(sets, shape) == expected
    assert asked == [NO_CAST, (PLAIN,), (TRANS,), both]
    assert speeds.in_step_us([(PLAIN,), both], shape) == expected
    assert len(asked) == 4  # equal shapes are timed once
    behind = TimedShape(shape.shape, Format.FP32, Format.FP32, has_bias=False)
    assert speeds.in_step_us(sets, behind) == {}
    planted[NO_CAST] = "failed"
    assert Speeds(torch.device("cpu")).in_step_us(sets, shape) == {}


@pytest.mark.parametrize(("kind", "turns"), [("cuda", 9), ("cpu", 3)])
def test_every_copy_is_stepped_as_often_by_torch_as_with_casts(kind: str, turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []

    def time_together(calls: dict[str, partial], *_: object, turns: int, **__: object) -> dict[str, Timing]:
        timed.append(turns)
        return dict.fromkeys(calls, Timing(1.0, 1, 1, 1))

    three = SiteTensors.random(SiteShape(16, 32, 32), torch.float32, torch.device("cpu"), copies=3)
    monkeypatch.setattr("loka.measure.speed.time_together", time_together)
    monkeypatch.setattr(Speeds, "_make_parts", lambda self, shape: SiteParts(three))
    monkeypatch.setattr(SiteParts, "can_step", lambda self, forms: True)
    monkeypatch.setattr(SiteParts, "step", lambda self, forms, turn: None)
    shape = TimedShape(SiteShape(16, 32, 32), Format.FP32, Format.FP32, has_bias=False, cast_in_step=True)
    assert Speeds(torch.device(kind)).in_step_us([(PLAIN,)], shape) == {(PLAIN,): 0.0}
    assert timed == [turns]


def test_what_casts_add_to_a_step_is_timed_at_one_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def in_step_us(self: Speeds, sets: list[tuple[Form, ...]], shape: TimedShape) -> dict[tuple[Form, ...], float]:
        asked.append(shape.shape.m)
        return dict.fromkeys(sets, 1.0) if shape.shape.m > 8 else {}

    monkeypatch.setattr(Speeds, "in_step_us", in_step_us)
    monkeypatch.setattr(Speeds, "casts_us", lambda self, name, sets, shape: dict.fromkeys(sets, 5.0))
    options = [Option("reference.tensorwise", role) for role in Role]
    shapes = {m: TimedShape(SiteShape(m, 32, 32), Format.FP32, Format.FP32, has_bias=False) for m in (8, 16, 32)}
    casts, _ = _cast_times(options, {}, shapes, Speeds(torch.device("cpu")))
    assert asked == [8, 16]  # where it failed at one, at the next
    assert {cast.tensor: cast.in_step_us for cast in casts} == {
        TensorName.X: {}, TensorName.DY: {}, TensorName.W: {16: 1.0},
    }  # fmt: skip


def test_steps_take_memory_while_they_are_timed_and_no_longer(parts: SiteParts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a wide layer casts and steps take tens of gigabytes each: not at once, nor beside the tensors of other rows."""
    made: list[weakref.ref[SiteParts]] = []

    def time_together(self: Speeds, calls: dict[tuple[Form, ...], partial], shape: TimedShape) -> dict[tuple[Form, ...], float]:
        in_step = NO_CAST in calls
        for call in calls.values():
            call(0)
        (there,) = (kept for ref in made if (kept := ref()) is not None)
        assert (bool(there._held), bool(there._stepped)) == (not in_step, in_step)
        return dict.fromkeys(calls, 1.0)

    def make(self: Speeds, shape: TimedShape) -> SiteParts:
        fresh = SiteParts(parts.tensors)
        made.append(weakref.ref(fresh))
        return fresh

    monkeypatch.setattr(Speeds, "_time_together", time_together)
    monkeypatch.setattr(Speeds, "_make_parts", make)
    speeds, sets = Speeds(parts.tensors.x.device), [(PLAIN,), (PLAIN, TRANS), (Form(ROWS, False),)]
    shape = TimedShape(SiteShape(32, 48, 64), Format.FP32, Format.FP32, has_bias=False, cast_in_step=True)
    for _ in range(2):  # the second time for another site of the shape: everything is known
        assert len(speeds.casts_us(TensorName.W, sets, shape)) == 3
        assert speeds.in_step_us(sets, shape) == {(PLAIN,): 0.0, (PLAIN, TRANS): 0.0}
        assert len(made) == 2
        assert not any(ref() for ref in made)


def test_where_memory_is_short_the_times_of_steps_alone_are_lost(parts: SiteParts, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def too_many(self: AdamSteps, weight_NK: torch.Tensor, copies: int) -> None:
        asked.append(copies)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(AdamSteps, "__init__", too_many)
    monkeypatch.setattr(Speeds, "_make_parts", lambda self, shape: SiteParts(parts.tensors))
    speeds = Speeds(parts.tensors.x.device)
    shape = TimedShape(SiteShape(32, 48, 64), Format.FP32, Format.FP32, has_bias=False, cast_in_step=True)
    assert speeds.in_step_us([(PLAIN,)], shape) == {}
    assert asked
    asked.clear()
    assert speeds.in_step_us([(PLAIN,)], shape) == {}
    assert not asked  # nor is it tried again
    assert isinstance(speeds.casts_us(TensorName.W, [(PLAIN,)], shape)[PLAIN,], float)
