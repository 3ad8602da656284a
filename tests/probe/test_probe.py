"""What a Probe learns of a model that trains, and that the model does not notice."""

import pickle
import random
import re
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from probed import probe_steps, small_model
from torch import Tensor, nn

import loka
from loka.core.errors import InvalidInput
from loka.core.gemm import Role
from loka.core.record import Record


def test_a_probe_that_takes_much_of_the_time_says_so_once_and_how_seldom_it_should_look(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By a clock on which a step takes 1 s, and each look at it moves on 0.5 s: learning a sample takes that."""
    clock = {"s": 0.0}

    def moved_on() -> float:
        clock["s"] += 0.5
        return clock["s"]

    monkeypatch.setattr("loka.probe.probe.time.perf_counter", moved_on)
    monkeypatch.setattr("loka.probe.clock.time.perf_counter", moved_on)
    monkeypatch.setattr("loka.probe.probe.LONG_S", 1.0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    probe = loka.Probe(model, every=4)
    for _ in range(40):
        with probe.step():
            model(torch.randn(8, 4)).sum().backward()
            clock["s"] += 0.5
    (told,) = [record.message for record in caplog.records if "takes" in record.message and record.levelname == "WARNING"]
    told_by = r"learning takes (\d+) % of the time of the steps, 250 ms a site and sample: with every=(\d+) it is 1 %"
    share = re.search(told_by, told)
    assert share
    assert int(share[1]) == pytest.approx(100 * 0.5 / 4, abs=1)
    assert int(share[2]) == pytest.approx(100 * 0.5, abs=1)


def test_an_input_by_its_name_is_seen() -> None:
    x_MK = torch.randn(8, 4)
    site = probe_steps(nn.Linear(4, 2), lambda model: model(input=x_MK).sum()).sites[""]
    torch.testing.assert_close(site.mean_K, x_MK.mean(0))


def test_one_step_in_every_so_many_is_sampled() -> None:
    model = nn.Linear(4, 2)
    probe = loka.Probe(model, every=3)
    hooked = []
    for _ in range(7):
        with probe.step():
            hooked.append(bool(model._forward_hooks))
            model(torch.randn(5, 4)).sum().backward()
    assert hooked == [True, False, False, True, False, False, True]
    assert probe.record().sites[""].statistics["moments"].tensors["count"] > 10
    assert probe.record().steps_seen == 7
    assert probe.record().step_us > 0
    assert repr(probe.record()) == f"<Record on {probe.record().environment.device}: 1 sites, 7 steps, 0 findings>"


@pytest.mark.parametrize("is_compiled", [False, True])
def test_training_under_a_probe_is_bit_identical_to_training_without(is_compiled: bool) -> None:
    """Dropout draws the same numbers, gradients are the same, and no hook is left behind."""

    def train(model: nn.Module, probe: loka.Probe | None) -> dict[str, Tensor]:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        torch.manual_seed(1)
        for x_MK in torch.randn(9, 32, 12, generator=torch.Generator().manual_seed(2)):
            with probe.step() if probe else torch.enable_grad():
                model(x_MK).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return model.state_dict()

    plain, probed = small_model(), small_model()
    if is_compiled:
        plain.compile(backend="eager")
        probed.compile(backend="eager")
    probe = loka.Probe(probed, every=2)
    before = {name: dict(module.__dict__) for name, module in probed.named_modules()}
    expected, found = train(plain, None), train(probed, probe)
    probe.detach()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    for name, module in probed.named_modules():
        assert module.__dict__.keys() == before[name].keys()
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(parameter._backward_hooks is None for parameter in probed.parameters())


def test_a_parametrized_weight_is_read_without_a_trace() -> None:
    """A spectral norm takes a step of its iteration whenever its weight is read in training."""

    def train(*, probed: bool) -> tuple[nn.Module, Record | None]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Linear(6, 1))
        probe = loka.Probe(model, every=2, weights_over_time=True) if probed else None
        for x_MK in torch.randn(5, 8, 6, generator=torch.Generator().manual_seed(1)):
            with probe.step() if probe else torch.enable_grad():
                model(x_MK).sum().backward()
        return model, probe.record() if probe else None

    (plain, _), (probed, record) = train(probed=False), train(probed=True)
    assert all(torch.equal(value, probed.state_dict()[name]) for name, value in plain.state_dict().items())
    assert Role.WGRAD in record.sites["0"].roles
    torch.testing.assert_close(record.sites["0"].weight_NK, probed[0].weight.detach(), atol=0.1, rtol=0)


def test_training_is_the_same_whatever_forward_draws_and_keeps() -> None:
    """Its second run, behind the first sample, leaves no trace in random numbers of any kind, nor in what modules hold."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 1)
            self.generator = torch.Generator().manual_seed(3)
            self.recent: deque[float] = deque(maxlen=3)
            self.random, self.numpy = random.Random(4), [np.random.default_rng(5), np.random.RandomState(6)]
            self.bank = {"seen": {"times": [0], "rows": np.zeros(1)}}
            self.memory = torch.zeros(6)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if random.random() < 0.5 or np.random.rand() < 0.3:  # noqa: NPY002
                    x = layer(x).relu()
            x = x + torch.rand(6, generator=self.generator) + len(self.recent) + self.random.random()
            x = x + sum(one.uniform() for one in self.numpy) + self.bank["seen"]["rows"][0] + self.bank["seen"]["times"][0]
            self.bank["seen"]["rows"] += 1
            self.bank["seen"]["times"][0] += 1
            self.recent.append(x.mean().item())
            self.memory.mul_(0.5).add_(x.detach().mean(0))
            return self.head(x + self.memory)

    def train(*, probed: bool) -> list[float]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        model = Odd()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        probe = loka.Probe(model, every=2) if probed else None
        losses = []
        for x_MK in torch.randn(5, 8, 6):
            with probe.step() if probe else nullcontext():
                loss = model(x_MK).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    assert train(probed=True) == train(probed=False)


def test_a_model_that_is_called_by_names_or_not_by_its_forward() -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, *, dense: Tensor) -> Tensor:
            y = self.body(dense).relu()
            return self.head(y if y.sum() > -1 else -y)

        def training_step(self, dense: Tensor) -> Tensor:
            return self(dense=dense).sum() if self.training else self.forward(dense=dense).sum()

    def probed(trains: bool, **options: object) -> Record:
        model = Keyed().train(trains)
        probe = loka.Probe(model, every=1, **options)
        with probe.step():
            model.training_step(torch.randn(8, 4)).backward()
        return probe.record()

    by_name = probed(trains=True)
    assert {name: (site.is_head, site.stays) for name, site in by_name.sites.items()} == {
        "body": (False, None), "head": (True, None),
    }  # fmt: skip
    past = probed(trains=False)  # nobody calls the model itself
    assert all(site.stays and "may be a prediction head" in site.stays for site in past.sites.values())
    told = probed(trains=False, example={"dense": torch.randn(2, 4)})
    assert {name: (site.is_head, site.stays) for name, site in told.sites.items()} == {
        "body": (False, None), "head": (True, None),
    }  # fmt: skip
    with pytest.raises(InvalidInput, match="example must be a tuple"):
        loka.Probe(Keyed(), example=torch.randn(2, 4))


