"""What rounding costs: against the noise's own formula, where the change of loss itself says little."""

import math
from collections import OrderedDict

import pytest
import torch
from emulated_block import emulate
from plans import ROWWISE, batch, plan_for
from torch import Tensor, nn
from torch.nn import functional as F

import loka
from loka.core.plan import BlockPlan
from loka.dispatch.loss_change import LossChange, change_of, losses, losses_both_ways


def decided() -> nn.Module:
    """Logits that deviate by about 1. Without activations, so that noise inside is noise in the logit and no more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 32), nn.Linear(32, 1))
    with torch.no_grad():
        model[2].weight.mul_(5)
    return model


def labelled(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Labels drawn by the model's own probabilities: it is at its optimum, and the first order is chance."""
    x = batch(rows, seed)
    p = torch.sigmoid(decided()(x).detach())
    return x, torch.bernoulli(p, generator=torch.Generator().manual_seed(seed))


def log_loss(model: nn.Module, examples: tuple[Tensor, Tensor]) -> Tensor:
    x, label = examples
    return F.binary_cross_entropy_with_logits(model(x).double(), label.double())


def test_rounding_costs_what_noise_in_a_logit_does() -> None:
    """½·p(1−p)·d², d the error of the logit, over all examples."""
    model, batches = decided(), [labelled(400, seed) for seed in range(8)]
    high = losses(model, batches, log_loss)
    exact = [model(x).detach().double() for x, _ in batches]
    applied = loka.apply_plan(model, plan_for(model, dict.fromkeys(("0", "1"), ROWWISE)))
    noise = [(model(x).detach().double() - z).square() for (x, _), z in zip(batches, exact, strict=True)]
    planned, mirrored = losses_both_ways(model, [applied.module(site) for site in applied.sites], batches, log_loss)
    p = [torch.sigmoid(z) for z in exact]
    expected = [(d * q * (1 - q) / 2).mean().item() for d, q in zip(noise, p, strict=True)]
    found = change_of(planned, mirrored, high)
    assert found.rounding == pytest.approx(sum(expected) / sum(high), rel=0.1)
    assert found.whole == pytest.approx(sum(planned) / sum(high) - 1)
    by_batch = [(a - c) / c for a, c in zip(planned, high, strict=True)]
    assert max(map(abs, by_batch)) > 3 * found.rounding  # of one batch the change of loss says nothing
    assert losses(model, batches, log_loss) == planned  # hooks are gone


@pytest.mark.parametrize("entered", [False, True])
def test_errors_of_a_chain_are_turned_around_as_a_whole(entered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    torch.manual_seed(0)
    front = loka.BlockNorm(32) if entered else nn.Identity()
    model = nn.Sequential(OrderedDict(front=front))
    for _ in range(2):
        model.extend([nn.Linear(32, 32, bias=False), loka.BlockNorm(32), nn.Hardswish()])
    model.append(nn.Linear(32, 1))
    x = 3 * torch.randn(20, 32)
    outputs: list[Tensor] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        outputs.append(model[:7](x).detach())
        return outputs[-1].sum()

    losses(model, [x], loss)
    first = BlockPlan("triton.block", "2", "3", entry="front" if entered else None)
    chained = BlockPlan("triton.block", "5", "6", fp8_input=True, producer="1")
    applied = loka.apply_plan(model, plan_for(model, {"1": first, "4": chained}))
    losses_both_ways(model, [applied.module(site) for site in applied.sites], [x], loss)
    exact, rounded, turned = outputs
    assert 0 < float((rounded - exact).norm()) < 0.1 * float(exact.norm())
    torch.testing.assert_close(turned, 2 * exact - rounded)


def test_a_call_of_other_rows_than_before_is_left_as_it_is() -> None:
    """As of an expert to which a router sends other rows."""
    model = decided()
    applied = loka.apply_plan(model, plan_for(model, {"0": ROWWISE, "1": ROWWISE}))
    outputs: list[Tensor] = []
    sizes = iter([8, 9])

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        outputs.append(model[0](x[: next(sizes)]).detach())
        return model[1](outputs[0]).sum()

    as_it_is, mirrored = losses_both_ways(model, [applied.module(site) for site in "01"], [batch()], loss)
    assert torch.equal(outputs[0], outputs[1][:8])
    assert as_it_is != mirrored  # the other site's errors are turned around


@pytest.mark.parametrize(
    ("planned", "mirrored", "harm"),
    [
        ([1.1, 0.9, 1.1, 0.9], [0.9, 1.1, 0.9, 1.1], 0.0),  # first order, of either sign
        ([1.3, 1.1, 1.3, 1.1], [1.1, 0.9, 1.1, 0.9], 0.1),  # with a price
        ([1.3, 1.3, 1.3, 1.3], [0.7, 0.7, 0.7, 0.7], 0.3),  # first order alone, and every time
        ([1.1, math.nan, 1.1, 1.1], [1.0, 1.0, 1.0, 1.0], math.inf),
        ([1.1, 1.1, 1.1, 1.1], [1.0, math.nan, 1.0, 1.0], math.inf),
    ],
)
def test_harm_is_the_price_of_rounding_or_what_has_surely_risen(
    planned: list[float], mirrored: list[float], harm: float
) -> None:
    assert change_of(planned, mirrored, [1.0] * 4).harm == pytest.approx(harm, abs=1e-9)


def test_one_batch_is_judged_by_rounding_alone() -> None:
    change = change_of([1.3], [0.8], [1.0])
    assert change == LossChange(pytest.approx(0.3), -math.inf, pytest.approx(0.05))
    assert change.harm == pytest.approx(0.05)


def test_a_loss_below_zero_that_rises_is_harm() -> None:
    change = change_of([-0.9, -0.9], [-0.9, -0.9], [-1.0, -1.0])
    assert (change.whole, change.rounding) == (pytest.approx(0.1), pytest.approx(0.1))
    assert change.harm > 0
