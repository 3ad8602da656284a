"""A planned, probed or guarded model in a training loop of years: copies and checkpoints in the middle of a step, layers that
are parametrized later, ambient autocast, batches that forward writes."""

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from emulated_block import emulate
from plans import ROWWISE, batch, plan_for, tower
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, parametrize, prune

import loka
from loka.core.errors import InvalidInput, LokaError
from loka.core.gemm import Role
from loka.core.plan import BlockPlan
from loka.core.record import Record
from loka.dispatch.guard import GuardEvent
from loka.kernels.executor import SiteKernels
from loka.train.workloads import open_workload

SITES = {"bottom": ROWWISE, "top.0": ROWWISE, "top.2": ROWWISE}


BLOCK = {"top.0": BlockPlan("triton.block", None, "top.1")}


def planned(sites: Mapping[str, SiteKernels | BlockPlan] = SITES) -> nn.Module:
    model = tower()
    loka.apply_plan(model, plan_for(model, sites))
    return model


def probed(model: nn.Module, each: Callable[[int], Tensor], steps: int = 3, every: int = 1) -> Record:
    probe = loka.Probe(model, every=every)
    for step in range(steps):
        with probe.step():
            model(each(step)).square().mean().backward()
    return probe.record()


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(24, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x.abs_().log1p_()).relu())


class Taking(InPlace):
    def forward(self, given: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        x = given.pop("x")
        return self.head(self.first(x if x.sum() else x + 1).relu())  # no trace follows a branch on values


def test_the_probe_leaves_the_users_batch_as_their_own_forward_leaves_it() -> None:
    x, expected = batch(), batch().abs().log1p()
    probed(InPlace(), lambda step: x, steps=1)
    assert torch.equal(x, expected)


def test_a_forward_that_takes_its_arguments_out_of_a_dict_is_seen() -> None:
    record = probed(Taking(), lambda step: {"x": batch()}, steps=1)  # type: ignore[arg-type,return-value]
    assert record.sites["first"].stays is None
    assert record.sites["head"].notes == ("head",)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_that_is_made_in_a_sampled_step_can_be_planned_and_holds_nothing(
    copier: Callable[[nn.Module], nn.Module],
) -> None:
    model = tower()
    probe = loka.Probe(model, every=1)
    with probe.step():
        model(batch()).sum().backward()
        of_step = copier(model)
    loka.apply_plan(of_step, plan_for(model, SITES))
    assert probe.record().sites["bottom"].calls == {40: 1}


def test_a_whole_model_is_saved_in_a_step_that_the_guard_checks() -> None:
    record = probed(model := tower(), lambda step: batch(64, step))
    loka.apply_plan(model, plan_for(model, SITES))
    guard, file = loka.Guard(model, record, every=1, rows=32), io.BytesIO()
    with guard.step():
        model(batch()).sum().backward()
        torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(batch()), model(batch()))