def test_subclasses_that_take_or_give_something_else_are_passed_by() -> None:
    class Two(nn.Linear):
        def forward(self, mask: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x), mask

    class Named(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.two, self.named, self.head = Two(4, 4), Named(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.named(x=self.two(torch.ones(1), x)[0]))

    model = Model()
    probe = loka.Probe(model, every=1)
    with probe.step():
        model(torch.randn(8, 4)).sum().backward()
    record = probe.record()
    assert [(site.calls, bool(site.stays)) for site in record.sites.values()] == [({}, True), ({}, True), ({8: 1.0}, False)]


class ByTorch(nn.TransformerEncoderLayer):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + 0


@pytest.mark.parametrize("layer", [nn.TransformerEncoderLayer, ByTorch])
def test_layers_that_torch_passes_by_when_it_serves_are_planned_for_training_alone(layer: Any) -> None:
    class Encoded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = layer(32, 2, 64, dropout=0.0, batch_first=True)
            self.after, self.head = nn.Linear(32, 32), nn.Linear(32, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.after(self.encoder(x))))

    model = Encoded()
    probe = loka.Probe(model, every=1)
    with probe.step():
        model(torch.randn(8, 4, 32)).sum().backward()
    survey = loka.measure(probe.record(), kernels=["reference.rowwise"])
    reasons = {site.site: site.reason for site in loka.make_plan(survey, goal="serving").sites}
    assert "torch's fast path" in reasons["encoder.linear1"]
    assert "torch's fast path" not in reasons["after"]
    plan = loka.make_plan(survey, goal="training")
    assert not any("fast path" in site.reason for site in plan.sites)


