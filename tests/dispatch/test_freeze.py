"""A planned model frozen for serving: the same numbers from less memory."""

import copy
import weakref
from typing import Any

import msgspec
import pytest
import torch
from int8_here import needs, where_they_run
from plans import MIXED, ROWWISE, batch, check_it_reads_autocasts_dtype, plan_for, tower
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

import loka
from loka.core.errors import InvalidInput
from loka.core.plan import Goal, Plan
from loka.dispatch.frozen import FrozenLinear
from loka.kernels.executor import SiteKernels

DYNAMIC = dict.fromkeys(("bottom", "top.0", "top.2"), SiteKernels.same("onednn.int8_dynamic"))
PLANS = [
    pytest.param(MIXED, id="training plan"),
    pytest.param(DYNAMIC, id="serving plan", marks=needs("onednn.int8_dynamic")),
]


@pytest.mark.parametrize("kernels", PLANS)
def test_what_is_applied_and_frozen_in_inference_mode_runs_and_loads_outside(kernels: dict) -> None:
    model, other = tower(), tower(1)
    with torch.inference_mode():
        loka.apply_plan(model, plan_for(model, kernels, goal=Goal.SERVING if kernels is DYNAMIC else Goal.TRAINING))
        loka.freeze(model)
    x = batch(17)
    model(x)
    model.load_state_dict(other.state_dict())
    loka.apply_plan(other, plan_for(other, kernels, goal=Goal.SERVING if kernels is DYNAMIC else Goal.TRAINING))
    loka.freeze(other)
    assert torch.equal(model(x), other(x))
    assert not any(tensor.is_inference() for tensor in model.buffers())


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("kernels", PLANS)
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


