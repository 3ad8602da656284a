"""What users made of a planned layer, which would run it on when its place is another's."""

from collections.abc import Callable

import pytest
import torch
from plans import ROWWISE, Tower, batch, plan_for, tower
from torch import Tensor, nn
from torch.nn import functional as F

import loka
from loka.core.errors import InvalidInput, KernelUnavailable
from loka.core.plan import Goal
from loka.dispatch.apply import give_back
from loka.dispatch.frozen import FrozenLinear
from loka.dispatch.planned import PlannedLinear

SITES = {"bottom": ROWWISE, "top.0": ROWWISE}
WAYS_BACK = [loka.restore, lambda model: give_back(model, "bottom", "drifted")]


def planned(**options: Goal) -> Tower:
    model = tower()
    loka.apply_plan(model, plan_for(model, SITES, **options))  # type: ignore[arg-type]
    return model


def rel_error(y: Tensor, exact: Tensor) -> float:
    return float((y - exact).norm() / exact.norm())


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


@pytest.mark.usefixtures("fresh_compiler")
class TestALayerCompiledByItself:
    @pytest.mark.parametrize("leave", WAYS_BACK)
    def test_in_its_place_is_the_users_own_again(self, leave: Callable[[nn.Module], object]) -> None:
        model = planned()
        model.bottom.compile(backend="aot_eager")
        assert not torch.equal(model.bottom(batch()), linear(model.bottom, batch()))
        leave(model)
        assert type(model.bottom) is nn.Linear
        for _ in range(2):  # of weights as they are, and as they become
            assert torch.equal(model.bottom(batch()), linear(model.bottom, batch()))
            with torch.no_grad():
                model.bottom.weight.neg_()

    @pytest.mark.parametrize("leave", WAYS_BACK)
    def test_from_around_compiles_what_stands_there_now(self, leave: Callable[[nn.Module], object]) -> None:
        model = planned()
        model.bottom = torch.compile(model.bottom, backend="aot_eager")  # type: ignore[assignment]
        assert not torch.equal(model.bottom(batch()), linear(model.bottom, batch()))
        leave(model)
        assert type(model.bottom._orig_mod) is nn.Linear
        for _ in range(2):
            assert torch.equal(model.bottom(batch()), linear(model.bottom, batch()))
            with torch.no_grad():
                model.bottom.weight.neg_()

    def test_from_around_serves_the_frozen_one(self) -> None:
        model = planned(goal=Goal.SERVING).eval()
        model.bottom = torch.compile(model.bottom, backend="aot_eager")  # type: ignore[assignment]
        with torch.no_grad():
            model.bottom(batch())
            loka.freeze(model)
            assert isinstance(model.bottom._orig_mod, FrozenLinear)
            weight = -model.bottom.weight
            model.bottom._orig_mod.load_state_dict({"weight": weight, "bias": model.bottom.bias})
            assert rel_error(model.bottom(batch()), F.linear(batch(), weight, model.bottom.bias)) < 0.1

    def test_in_its_place_is_served(self) -> None:
        model = planned(goal=Goal.SERVING)
        model.bottom.compile(backend="aot_eager")
        loka.freeze(model)
        assert isinstance(model.bottom, FrozenLinear)
        assert model(batch()).isfinite().all()

    def test_before_the_plan_is_left_alone(self) -> None:
        model = tower()
        model.bottom.compile(backend="aot_eager")
        with pytest.raises(KernelUnavailable, match=r"bottom is compiled by itself.*compile the module around it"):
            loka.apply_plan(model, plan_for(model, SITES))
        applied = loka.apply_plan(model, plan_for(model, SITES), on_missing="high_precision")
        assert applied.sites == ("top.0",)
        assert torch.equal(model.bottom(batch()), linear(model.bottom, batch()))


@pytest.mark.parametrize("leave", [*WAYS_BACK, loka.freeze])
class TestIsRefused:
    def test_a_forward_put_on_it(self, leave: Callable[[nn.Module], object]) -> None:
        model = planned()
        old = model.bottom.forward
        model.bottom.forward = lambda x: 2 * old(x)  # type: ignore[method-assign]
        with pytest.raises(InvalidInput, match=r"bottom has got a forward of its own since.*del module\.forward"):
            leave(model)
        assert isinstance(model.bottom, PlannedLinear)
        del model.bottom.forward
        leave(model)
        assert not isinstance(model.bottom, PlannedLinear)

    @pytest.mark.parametrize("held", [lambda layer: layer.forward, lambda layer: [layer]])
    def test_another_way_to_it(self, leave: Callable[[nn.Module], object], held: Callable[[nn.Module], object]) -> None:
        model = planned()
        model.other = held(model.bottom)  # type: ignore[assignment]
        with pytest.raises(InvalidInput, match=r"bottom is to be replaced, and other, a plain .*, holds it too"):
            leave(model)
        assert [type(model.bottom), type(model.top[0])] == [PlannedLinear, PlannedLinear]
        del model.other
        leave(model)
        assert not isinstance(model.bottom, PlannedLinear)


@pytest.mark.parametrize("leave", [loka.restore, loka.freeze])
def test_of_a_part_that_was_planned_by_itself_the_part_is_asked_for(leave: Callable[[nn.Module], object]) -> None:
    part = planned()
    model = nn.Sequential(part, nn.Linear(1, 1))
    with pytest.raises(InvalidInput, match="but to a part of it, 0: give that part"):
        leave(model)
    leave(model[0])
    assert not isinstance(part.bottom, PlannedLinear)


def test_what_loka_holds_is_no_other_way_to_it() -> None:
    model = tower()
    model.probe = loka.Probe(model, every=1)  # type: ignore[assignment]
    with model.probe.step():
        model(batch()).mean().backward()
    record = model.probe.record()
    loka.apply_plan(model, plan_for(model, SITES))
    model.guard = loka.Guard(model, record)  # type: ignore[assignment]
    give_back(model, "bottom", "drifted")
    loka.restore(model)
    assert type(model.bottom) is type(model.top[0]) is nn.Linear


@pytest.mark.parametrize("stay", [lambda model: model.to("cpu"), lambda model: model.float()])
def test_a_graph_outlives_a_move_to_where_the_model_lies(stay: Callable[[nn.Module], object]) -> None:
    model, other = planned(), planned()
    for one in (model, other):
        loss = one(batch()).square().mean()
        if one is model:
            stay(model)
        loss.backward()
    assert torch.equal(model.bottom.weight.grad, other.bottom.weight.grad)  # type: ignore[arg-type]
    loss = model(batch()).square().mean()
    with torch.no_grad():
        model.top[0].weight.neg_()
    stay(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_symbols_are_not_traced_as_if_the_model_had_no_plan() -> None:
    model = tower()
    loka.apply_plan(model, plan_for(model, {"bottom": ROWWISE}))
    with pytest.raises(InvalidInput, match="cannot be traced by symbols: trace before apply_plan, or use"):
        torch.fx.symbolic_trace(model)