def test_the_model_inside_a_wrapper_is_probed_by_its_own_names() -> None:
    class Wrapper(nn.parallel.DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)
            self.module = module

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x)

    model = Wrapper(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    probe = loka.Probe(model, every=1)
    with probe.step():
        model(torch.randn(8, 4)).sum().backward()
    assert {name: site.is_head for name, site in probe.record().sites.items()} == {"0": False, "1": True}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_layers_that_nothing_can_stand_in_for_are_said(tmp_path: Path) -> None:
    class Scaled(nn.Linear):
        pass

    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.utils.weight_norm(nn.Linear(6, 6)), Scaled(6, 6),
        nn.Linear(6, 6), nn.Linear(6, 1),
    )  # fmt: skip
    probe = loka.Probe(model, every=1)
    for x_MK in torch.randn(2, 16, 6):
        with probe.step():
            model(x_MK).sum().backward()
    probe.record().save(tmp_path)
    told = {name: site.stays for name, site in Record.load(tmp_path).sites.items()}
    assert told == {
        "0": "is a ParametrizedLinear, and only torch.nn.Linear is swapped",
        "1": "holds no weight of its own, but makes one in every call: remove its weight norm or the like first",
        "2": "is a Scaled, and only torch.nn.Linear is swapped",
        "3": None,
        "4": None,
    }
    survey = loka.measure(loka.Record.load(tmp_path), kernels=["reference.rowwise"])
    assert {site.site: site.stays for site in survey.sites} == told


