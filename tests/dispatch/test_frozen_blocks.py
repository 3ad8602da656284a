"""Fused blocks frozen for serving, on emulated kernels."""

import copy
import weakref
from collections import OrderedDict

import pytest
import torch
from emulated_block import emulate
from plans import check_it_reads_autocasts_dtype, plan_for
from torch import nn

import loka
from loka.core.errors import InvalidInput
from loka.core.plan import BlockPlan, Goal
from loka.dispatch.frozen import FrozenBlock


def blocks(*, ends_chain: bool = False) -> nn.Module:
    """Two blocks in a chain, one that stands alone, or ends the chain without its activation, and a head; a norm in front of
    the chain that ends so. Planned, on emulated kernels."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for _ in range(2):
        model.extend([nn.Linear(32, 32, bias=False), loka.BlockNorm(32), nn.Hardswish()])
    model.extend([nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 1)])
    chained = BlockPlan("triton.block", "4", "5", fp8_input=True, producer="0")
    end = BlockPlan("triton.block", None, None, fp8_input=True, producer="3")
    last = end if ends_chain else BlockPlan("triton.block", None, "7")
    sites = {"0": BlockPlan("triton.block", "1", "2"), "3": chained, "6": last}
    if ends_chain:
        model = nn.Sequential(OrderedDict([("entry", loka.BlockNorm(32)), *model.named_children()]))
        sites["0"] = BlockPlan("triton.block", "1", "2", entry="entry")
    loka.apply_plan(model, plan_for(model, sites, goal=Goal.SERVING))
    return model


@pytest.mark.parametrize("ends_chain", [False, True])
@pytest.mark.parametrize("drop", [False, True])
def test_frozen_blocks_give_the_same_numbers_from_their_codes_alone(
    drop: bool, ends_chain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch)
    model = blocks(ends_chain=ends_chain)
    x_MK = torch.randn(5, 4, 32)
    with torch.no_grad():
        expected = model(x_MK)
    report = loka.freeze(model, drop_high_precision=drop)
    assert report.sites == ("0", "3", "6")
    assert [type(model.get_submodule(site)) for site in report.sites] == [FrozenBlock] * 3
    assert torch.equal(model(x_MK), expected)
    assert torch.equal(copy.deepcopy(model)(x_MK), expected)
    assert model(x_MK[:0]).shape == (0, 4, 1)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x_MK), expected.bfloat16(), rtol=0.02, atol=0.02)
        first = model.get_submodule("0")
        assert isinstance(first, FrozenBlock)
        if first.entry is None:  # a norm in front reads what there is
            check_it_reads_autocasts_dtype(first, x_MK)
    weights = 2 * 32 * 32 + 48 * 32
    codes = weights + 4 * (2 * 32 + 48)  # one byte a weight, a scale a row
    others = 4 * (48 + 48 + 1)  # a bias, and the head
    assert report.bytes_after == codes + others + (0 if drop else 4 * weights)
    assert ("0.weight" in model.state_dict()) is not drop
    with pytest.raises(InvalidInput, match=r"expected input of shape \(\.\.\., 32\), got \(5, 31\)"):
        model(torch.randn(5, 31))
    with pytest.raises(InvalidInput, match="frozen for serving and has no gradients"):
        model(x_MK.requires_grad_())


def test_a_frozen_block_moved_to_where_its_kernels_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes by its weight, if that is still there; without emulation the CPU is such a place."""
    emulate(monkeypatch)
    kept, dropped = blocks(), blocks()
    x_MK = torch.randn(20, 32)
    expected = kept(x_MK).detach()
    loka.freeze(kept)
    loka.freeze(dropped, drop_high_precision=True)
    monkeypatch.undo()
    torch.testing.assert_close(kept.cpu()(x_MK), expected, rtol=0.1, atol=0.1)
    with pytest.raises(InvalidInput, match=r"weight was dropped when the model was frozen.*freeze it without drop"):
        dropped.cpu()(x_MK)


def test_blocks_that_run_in_high_precision_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as planning:
        emulate(planning)
        model = blocks()
    model.cpu()  # binds them again, without kernels
    expected = model(torch.ones(3, 32)).detach()
    assert loka.freeze(model, drop_high_precision=True).sites == ()
    torch.testing.assert_close(model(torch.ones(3, 32)), expected)


@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()
def test_frozen_blocks_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    model = blocks()
    loka.freeze(model, drop_high_precision=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(torch.ones(16, 32)), model(torch.ones(16, 32)))


@pytest.mark.usefixtures("no_collector")
def test_dropped_weights_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    model = blocks()
    weights = [weakref.ref(model.get_submodule(site).weight) for site in ("0", "3", "6")]
    loka.freeze(model, drop_high_precision=True)
    assert [weight() for weight in weights] == [None] * 3


def test_in_float64_frozen_blocks_run_in_high_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    model = blocks()
    plain = copy.deepcopy(model)
    loka.restore(plain)
    loka.freeze(model)
    x_MK = torch.randn(20, 32, dtype=torch.float64)
    torch.testing.assert_close(model.double()(x_MK), plain.double()(x_MK))


def test_weights_assigned_in_float64_run_in_high_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """As layers do, until they have a format again: not by the codes of the weights before."""
    emulate(monkeypatch)
    model = blocks()
    plain = copy.deepcopy(model)
    loka.restore(plain)
    new = {name: torch.randn_like(tensor).double() for name, tensor in plain.state_dict().items()}
    plain.double().load_state_dict(new)
    loka.freeze(model)
    model.load_state_dict(new, assign=True)
    x_MK = torch.randn(20, 32, dtype=torch.float64)
    torch.testing.assert_close(model(x_MK), plain(x_MK))