def test_a_guards_events_come_back_from_a_checkpoint() -> None:
    events, file = [GuardEvent(3, "top.0", Role.WGRAD, 0.5, 0.1, 0.3)], io.BytesIO()
    torch.save({"guard": (4, events)}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == {"guard": (4, events)}


def test_a_survey_is_the_same_inside_autocast() -> None:
    record = probed(tower(), lambda step: batch(64, step))
    with torch.autocast("cpu", torch.bfloat16):
        survey = loka.measure(record, kernels=["reference.rowwise"])
    baseline = [c for c in survey.sites[1].candidates if c.kernel == "torch.fp32"]
    assert max(c.error["mere_floored"].mean for c in baseline if c.error) < 1e-5


def test_what_is_drawn_is_the_same_inside_autocast() -> None:
    site = probed(tower(), lambda step: batch(64, step)).sites["top.0"]
    x_MK, _ = site.sample(32, torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        again_MK, _ = site.sample(32, torch.Generator().manual_seed(0))
    assert torch.equal(x_MK, again_MK)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_forward_mode_derivatives_are_refused(fused: bool, frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    model = tower()
    loka.apply_plan(model, plan_for(model, BLOCK if fused else SITES))
    if frozen:
        loka.freeze(model)
    with torch.no_grad():
        with forward_ad.dual_level(), pytest.raises(InvalidInput, match="forward-mode"):
            model(forward_ad.make_dual(batch(), batch()))
        with pytest.raises(InvalidInput, match="forward-mode"):
            torch.func.jvp(model, (batch(),), (batch(),))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_derivatives_by_transforms_are_refused(
    fused: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch, fresh_compiler: None
) -> None:
    emulate(monkeypatch)
    model = planned(BLOCK if fused else SITES)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    for way in (torch.func.grad(loss), torch.func.jacrev(loss), torch.vmap(torch.func.grad(loss), (None, 0))):
        with pytest.raises(InvalidInput, match=r"transforms of torch\.func .*restore"):
            (torch.compile(way, backend="aot_eager") if compiled else way)(weights, torch.stack([batch(8), batch(8)]))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_through_a_vmap_are_refused(
    fused: bool, frozen: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch, fresh_compiler: None
) -> None:
    """Of what it is given, and of weights that stand in the place of a model's own. Without gradients it runs."""
    emulate(monkeypatch)
    model = tower()
    loka.apply_plan(model, plan_for(model, BLOCK if fused else SITES))
    if frozen:
        loka.freeze(model)
    batches, x = torch.stack([batch(8, seed) for seed in range(3)]), batch()

    def over_inputs(x: Tensor) -> Tensor:
        return torch.vmap(model)(x)

    def over_weights(weights: dict[str, Tensor]) -> Tensor:
        return torch.vmap(lambda given: torch.func.functional_call(model, given, (x,)))(weights)

    if compiled:
        over_inputs, over_weights = (torch.compile(f, backend="aot_eager") for f in (over_inputs, over_weights))
    weights = {name: torch.stack([weight.detach()] * 3).requires_grad_() for name, weight in model.named_parameters()}
    model.requires_grad_(False)
    with pytest.raises(InvalidInput, match=r"inside torch\.vmap"):
        over_inputs(batches.clone().requires_grad_())
    if not frozen:  # which reads no others
        with pytest.raises(InvalidInput, match=r"inside torch\.vmap"):
            over_weights(weights)
    if not fused:  # whose kernels take no batch of batches
        with torch.no_grad():
            torch.testing.assert_close(over_inputs(batches), torch.stack([model(x) for x in batches]))


@pytest.mark.parametrize("fused", [False, True])
def test_a_parametrization_that_is_put_on_later_runs_once_a_call(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)

    def directions(model: nn.Module) -> Tensor:
        torch.manual_seed(0)
        parametrizations.spectral_norm(model.top[0])
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
        for step in range(3):
            model(batch(40, step)).mean().backward()
            optimizer.step()
        return model.top[0].parametrizations.weight[0]._u

    assert torch.equal(directions(planned(BLOCK if fused else SITES)), directions(tower()))


@pytest.mark.parametrize("change", [parametrizations.weight_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)])
@pytest.mark.parametrize("fused", [False, True])
def test_a_layer_whose_weight_is_made_in_every_call_learns_in_high_precision(
    fused: bool, change: Callable[[nn.Module], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch)
    models = planned(BLOCK if fused else {"top.0": ROWWISE}), tower()
    for model in models:
        change(model.top[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(40, step)).square().mean().backward()
            optimizer.step()
    for ours, plain in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours, plain)


def test_an_optimizer_steps_though_a_planned_layer_elsewhere_is_broken() -> None:
    model = planned()
    parametrizations.weight_norm(model.top[0])
    other = copy.deepcopy(model)
    parametrize.remove_parametrizations(other.top[0], "weight")  # of the class, which torch lets copies share
    other(batch()).mean().backward()
    torch.optim.SGD(other.parameters()).step()


@pytest.mark.parametrize("name", ["./my_model.py:workload", ".:workload", "..my_model:workload"])
def test_a_relative_workload_is_told(name: str) -> None:
    with pytest.raises(LokaError, match="names no module"):
        open_workload(name)


def test_what_a_workloads_own_module_raises_is_left_to_its_author(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_module_that_raises.py").write_text("int('')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="invalid literal"):
        open_workload("own_module_that_raises:workload")