@pytest.mark.parametrize("compile_first", [True, False])
def test_compiled_graphs_stay_between_samples(compile_first: bool) -> None:
    """One whole graph, compiled once: neither hooks nor a counter make it anew, and sampled steps learn all the same."""
    model, graphs = small_model(), []

    def backend(graph: torch.fx.GraphModule, example: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    probe = None if compile_first else loka.Probe(model, every=4)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    probe = probe or loka.Probe(compiled, every=4)
    for _ in range(13):
        with probe.step():
            compiled(torch.randn(32, 12)).mean().backward()
    assert len(graphs) == 1
    record = probe.record()
    assert record.sites["0"].calls == {32: 1.0}
    assert record.sites["0"].trains


def test_a_step_that_fails_leaves_no_hook_and_teaches_nothing() -> None:
    model = small_model()
    probe = loka.Probe(model)
    with pytest.raises(RuntimeError), probe.step():
        model(torch.randn(3, 11))
    assert not model[0]._forward_hooks
    with pytest.raises(InvalidInput, match="ended without an exception"):
        probe.record()


def test_only_gradients_that_somebody_asks_for_are_a_sites_roles() -> None:
    """Nothing learns in front of the first layer, the second is frozen, and the third is not trained at all."""
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    model[1].requires_grad_(False)

    def step(model: nn.ModuleList) -> Tensor:
        with torch.no_grad():
            model[2](torch.randn(4, 8))
        return model[1](model[0](torch.randn(4, 8))).sum()

    record = probe_steps(model, step)
    assert [site.roles for site in record.sites.values()] == [
        (Role.FPROP, Role.WGRAD),
        (Role.FPROP, Role.DGRAD),
        (Role.FPROP,),
    ]
    merged = record.merge(probe_steps(model, lambda model: model[0](torch.randn(4, 8, requires_grad=True)).sum()))
    assert merged.sites["0"].roles == tuple(Role)


def test_neighbours_are_recorded() -> None:
    sites = probe_steps(small_model(), lambda model: model(torch.randn(8, 12)).sum()).sites
    assert (sites["0"].norm_kind, sites["0"].activation_kind) == ("LayerNorm", "SiLU")
    assert (sites["0"].norm, sites["0"].activation) == ("1", "2")
    assert sites["4"].is_head


def test_what_a_device_has_not_answered_yet_is_learned_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def probed(is_there: bool) -> tuple[loka.Record, int]:
        monkeypatch.setattr("loka.probe.aside.Answer.is_there", lambda self: is_there)
        torch.manual_seed(0)
        model = small_model()
        probe = loka.Probe(model, every=8)
        for step in range(12):
            x_MK = torch.randn(64, 12)
            x_MK[3] = torch.nan if step == 8 else 0.0
            with probe.step():
                model(x_MK).square().mean().backward()
        waiting = len(probe._unlearned)
        return probe.record(), waiting

    (record, none_waits), (later, waiting) = probed(is_there=True), probed(is_there=False)
    assert (none_waits, waiting) == (0, len(record.sites))
    for name, site in record.sites.items():
        assert site.notes == later.sites[name].notes
        assert "NaN" in " ".join(site.notes)
        for key, statistic in site.statistics.items():
            for part, tensor in statistic.tensors.items():
                assert torch.equal(tensor, later.sites[name].statistics[key].tensors[part]), (name, key, part)


@pytest.mark.gpu
@pytest.mark.parametrize("is_compiled", [False, True])
def test_no_step_waits_for_the_gpu(is_compiled: bool) -> None:
    """But the first sample."""
    model = small_model().cuda()
    if is_compiled:
        model.compile()
    probe = loka.Probe(model, every=10)
    x_MK = torch.randn(256, 12, device="cuda")

    def step() -> None:
        with probe.step():
            model(x_MK).square().mean().backward()

    for _ in range(41):  # the compiler's work, and a sample in which it is every statistic's turn
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(18):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not probe._unlearned
    assert probe.record().step_us > 0


def test_an_optimizer_that_casts_weights_in_its_steps_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loka.nn.adamw.WORTH_IT", 12 * 16)
    model = nn.Sequential(nn.Linear(12, 16), nn.Linear(16, 4), nn.Linear(4, 48), nn.Linear(48, 48), nn.Linear(48, 48))
    model[4].weight = model[3].weight
    others = torch.optim.AdamW(model[2].parameters(), lr=0.1)
    optimizer = loka.AdamW([*model[:2].parameters(), model[3].weight], lr=0.1)
    record = probe_steps(model, lambda model: model(torch.randn(32, 12)).sum())
    assert [name for name, site in record.sites.items() if site.cast_in_step] == ["0"]
    assert Record.load(record.save(tmp_path)).sites["0"].cast_in_step
    del optimizer, others
    record = probe_steps(model, lambda model: model(torch.randn(32, 12)).sum())
    assert not any(site.cast_in_step for site in record.sites.values())


def test_a_copy_of_a_module_that_holds_its_probe_holds_the_same() -> None:
    model = small_model()
    model.probe = loka.Probe(model, every=1)  # type: ignore[assignment]
    average = torch.optim.swa_utils.AveragedModel(model)
    with model.probe.step():
        model(torch.randn(8, 12)).sum().backward()
    average.update_parameters(model)
    assert average.module.probe is model.probe
    assert model.probe.record().sites["0"].was_called
    with pytest.raises(InvalidInput, match="cannot be pickled: keep it out of the module"):
        pickle.dumps(model)


def test_steps_that_all_raised_are_not_said_to_be_missing() -> None:
    probe = loka.Probe(small_model(), every=1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), probe.step():
            raise ZeroDivisionError
    with pytest.raises(InvalidInput, match="no step that the Probe saw, 3 so far, was sampled to its end"):
        probe.record()


def test_a_module_whose_name_holds_a_dot_is_refused() -> None:
    model = small_model()
    model._modules["t.x"] = nn.Linear(4, 4)
    with pytest.raises(InvalidInput, match=r"the model holds a module as 't\.x': give it a name without a dot"):
        loka.Probe(model)
