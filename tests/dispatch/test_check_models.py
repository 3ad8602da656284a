"""The joint check on models, losses and batches of other kinds: with routers, nested tensors, random numbers of their own, and
those that no check can be made with."""

from typing import Any

import pytest
import torch
from checked import BATCHES, SITES, loss
from plans import ROWWISE, batch, plan_for, tower
from torch import Tensor, nn

import loka
from loka.core.errors import InvalidInput
from loka.core.plan import Goal
from loka.dispatch.loss_change import LossChange

LIMITS = {"min_speedup": 0.0, "max_loss_change": 0.05, "repeats": 1}


@pytest.mark.parametrize("goal", Goal)
def test_of_random_numbers_that_are_not_put_back_no_plan_is_told(goal: Goal) -> None:
    own = torch.Generator().manual_seed(0)

    def loss(model: nn.Module, x: Tensor, generator: torch.Generator | None = own) -> Tensor:
        return 1 + model(x + torch.randn(x.shape, generator=generator)).square().mean()

    plan = plan_for(tower(), {"bottom": ROWWISE}, goal=goal)
    with pytest.raises(InvalidInput, match=r"loss of one batch is \S+ and then \S+ with nothing changed.*seed what it draws"):
        loka.check_plan(tower(), plan, [batch()], loss=loss, min_speedup=0.0, repeats=1)
    checked = loka.check_plan(tower(), plan, [batch()], loss=lambda model, x: loss(model, x, None), **LIMITS)
    assert checked.plan is plan


@pytest.mark.parametrize("later", [1.5, float("nan")])
def test_every_batch_must_give_the_same_again(later: float) -> None:
    seen: list[int] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(len(x))
        return 1 + model(x).square().mean() + (later if seen.count(8) > 1 else 0.0)

    plan = plan_for(tower(), {"bottom": ROWWISE}, goal=Goal.SERVING)
    with pytest.raises(InvalidInput, match="with nothing changed"):
        loka.check_plan(tower(), plan, [batch(), batch(8)], loss=loss, **LIMITS)
    assert seen == [40, 8, 40, 8]


