"""Layers over another axis that a plan multiplies from the left: as exact as before, and for serving."""

import copy
import gc
import weakref
from pathlib import Path

import msgspec
import pytest
import torch
from plans import plan_for
from torch import Tensor, nn

import loka
from loka.core.errors import KernelUnavailable, LokaError
from loka.core.gemm import Role
from loka.core.plan import Choice, FinerForward, Goal, Plan
from loka.dispatch.frozen import FrozenLinear
from loka.dispatch.swap import applied_to
from loka.kernels.executor import SiteKernels
from loka.nn.left_linear import LeftLinear

LEFT, INT8 = SiteKernels.same("torch.fp32_left"), SiteKernels.same("reference.int8_rowwise")


class Mixed(nn.Module):
    """A layer over the fields, one over what is left of them, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.over, self.wide, self.head = nn.Linear(12, 6), nn.Linear(48, 32), nn.Linear(32, 1)

    def forward(self, fields_BFD: Tensor) -> Tensor:
        return self.head(self.wide(self.over(fields_BFD.mT).mT.flatten(1)).relu())


def model_of(seed: int = 0) -> Mixed:
    torch.manual_seed(seed)
    return Mixed()


def fields(rows: int = 16, seed: int = 1) -> Tensor:
    return torch.randn(rows, 12, 8, generator=torch.Generator().manual_seed(seed))


def serving(model: nn.Module, **sites: SiteKernels) -> Plan:
    return plan_for(model, sites, goal=Goal.SERVING)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) + 2).square().mean()


@pytest.fixture
def served() -> Mixed:
    model = model_of()
    loka.apply_plan(model, serving(model, over=LEFT, wide=INT8))
    return model


def test_its_sites_are_applied_and_said(served: Mixed) -> None:
    applied, plain = applied_to(served), model_of()
    assert type(served.over) is LeftLinear
    assert applied is not None
    assert applied.sites == ("over", "wide")
    assert str(applied) == "1 of 3 sites in low precision, 1 in fp32 on another kernel"
    with torch.no_grad():
        x = fields().mT
        torch.testing.assert_close(served.over(x), plain.over(x))
        assert served.over(x).stride() == plain.over(x).stride()
    assert list(served.state_dict()) == list(plain.state_dict())


def test_it_goes_back_with_the_weights_it_has(served: Mixed) -> None:
    weight = served.over.weight
    with torch.no_grad():
        weight.mul_(2)
    loka.restore(served)
    assert type(served.over) is nn.Linear
    assert served.over.weight is weight


def test_it_goes_back_with_parameters_that_were_put_in_its_place(served: Mixed) -> None:
    served.load_state_dict(model_of(1).state_dict(), assign=True)
    weight = served.over.weight
    loka.restore(served)
    assert served.over.weight is weight


def test_checkpoints_and_copies_are_those_of_the_model(served: Mixed) -> None:
    other = model_of(1)
    served.load_state_dict(other.state_dict())
    with torch.no_grad():
        expected = served(fields())
        torch.testing.assert_close(expected, other(fields()), rtol=0.1, atol=0.05)  # one site is in INT8
        assert torch.equal(copy.deepcopy(served)(fields()), expected)
    other.load_state_dict(served.state_dict())


@pytest.mark.parametrize("drop", [False, True])
def test_it_is_frozen_and_served_compiled(drop: bool, served: Mixed, fresh_compiler: None) -> None:
    with torch.no_grad():
        expected = served(fields())
    applied = applied_to(served)
    assert applied is not None
    said = str(applied)
    frozen = loka.freeze(served, drop_high_precision=drop)
    assert (applied.sites, str(applied)) == (("over", "wide"), said)
    assert [type(served.over), type(served.wide)] == [LeftLinear, FrozenLinear]
    assert "over" not in str(frozen)
    compiled = torch.compile(served, fullgraph=True)
    for rows in (16, 7):
        torch.testing.assert_close(compiled(fields()[:rows]), expected[:rows], rtol=1e-4, atol=1e-5)
    served.load_state_dict(served.state_dict())


def test_what_it_was_is_not_kept_alive(served: Mixed) -> None:
    """A frozen model keeps no second layer."""
    kept = weakref.ref(next(iter(applied_to(served).swaps["over"])).original)  # type: ignore[union-attr]
    loka.freeze(served)
    gc.collect()
    assert kept() is None
    with torch.no_grad():
        served(fields())


def test_it_is_checked_with_the_others_and_given_back_where_it_is_slow() -> None:
    model, batches = model_of(), [fields(seed=seed) for seed in range(4)]
    plan = serving(model, over=LEFT, wide=INT8)
    checked = loka.check_plan(model, plan, batches, loss=loss, max_loss_change=0.5, min_speedup=0.0, repeats=1)
    assert checked.given_back == ()
    assert checked.rounds[-1].sites == 2
    alone = loka.check_plan(model, serving(model, over=LEFT), batches, loss=loss, min_speedup=0.0, repeats=1)
    assert abs(alone.rounds[-1].change.whole) < 1e-5
    slow = loka.check_plan(model, serving(model, over=LEFT), batches, loss=loss, min_speedup=1e9, repeats=1)
    assert slow.given_back == ("over",)
    assert not slow.plan.document.moves(slow.plan.sites[0])
    assert type(model.over) is nn.Linear


def test_a_forward_that_hurts_is_said_to_go_to_it() -> None:
    model, as_is, batches = model_of(), model_of(), [fields(seed=seed) for seed in range(4)]

    def away(model: nn.Module, x: Tensor) -> Tensor:
        return 1 + (model(x) - as_is(x)).square().mean()

    plan = serving(model, over=INT8)
    finer = (FinerForward({Role.FPROP: Choice("torch.fp32_left", "")}, 100.0, 80.0),)
    sites = tuple(msgspec.structs.replace(site, finer=finer if site.site == "over" else ()) for site in plan.sites)
    plan = Plan(msgspec.structs.replace(plan.document, sites=sites), {})
    checked = loka.check_plan(model, plan, batches, loss=away, max_loss_change=0.0, min_speedup=0.0, repeats=1)
    assert checked.plan.sites[0].kernels[Role.FPROP].kernel == "torch.fp32_left"
    assert "given back: over (forward to torch.fp32_left): alone it costs " in str(checked)


def test_a_model_may_view_what_comes_out() -> None:
    """As it may what torch's layer gives."""

    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.over, self.head = nn.Linear(12, 6), nn.Linear(48, 1)

        def forward(self, fields_BFD: Tensor) -> Tensor:
            return self.head(self.over(fields_BFD.mT).view(len(fields_BFD), -1))

    torch.manual_seed(0)
    model = Viewing().requires_grad_(False)
    expected = model(fields())
    loka.apply_plan(model, serving(model, over=LEFT))
    torch.testing.assert_close(model(fields()), expected)