@pytest.mark.parametrize("drop", [False, True])
def test_a_forward_may_ask_for_the_weights_dtype_and_device(drop: bool) -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(24, 32), nn.Linear(32, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.first.weight.shape == (32, 24)
            return self.head(self.first(x.to(self.first.weight.device, self.first.weight.dtype)))

    model = Asking()
    loka.apply_plan(model, plan_for(model, {"first": SiteKernels.same("onednn.int8")}, goal=Goal.SERVING))
    x = batch(17)
    expected = model(x).detach()
    loka.freeze(model, drop_high_precision=drop)
    for each in (model, copy.deepcopy(model)):
        assert torch.equal(each(x.double()), expected)
        assert ("first.weight" in each.state_dict()) is not drop
        assert each.first.weight.isnan().all().item() is drop
        assert each.first.weight.untyped_storage().nbytes() == (4 if drop else 4 * 32 * 24)
    assert model.to("meta").first.weight.device.type == "meta"


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
    assert str(report) == "1 site frozen for serving, 0.8 → 0.1 MiB of parameters and buffers"
    assert "0.weight" not in model.state_dict()
    assert loka.freeze(kept).bytes_after == plain_bytes + codes
    assert list(kept.state_dict()) == keys


def test_a_site_planned_for_its_gradients_alone_is_plain_again() -> None:
    model = tower()
    loka.apply_plan(model, plan_for(model, {"bottom": SiteKernels("torch.fp32", "reference.rowwise", "reference.rowwise")}))
    report = loka.freeze(model)
    assert report.sites == ()
    assert type(model.bottom) is nn.Linear


def test_a_module_that_was_put_in_a_sites_place_is_not_said_to_be_frozen() -> None:
    model = tower()
    loka.apply_plan(model, plan_for(model, {"bottom": ROWWISE, "top.0": ROWWISE}))
    model.bottom = nn.Linear(24, 32)
    assert loka.freeze(model).sites == ("top.0",)
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


@torch.no_grad()
def test_rows_that_gradients_could_not_take_are_served_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loka.kernels.providers.onednn.IS_ARM", True)
    model, dropped = (tower() for _ in range(2))
    for one in (model, dropped):
        loka.apply_plan(one, plan_for(one, {"bottom": SiteKernels.same("onednn.int8")}))  # training: 17 rows at least
    plain = tower().bottom(batch(3))
    assert torch.equal(model.bottom(batch(3)), plain)
    loka.freeze(model)
    loka.freeze(dropped, drop_high_precision=True)
    assert not torch.equal(model.bottom(batch(3)), plain)
    assert torch.equal(model.bottom(batch(3)), dropped.bottom(batch(3)))
    torch.testing.assert_close(dropped.bottom(batch(3)), plain, rtol=0.1, atol=0.05)
    program = torch.export.export(model, (batch(17),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    assert torch.equal(program.module()(batch(3)), model(batch(3)))


@pytest.mark.parametrize("kernel", where_they_run("onednn.int8_dynamic", "reference.rowwise", "reference.tensorwise"))
@torch.no_grad()
def test_codes_take_the_place_of_dropped_weights_in_state_dict(kernel: str) -> None:
    def frozen(seed: int) -> nn.Module:
        model = tower(seed)
        loka.apply_plan(model, plan_for(model, dict.fromkeys(DYNAMIC, SiteKernels.same(kernel)), goal=Goal.SERVING))
        loka.freeze(model, drop_high_precision=True)
        return model

    model, other = frozen(0), frozen(5)
    assert not torch.equal(model(batch()), other(batch()))
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(batch()), other(batch()))


@torch.no_grad()
def test_codes_of_another_format_are_refused() -> None:
    models = [tower() for _ in range(2)]
    for model, kernel in zip(models, ("onednn.int8", "reference.rowwise"), strict=True):
        loka.apply_plan(model, plan_for(model, {"bottom": SiteKernels.same(kernel)}, goal=Goal.SERVING))
        loka.freeze(model, drop_high_precision=True)
    expected = models[0].bottom(batch())
    with pytest.raises(RuntimeError, match=r"bottom\.codes are torch\.float8_e4m3fn, and by this model's plan torch\.int8"):
        models[0].load_state_dict(models[1].state_dict())
    assert torch.equal(models[0].bottom(batch()), expected)


@needs("onednn.int8_dynamic")
@pytest.mark.parametrize("drop", [False, True])
@torch.no_grad()
def test_weights_loaded_between_requests_are_served(drop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that packs codes with their scales, as oneDNN's does on x86, and is asked after every tensor that is written."""
    monkeypatch.setattr("loka.kernels.providers.onednn.IS_ARM", False)
    model, other = tower(0), tower(5)
    for one in (model, other):
        loka.apply_plan(one, plan_for(one, DYNAMIC, goal=Goal.SERVING))
        loka.freeze(one, drop_high_precision=drop)
    write, writing = torch.Tensor.copy_, []

    def write_and_serve(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        written = write(self, *args, **kwargs)
        if not writing:
            writing.append(self)
            model(batch())
            writing.clear()
        return written

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", write_and_serve)
        model.load_state_dict(other.state_dict())
    assert torch.equal(model(batch()), other(batch()))


@pytest.mark.usefixtures("no_collector")
def test_dropped_weights_are_gone_though_what_was_applied_is_kept() -> None:
    model = tower()
    weight = weakref.ref(model.bottom.weight)
    applied = loka.apply_plan(model, plan_for(model, {"bottom": ROWWISE}))
    loka.freeze(model, drop_high_precision=True)
    assert weight() is None
    assert applied.sites == ("bottom",)
    assert applied.module("bottom") is model.bottom


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


@needs("onednn.int8_dynamic")
@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()
def test_it_compiles_with_changing_rows() -> None:
    model = tower()
    loka.apply_plan(model, plan_for(model, DYNAMIC, goal=Goal.SERVING))
    loka.freeze(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (8, 3, 50):
        torch.testing.assert_close(compiled(batch(rows)), model(batch(rows)))


@pytest.mark.parametrize("drop", [False, True])
@torch.no_grad()
def test_another_high_precision_is_frozen_too(drop: bool) -> None:
    model, other = tower(), tower(1)
    for one in (model, other):
        loka.apply_plan(one, plan_for(one, dict.fromkeys(DYNAMIC, SiteKernels.same("torch.bf16")), goal=Goal.SERVING))
    expected, weights = model(batch()), {name: value.clone() for name, value in model.state_dict().items()}
    report = loka.freeze(model, drop_high_precision=drop)
    assert report.sites == tuple(DYNAMIC)
    assert {type(model.get_submodule(site)) for site in DYNAMIC} == {FrozenLinear}
    assert torch.equal(model(batch()), expected)
    assert not torch.equal(tower()(batch()), expected)
    copied = sum(model.get_submodule(site).weight.numel() for site in DYNAMIC)
    counters = 8 * len(DYNAMIC)  # of calls in high precision, which a frozen site has none of
    assert report.bytes_after - report.bytes_before == (-2 if drop else 2) * copied - counters
    program = torch.export.export(model, (batch(17),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    assert torch.equal(program.module()(batch(3)), model(batch(3)))
    loka.freeze(other, drop_high_precision=drop)
    other.load_state_dict(weights)
    assert torch.equal(other(batch()), expected)


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
    for again in (loka.restore, loka.freeze, lambda model: loka.apply_plan(model, plan_for(tower(), MIXED))):
        with pytest.raises(InvalidInput, match="was frozen for serving, for good: load your checkpoint into one that was not"):
            again(model)


@torch.no_grad()
@pytest.mark.parametrize("drop", [False, True])
def test_an_input_of_another_dtype_is_refused_as_before_it_was_frozen(drop: bool) -> None:
    model = tower()
    loka.apply_plan(model, plan_for(model, MIXED))
    loka.freeze(model, drop_high_precision=drop)
    with pytest.raises(
        InvalidInput, match=r"input is torch.bfloat16, the weight torch.float32: cast one of them, or run under"
    ):
        model(batch().bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert model(batch()).isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_frozen_model_runs_by_the_weights_it_has(when: str) -> None:
    """Written before by whoever says nothing of it, or loaded into the weights that were kept beside their casts."""
    model, other = tower(), tower(seed=5)
    plan = plan_for(model, MIXED)
    loka.apply_plan(model, plan)
    if when == "before":
        for parameter, value in zip(model.parameters(), other.parameters(), strict=True):
            parameter.data.copy_(value)
    loka.freeze(model, drop_high_precision=when == "before")
    if when == "after":
        model.load_state_dict(other.state_dict())
    loka.apply_plan(other, plan)
    loka.freeze(other)
    assert torch.equal(model(batch(17)), other(batch(17)))


def test_nor_is_one_that_the_probe_saw_read_where_forward_cannot_be_traced() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.head = nn.Linear(24, 32), nn.Linear(24, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clamp(-9, 9) if x.abs().max() > 9 else x  # which ends a trace
            return self.head(nn.functional.linear(self.encode(x).relu(), self.encode.weight.t()))

    torch.manual_seed(0)
    model = Tied()
    plan = plan_for(model, {"encode": ROWWISE}, goal=Goal.SERVING)
    sites = tuple(msgspec.structs.replace(site, read_by="t" if site.site == "encode" else None) for site in plan.sites)
    loka.apply_plan(model, Plan(msgspec.structs.replace(plan.document, sites=sites)))
    expected = model(batch())
    report = loka.freeze(model, drop_high_precision=True)
    assert torch.equal(model(batch()), expected)
    assert report.kept == {"encode": "t"}
    assert str(report).splitlines()[0].startswith("1 site frozen for serving, ")
    assert str(report).splitlines()[1:] == ["  the weight of encode was kept: t reads it"]


def test_of_a_layer_that_was_not_frozen_no_weight_is_told_as_kept() -> None:
    """Its gradients alone were planned: it serves by its weight, whoever reads that too."""
    model = tower()
    plan = plan_for(model, {"bottom": SiteKernels("torch.fp32", "reference.rowwise", "reference.rowwise"), "top.0": ROWWISE})
    sites = tuple(msgspec.structs.replace(site, read_by="t" if site.site == "bottom" else None) for site in plan.sites)
    loka.apply_plan(model, Plan(msgspec.structs.replace(plan.document, sites=sites)))
    report = loka.freeze(model, drop_high_precision=True)
    assert report.sites == ("top.0",)
    assert not report.kept


def test_a_weight_that_a_function_reads_too_is_not_dropped() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.deep, self.head = nn.Linear(24, 32), nn.Linear(24, 32), nn.Linear(32, 1)
            self.same = nn.Linear(24, 32, bias=False)
            self.same.weight = self.encode.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            again = nn.functional.linear((self.encode(x) + self.same(x)).relu(), self.encode.weight.t())
            return self.head(self.deep(again).relu())

    torch.manual_seed(0)
    model = Tied()
    loka.apply_plan(model, plan_for(model, dict.fromkeys(("encode", "deep", "same"), ROWWISE), goal=Goal.SERVING))
    expected = model(batch())
    loka.freeze(model, drop_high_precision=True)
    assert torch.equal(model(batch()), expected)
    codes = {"deep.codes", "deep.scale"}
    assert set(model.state_dict()) == codes | {
        *("encode.weight", "same.weight", "encode.bias", "deep.bias", "head.weight", "head.bias")
    }


def test_a_frozen_model_is_refreshed_and_not_trained() -> None:
    model = tower()
    loka.apply_plan(model, plan_for(model, {"bottom": ROWWISE}, goal=Goal.SERVING))
    loka.freeze(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loka.refresh(model)
    assert not model.bottom(batch()).any()
    model.requires_grad_(True)
    with pytest.raises(InvalidInput, match="has no gradients"):
        model(batch())
    dropped = tower()
    loka.apply_plan(dropped, plan_for(dropped, {"bottom": ROWWISE}, goal=Goal.SERVING))
    loka.freeze(dropped, drop_high_precision=True)
    loka.refresh(dropped)  # there is nothing to cast again
    assert dropped.bottom(batch()).any()


@pytest.mark.parametrize("undo", [loka.restore, loka.freeze])
def test_hooks_that_were_put_on_a_stand_in_stay(undo: Any) -> None:
    model, calls = tower(), []
    loka.apply_plan(model, plan_for(model, {"bottom": ROWWISE}, goal=Goal.SERVING))
    handle = model.bottom.register_forward_hook(lambda *_: calls.append(1))
    undo(model)
    with torch.no_grad():
        model(batch())
        assert len(calls) == 1
        handle.remove()
        model(batch())
    assert len(calls) == 1


@pytest.mark.parametrize("undo", [loka.restore, loka.freeze])
def test_what_was_pruned_since_is_not_lost(undo: Any) -> None:
    model = tower()
    loka.apply_plan(model, plan_for(model, {"bottom": ROWWISE}, goal=Goal.SERVING))
    prune.l1_unstructured(model.bottom, "weight", 0.5)
    with pytest.raises(InvalidInput, match="pruned or parametrized"):
        undo(model)
    prune.remove(model.bottom, "weight")
    loka.refresh(model)
    undo(model)
    assert float((model.bottom.weight == 0).float().mean()) == 0.5


def test_an_average_of_weights_is_served_by_the_models_plan() -> None:
    model = tower()
    average = AveragedModel(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    average.update_parameters(model)  # the first is a copy
    plan = plan_for(model, {"bottom": ROWWISE, "top.0": ROWWISE}, goal=Goal.SERVING)
    assert loka.apply_plan(average, plan).sites == ("bottom", "top.0")
    loka.apply_plan(model, plan)
    assert torch.equal(average(batch()), model(batch()))
    loka.freeze(average, drop_high_precision=True)
    assert torch.equal(average(batch()), model(batch()))


def test_a_frozen_site_reads_autocasts_dtype() -> None:
    model = tower()
    loka.apply_plan(model, plan_for(model, {"bottom": ROWWISE}))
    loka.freeze(model, drop_high_precision=True)
    assert isinstance(model.bottom, FrozenLinear)
    with torch.autocast("cpu", torch.bfloat16):
        check_it_reads_autocasts_dtype(model.bottom, batch())


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("transform", ["center", "rescale"])
def test_a_site_with_a_transform_is_frozen_and_loaded_with_it(transform: str, drop: bool) -> None:
    vector = torch.exp2(torch.arange(24).remainder(5) - 1.0)
    expected = []
    models = [tower(seed) for seed in (0, 1)]
    for model, own in zip(models, (vector, 2 * vector if drop else vector), strict=True):  # it is in the file with its codes
        loka.apply_plan(model, plan_for(model, {"bottom": ROWWISE}, vectors={f"bottom/{transform}": own}))
        expected.append(model(batch()).detach())
        loka.freeze(model, drop_high_precision=drop)
        assert torch.equal(model(batch()), expected[-1])
    models[0].load_state_dict(models[1].state_dict())
    assert torch.equal(models[0](batch()), expected[1])