class Routed(nn.Module):
    """Each row goes to one of four experts, by a router that rounding moves."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.router, self.head = nn.Linear(24, 40), nn.Linear(40, 4), nn.Linear(40, 1)
        self.experts = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.front(x).relu()
        scores = self.router(h)
        out = torch.zeros_like(h)
        for index, expert in enumerate(self.experts):
            mine = scores.argmax(-1) == index
            out[mine] = expert(h[mine]) * scores.softmax(-1)[mine, index, None]
        return self.head(out.tanh()).squeeze(-1)


@pytest.mark.parametrize("goal", Goal)
def test_experts_get_other_rows_when_their_router_is_rounded(goal: Goal) -> None:
    torch.manual_seed(0)
    model, x = Routed(), torch.randn(512, 24)
    plan = plan_for(model, dict.fromkeys(("front", *(f"experts.{index}" for index in range(4))), ROWWISE), goal=goal)
    rows: list[list[int]] = [[], []]
    for calls in rows:
        hooks = [one.register_forward_hook(lambda _, args, y, calls=calls: calls.append(len(y))) for one in model.experts]
        model(x)
        for hook in hooks:
            hook.remove()
        if not rows[1]:
            loka.apply_plan(model, plan)
    loka.restore(model)
    assert rows[0] != rows[1]
    checked = loka.check_plan(model, plan, [x], loss=lambda model, x: 1 + model(x).square().mean(), **LIMITS)
    assert len(checked.rounds) == 1
    assert checked.rounds[0].sites == 5


def test_calls_with_nested_tensors_make_no_error() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"front": nn.Linear(16, 16), "body": nn.Linear(16, 16), "head": nn.Linear(16, 1)})

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        jagged = torch.nested.nested_tensor_from_jagged(model["front"](x), torch.tensor([0, 5, 8, 20]))
        return 1 + model["head"](model["body"](jagged).values().relu()).square().mean()

    plan = plan_for(model, dict.fromkeys(("front", "body"), ROWWISE))
    checked = loka.check_plan(model, plan, [torch.randn(20, 16)], loss=loss, **LIMITS)
    assert checked.rounds[-1].sites == 2


def test_an_encoder_with_a_mask_is_checked_as_it_trains() -> None:
    """In eval mode torch passes its layers by, or hands them nested tensors, which run in high precision."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.ModuleDict({"encoder": nn.TransformerEncoder(layer, 1), "head": nn.Linear(16, 1)})
    mask, x = torch.arange(5) >= torch.tensor([5, 3, 2, 4])[:, None], torch.randn(4, 5, 16)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return 1 + model["head"](model["encoder"](x, src_key_padding_mask=mask)[:, :2]).square().mean()

    plan = plan_for(model, dict.fromkeys(("encoder.layers.0.linear1", "encoder.layers.0.linear2"), ROWWISE))
    checked = loka.check_plan(model, plan, [x], loss=loss, **LIMITS)
    high = loss(model, x).item()  # in train mode, without dropout
    loka.apply_plan(model, plan)
    change = loss(model, x).item() / high - 1
    assert abs(change) > 1e-5
    assert checked.baseline_loss == pytest.approx(high, rel=1e-6)
    assert checked.rounds[-1].change.whole == pytest.approx(change, rel=1e-2)
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_loss_that_has_surely_risen_is_told_though_rounding_costs_nothing() -> None:
    """It is linear in the logits, so that all of its change is of first order: here 1 on every batch."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 1)), batch(400)
    plan = plan_for(model, {"0": ROWWISE}, goal=Goal.SERVING)
    exact = model(x).mean().item()
    loka.apply_plan(model, plan)
    change = model(x).mean().item() - exact
    loka.restore(model)
    checked = loka.check_plan(model, plan, [x] * 4, loss=lambda model, x: 1 + (model(x).mean() - exact) / change, **LIMITS)
    assert checked.rounds[0].change == LossChange(*map(pytest.approx, (1.0, 1.0)), pytest.approx(0, abs=0.01))
    assert checked.given_back == ("0",)


def test_a_loss_that_runs_another_model_is_refused() -> None:
    """Nothing that a plan does would show in it."""
    other = tower()
    plan = plan_for(tower(), dict.fromkeys(SITES, ROWWISE))

    def of_the_other(model: nn.Module, x: Tensor) -> Tensor:
        return loss(other, x) + 0 * sum(parameter.sum() for parameter in model.parameters())

    with pytest.raises(InvalidInput, match=r"loss\(model, batch\) called neither the model"):
        loka.check_plan(tower(), plan, BATCHES, loss=of_the_other, repeats=1)


class InTrainingAlone(nn.Module):
    """Has a tower of its own for training, as one that learns from another loss has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.extra, self.head = nn.Linear(24, 32), nn.Linear(32, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        return self.head(self.extra(h).relu() if self.training else h)


@pytest.mark.parametrize("sites", [["extra"], ["first", "extra"]])
def test_planned_layers_that_the_batches_do_not_reach_are_no_error(sites: list[str]) -> None:
    plan = plan_for(InTrainingAlone(), dict.fromkeys(sites, ROWWISE))
    checked = loka.check_plan(InTrainingAlone(), plan, BATCHES, loss=loss, max_loss_change=0.0, min_speedup=0, repeats=1)
    assert set(checked.given_back) == {*sites} - {"extra"}


@pytest.mark.parametrize("one", [BATCHES[0], {"x": BATCHES[0]}, "batches.pt"])
def test_one_batch_that_is_no_list_of_them_is_refused(one: Any) -> None:
    with pytest.raises(InvalidInput, match="batches must be several, in a list or a loader, got one"):
        loka.check_plan(tower(), plan_for(tower(), {}), one, loss=loss)
    with pytest.raises(InvalidInput, match="max_loss_change must be at least 0, got -1"):
        loka.check_plan(tower(), plan_for(tower(), {}), BATCHES, loss=loss, max_loss_change=-1.0)


def test_a_model_a_part_of_which_is_planned_is_refused() -> None:
    """It would be taken for high precision."""
    model = tower()
    loka.apply_plan(model.top, plan_for(model.top, {"0": ROWWISE}))
    for call in (
        lambda: loka.check_plan(model, plan_for(tower(), {}), BATCHES, loss=loss),
        lambda: loka.apply_plan(model, plan_for(tower(), {"bottom": ROWWISE}), on_missing="high_precision"),
    ):
        with pytest.raises(InvalidInput, match=r"applied to a part of this model, top: loka\.restore that part first"):
            call()
    loka.restore(model.top)
    loka.apply_plan(model, plan_for(model, {"bottom": ROWWISE}))
