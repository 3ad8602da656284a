"""What the joint check leaves as it was: the model, gradients, random numbers, optimizers."""

import random
from typing import Any

import pytest
import torch
from checked import BATCHES, SITES, check, loss
from plans import ROWWISE, batch, plan_for, tower
from torch import Tensor, nn

import loka
from loka.dispatch.swap import applied_to


def test_the_model_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 1)).train()
    model[3].eval()
    model(batch()).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradient = model[0].weight.grad
    plan = plan_for(model, {"0": ROWWISE})
    random = torch.get_rng_state()
    loka.check_plan(model, plan, BATCHES, loss=lambda m, x: m(x).square().mean(), max_loss_change=1.0, min_speedup=0, repeats=1)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[0].weight.grad is gradient
    assert (model[0].training, model[3].training) == (True, False)
    assert applied_to(model) is None
    assert type(model[0]) is nn.Linear


class Counting(nn.Module):
    """Keeps what every pass changes: a buffer that is assigned, and plain attributes. What it computes hangs on them."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = nn.Linear(24, 32), nn.Linear(32, 1)
        self.register_buffer("mean", torch.zeros(32))
        self.passes, self.log = 0, []

    def forward(self, x: Tensor) -> Tensor:
        h = self.lower(x)
        self.mean = 0.5 * self.mean + 0.5 * h.detach().mean(0)
        self.passes += 1
        self.log.append(self.passes)
        return self.upper((h - self.mean).relu() * 0.9**self.passes)


def test_every_pass_begins_where_the_model_was() -> None:
    """In two states even the plan without a site would have another loss than high precision, and healthy sites go."""
    torch.manual_seed(0)
    model = Counting()
    mean = model.mean
    plan = plan_for(model, {"lower": ROWWISE, "upper": ROWWISE})
    checked = loka.check_plan(
        model, plan, BATCHES, loss=lambda m, x: (m(x) - 1).square().mean(), max_loss_change=0.05, min_speedup=0, repeats=1
    )
    assert (checked.given_back, len(checked.rounds)) == ((), 1)
    assert checked.rounds[0].gradients is not None
    assert checked.rounds[0].gradients.error < 0.2
    none = plan.giving_back({"lower": "", "upper": ""})
    exact = loka.check_plan(model, none, BATCHES, loss=lambda m, x: (m(x) - 1).square().mean(), repeats=1)
    assert (exact.rounds[0].change.whole, exact.rounds[0].change.rounding) == (0.0, 0.0)
    assert (model.passes, model.log) == (0, [])
    assert model.mean is mean
    assert not mean.any()


@pytest.mark.parametrize("had_gradients", [False, True])
def test_what_lies_in_front_of_the_model_keeps_its_gradients_too(had_gradients: bool) -> None:
    """Left to add up over the passes, those of a sparse table took gigabytes, slowed the passes down, and were learned from."""
    table = nn.Embedding(50, 24, sparse=True)
    if had_gradients:
        table(torch.tensor([3, 4])).sum().backward()
    before = table.weight.grad
    largest = 0

    def through_a_table(model: nn.Module, ids: Tensor) -> Tensor:
        nonlocal largest
        held = table.weight.grad
        largest = max(largest, 0 if held is None else held._nnz())
        return 1 + model(table(ids)).square().mean()

    ids = [torch.randint(50, (16,), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    plan = plan_for(tower(), dict.fromkeys(SITES, ROWWISE))
    loka.check_plan(tower(), plan, ids, loss=through_a_table, max_loss_change=1.0, min_speedup=0.0)
    assert largest <= 2, "gradients added up from batch to batch"
    assert table.weight.grad is before


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.variable = 2  # what torch calls the leaf of its own nodes
        return x / ctx.variable

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / ctx.variable


def test_a_table_that_only_some_batches_reach_keeps_its_gradients() -> None:
    tables = [nn.Embedding(50, 24) for _ in range(2)]

    def through_its_table(model: nn.Module, which: int) -> Tensor:
        return 1 + _Halved.apply(model(tables[which](torch.arange(16)))).square().mean()

    plan = plan_for(tower(), {"top.0": ROWWISE})
    loka.check_plan(tower(), plan, [0, 1], loss=through_its_table, max_loss_change=1.0, min_speedup=0.0, repeats=1)
    assert [table.weight.grad for table in tables] == [None, None]


def test_what_the_loss_draws_is_the_same_in_every_pass() -> None:
    """Negatives by lot, say: three passes with different ones would tell how those differ, and not what rounding costs."""

    def drawing(model: nn.Module, x: Tensor) -> Tensor:
        return loss(model, x + torch.randn_like(x) + random.random())

    plan = plan_for(tower(), dict.fromkeys(SITES, ROWWISE))
    random.seed(0)
    torch.manual_seed(0)
    (only,) = loka.check_plan(tower(), plan, BATCHES, loss=drawing, max_loss_change=0.05, min_speedup=0.0, repeats=1).rounds
    assert 0 < only.change.rounding < 0.05
    assert only.change.rounding == pytest.approx(only.change.whole, rel=0.05)


def test_an_optimizer_within_backward_takes_no_step() -> None:
    model = tower()
    steps: list[Tensor] = []
    handles = [parameter.register_post_accumulate_grad_hook(steps.append) for parameter in model.parameters()]
    check(plan_for(model, dict.fromkeys(SITES, ROWWISE)), model, max_loss_change=0.05)
    assert steps == []
    loss(model, BATCHES[0]).backward()
    assert len(steps) == len(handles)
