"""A planned model frozen for serving: the same numbers from less memory."""

import copy

import pytest
import torch
from plans import MIXED, ROWWISE, batch, plan_for, tower
from torch import nn

import loka
from loka.core.errors import InvalidInput
from loka.core.plan import Goal
from loka.dispatch.freeze import FrozenLinear
from loka.kernels.executor import SiteKernels

DYNAMIC = dict.fromkeys(("bottom", "top.0", "top.2"), SiteKernels.same("onednn.int8_dynamic"))


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("kernels", [MIXED, DYNAMIC], ids=["training plan", "serving plan"])
def test_a_frozen_model_gives_the_same_numbers_at_every_batch_size(kernels: dict, drop: bool) -> None:
    model = tower()
    loka.apply_plan(model, plan_for(model, kernels, goal=Goal.SERVING if kernels is DYNAMIC else Goal.TRAINING))
    expected = {rows: model(batch(rows)).detach() for rows in (1, 2, 17, 100)}
    loka.freeze(model, drop_high_precision=drop)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    for rows, y in expected.items():
        assert torch.equal(model(batch(rows)), y)
    assert torch.equal(copy.deepcopy(model)(batch(17)), expected[17])


def test_memory_saved_is_said_and_true() -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 1))
    keys = list(model.state_dict())
    plain_bytes = 4 * (256 * 512 + 512 + 512 + 1)
    plan = plan_for(model, {"0": SiteKernels.same("reference.rowwise")})
    loka.apply_plan(model, plan)
    kept = copy.deepcopy(model)
    report = loka.freeze(model, drop_high_precision=True)
    codes = 256 * 512 + 4 * 512  # one byte a weight, a scale a row
    assert report.bytes_after == 4 * (512 + 512 + 1) + codes
    assert report.bytes_before > plain_bytes + codes  # with both forms of the cast
    assert str(report) == "1 sites frozen for serving, 0.8 → 0.1 MiB of parameters and buffers"
    assert "0.weight" not in model.state_dict()
    assert loka.freeze(kept).bytes_after == plain_bytes + codes
    assert list(kept.state_dict()) == keys


def test_a_site_planned_for_its_gradients_alone_is_plain_again() -> None:
    model = tower()
    loka.apply_plan(model, plan_for(model, {"bottom": SiteKernels("torch.fp32", "reference.rowwise", "reference.rowwise")}))
    report = loka.freeze(model)
    assert report.sites == ()
    assert type(model.bottom) is nn.Linear


@torch.no_grad()
def test_a_site_that_torch_serves_past_keeps_its_weight() -> None:
    """An encoder layer's fast path reads the weights of its parts, whatever stands in their place."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), nn.Linear(32, 32))
    loka.apply_plan(model, plan_for(model, dict.fromkeys(("0.linear1", "0.linear2", "1"), ROWWISE)))
    report = loka.freeze(model, drop_high_precision=True)
    assert report.sites == ("1",)
    assert model(torch.randn(3, 5, 32)).shape == (3, 5, 32)


def test_rows_that_do_not_pay_run_on_the_kernel_once_the_weight_is_gone() -> None:
    model, dropped = (tower() for _ in range(2))
    for one in (model, dropped):
        loka.apply_plan(one, plan_for(one, {"bottom": SiteKernels.same("onednn.int8")}))  # training: 17 rows at least
    loka.freeze(model)
    loka.freeze(dropped, drop_high_precision=True)
    plain = tower().bottom(batch(3))
    assert torch.equal(model.bottom(batch(3)), plain)
    assert not torch.equal(dropped.bottom(batch(3)), plain)
    torch.testing.assert_close(dropped.bottom(batch(3)), plain, rtol=0.1, atol=0.05)


def test_moving_keeps_the_codes() -> None:
    model = tower()
    loka.apply_plan(model, plan_for(model, {"bottom": SiteKernels.same("reference.rowwise")}))
    loka.freeze(model, drop_high_precision=True)
    expected = model.bottom(batch())
    model.to(torch.bfloat16)
    frozen = model.bottom
    assert isinstance(frozen, FrozenLinear)
    assert (frozen.codes.dtype, frozen.scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    torch.testing.assert_close(frozen(batch().bfloat16()).float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()
def test_it_compiles_with_changing_rows() -> None:
    model = tower()
    loka.apply_plan(model, plan_for(model, DYNAMIC, goal=Goal.SERVING))
    loka.freeze(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (8, 3, 50):
        torch.testing.assert_close(compiled(batch(rows)), model(batch(rows)))


def test_it_is_for_serving_and_for_good() -> None:
    model = tower()
    with pytest.raises(InvalidInput, match="no plan is applied"):
        loka.freeze(model)
    loka.apply_plan(model, plan_for(model, MIXED))
    loka.freeze(model)
    with pytest.raises(InvalidInput, match=r"frozen for serving and has no gradients: run it under torch.no_grad"):
        model(batch().requires_grad_())
    with pytest.raises(InvalidInput, match=r"expected input of shape \(\.\.\., 24\), got \(48, 12\)"):
        model(batch(24).reshape(48, 12))
    with pytest.raises(InvalidInput, match="no plan is applied"):
        loka.restore(model)