def test_what_feeds_a_product_is_known_from_the_probe_to_the_layer(tmp_path: Path, fresh_compiler: None) -> None:
    """For it lies otherwise in compiled code."""

    class Interacting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.over, self.beside, self.head = nn.Linear(12, 6), nn.Linear(12, 6), nn.Linear(72, 1)

        def forward(self, fields_BFD: Tensor) -> Tensor:
            pairs_BFN = fields_BFD @ self.over(fields_BFD.mT)
            return self.head(pairs_BFN.flatten(1) + self.beside(fields_BFD.mT).mT.sum(2).repeat(1, 12))

    torch.manual_seed(0)
    model = Interacting()
    probe = loka.Probe(model, every=1)
    with probe.step():
        model(fields()).sum().backward()
    record = probe.record()
    probe.detach()
    record.save(tmp_path)
    loka.measure(loka.Record.load(tmp_path), kernels=["torch.fp32_left"], device="cpu", compiled=True, out=tmp_path)
    loka.make_plan(loka.Survey.load(tmp_path), goal="serving", min_speedup=1e-3).save(tmp_path)
    model.requires_grad_(False)
    expected = model(fields())
    loka.apply_plan(model, loka.Plan.load(tmp_path))
    assert [model.over.feeds_product, model.beside.feeds_product] == [True, False]
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(fields()), expected, rtol=1e-4, atol=1e-4)


def test_what_a_probe_learns_beside_such_a_plan_may_be_planned() -> None:
    model = model_of()
    loka.apply_plan(model, serving(model, over=LEFT, wide=INT8))
    probe = loka.Probe(model, every=1)
    with probe.step():
        loss(model, fields(64)).backward()
    assert {name: site.stays for name, site in probe.record().sites.items()}["over"] is None


def test_a_plan_for_training_that_names_it_is_refused() -> None:
    model = model_of()
    with pytest.raises(KernelUnavailable, match=r"torch\.fp32_left, which is for models that serve"):
        loka.apply_plan(model, plan_for(model, {"over": LEFT}, goal=Goal.TRAINING))


def test_the_guard_has_nothing_to_watch_there() -> None:
    model = model_of()
    probe = loka.Probe(model, every=1)
    with probe.step():
        loss(model, fields(64)).backward()
    record = probe.record()
    probe.detach()
    loka.apply_plan(model, serving(model, over=LEFT, wide=INT8))
    guard = loka.Guard(model, record, every=1, max_error=1e-9)  # which any rounding exceeds
    for seed in range(3):
        with guard.step(), torch.no_grad():
            model(fields(64, seed))
    assert {event.site for event in guard.events} == {"wide"}
    assert type(model.over) is LeftLinear


def test_a_model_in_16_bits_under_a_plan_of_it_alone_is_refused() -> None:
    plan = serving(model_of(), over=LEFT)
    with pytest.raises(LokaError, match=r"precision: measured with GEMMs in fp32, the weights here are torch\.bfloat16"):
        loka.apply_plan(model_of().bfloat16(), plan)


def test_where_it_cannot_run_it_is_an_error_or_falls_back() -> None:
    model = model_of()
    plan = serving(model, over=LEFT, wide=INT8)
    model.over.register_forward_hook(lambda module, args, y: y)
    with pytest.raises(KernelUnavailable, match="over"):
        loka.apply_plan(model, plan)
    applied = loka.apply_plan(model, plan, on_missing="high_precision")
    assert applied.sites == ("wide",)
    assert list(applied.fell_back) == ["over"]
    assert str(applied).startswith("1 of 3 sites in low precision\n")
