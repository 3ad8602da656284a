"""Models that do not do the same for every batch, or not in one precision: what the Probe says of their sites."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import loka
from loka.core.errors import InvalidInput
from loka.core.recipe import Format
from loka.core.record import Record
from loka.nn.block_norm import BlockNorm


class Domains(nn.Module):
    """One body and, for each domain, a tower and a head; all towers go through one activation."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.act = nn.Linear(8, 16), nn.ReLU()
        self.tower = nn.ModuleDict({name: nn.Linear(16, 16) for name in "ab"})
        self.head = nn.ModuleDict({name: nn.Linear(16, 5) for name in "ab"})

    def forward(self, x: Tensor, domain: str = "a") -> Tensor:
        return self.head[domain](self.act(self.tower[domain](self.body(x))))


def record_of(model: nn.Module, *steps: tuple[object, ...]) -> Record:
    probe = loka.Probe(model, every=1)
    for given in steps:
        with probe.step():
            model(*given).sum().backward()
    return probe.record()


def test_a_model_that_branches_is_looked_at_in_every_branch() -> None:
    x = torch.randn(32, 8)
    record = record_of(Domains(), (x, "a"), (x, "b"), (x, "a"), (x, "b"))
    assert [name for name, site in record.sites.items() if site.is_head] == ["head.a", "head.b"]
    assert not any(site.stays for site in record.sites.values())
    assert not any("never called" in site.notes for site in record.sites.values())
    assert {record.sites[f"tower.{name}"].activation for name in "ab"} == {None}  # a block of one would take it from the other
    assert all(site.producer is None for site in record.sites.values())  # the body feeds now one tower, now the other


@pytest.mark.parametrize("example", [None, (torch.randn(4, 8), "a"), (torch.randn(4, 8), "b")])
def test_so_is_one_whose_branches_are_all_in_one_step(example: tuple[Tensor, str] | None) -> None:
    """A plan that knew of one would take the activation away from the other."""
    model, x = Domains(), torch.randn(32, 8)
    probe = loka.Probe(model, every=1, example=example)
    for _ in range(2):
        with probe.step():
            (model(x, "a").sum() + model(2 * x, "b").sum() + model(3 * x, "a").sum()).backward()
    sites = probe.record().sites
    assert [name for name, site in sites.items() if site.is_head] == ["head.a", "head.b"]
    assert {(site.activation, site.producer, site.stays) for site in sites.values()} == {(None, None, None)}
    assert {name: dict(site.calls) for name, site in sites.items() if name != "body"} == {
        "tower.a": {32: 2.0}, "tower.b": {32: 1.0}, "head.a": {32: 2.0}, "head.b": {32: 1.0},
    }  # fmt: skip


def test_towers_that_the_model_is_called_for_one_by_one_are_planned_both() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.ModuleDict({name: nn.Sequential(nn.Linear(8, 16), nn.ReLU()) for name in ("user", "item")})
            self.out = nn.Linear(16, 4)

        def forward(self, x: Tensor, *, side: str) -> Tensor:
            return self.out(self.tower[side](x))

    model = Towers()
    probe = loka.Probe(model, every=1)
    with probe.step():
        (model(torch.randn(32, 8), side="user") @ model(torch.randn(32, 8), side="item").t()).logsumexp(1).sum().backward()
    sites = probe.record().sites
    assert {name: (site.activation, site.is_head, site.stays) for name, site in sites.items()} == {
        "tower.user.0": ("tower.user.1", False, None),
        "tower.item.0": ("tower.item.1", False, None),
        "out": (None, True, None),
    }


@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_a_function_that_reads_a_weight_in_one_branch_is_told(order: tuple[bool, bool]) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.side, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor, is_tied: bool) -> Tensor:
            y = self.body(x).relu()
            return self.head(self.side(nn.functional.linear(y, self.body.weight)) if is_tied else y)

    record = record_of(Tied(), *((torch.randn(32, 8), is_tied) for is_tied in order))
    assert record.sites["body"].notes == ("its parameters are read by linear",)
    assert {name: site.read_by for name, site in record.sites.items()} == {"body": "linear", "side": None, "head": None}


def test_a_branch_is_known_as_if_it_were_alone() -> None:
    x = torch.randn(32, 8)
    record = record_of(Domains(), (x, "a"), (x, "a"))
    assert record.sites["tower.a"].activation == "act"
    assert record.sites["tower.a"].producer == "body"
    assert record.sites["tower.b"].notes == ("never called",)


def test_a_layer_whose_output_leaves_in_what_is_not_looked_into_is_told_so() -> None:
    """An example, which is the remedy where forward was not run, would show no more of it."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> torch.distributions.Categorical:
            return torch.distributions.Categorical(logits=self.head(self.body(x).relu()))

    model, x = Policy(), torch.randn(32, 8)
    for example in (None, (x,)):
        probe = loka.Probe(model, every=1, example=example)
        with probe.step():
            model(x).entropy().sum().backward()
        sites = probe.record().sites
        assert sites["body"].stays is None
        assert sites["head"].stays == (
            "may be a prediction head: forward returns its output in an object of a class that is not looked into, or not at "
            "all. Return it in a tuple, a dict or a dataclass"
        )


def test_an_activation_behind_two_sites_is_behind_none() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.act(self.b(self.act(self.a(x)))))

    record = record_of(Shared(), (torch.randn(32, 8),))
    assert [site.activation for site in record.sites.values()] == [None, None, None]
    assert [site.producer for site in record.sites.values()] == [None, None, None]


def test_a_layer_inside_what_is_called_a_norm_is_looked_into() -> None:
    class ProjNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.normalize(self.fc(x), dim=-1)

    record = record_of(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), ProjNorm()), (torch.randn(32, 8),))
    assert record.sites["2.fc"].is_head or record.sites["2.fc"].stays
    assert "never called" not in record.sites["2.fc"].notes


@pytest.mark.parametrize("body_dtype", [torch.float32, torch.bfloat16])
def test_a_layer_in_another_precision_than_the_model_stays(body_dtype: torch.dtype) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.side, self.head = nn.Linear(32, 32), nn.Linear(32, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=body_dtype is torch.bfloat16):
                y = self.body(x).relu()
            with torch.autocast("cpu", torch.bfloat16, enabled=body_dtype is torch.float32):
                return self.head(self.side(y.float()).relu()).float()

    record = record_of(Mixed(), (torch.randn(32, 32),))
    assert record.dtype is (Format.FP32 if body_dtype is torch.float32 else Format.BF16)
    assert record.sites["body"].stays is None
    assert "which kernels are compared with" in (record.sites["side"].stays or "")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_layer_that_nothing_can_be_compared_with_stays_and_the_others_are_measured(dtype: torch.dtype) -> None:
    class Calibrated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.calibration, self.head = nn.Linear(32, 32), nn.Linear(32, 32).to(dtype), nn.Linear(32, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.calibration(self.body(x).relu().to(dtype)).float())

    torch.manual_seed(0)
    model, x = Calibrated(), torch.randn(32, 32)
    record = record_of(model, (x,))
    told = f"runs in {str(dtype)[6:]}, for which there is no baseline to compare with"
    assert (record.dtype, record.sites["calibration"].stays) == (Format.FP32, told)
    assert record.sites["calibration"].calls == {32: 1.0}
    probe = loka.Probe(model, every=1)
    with probe.step():
        model(x).sum().backward()
    with probe.step():  # of that layer alone
        model.calibration(x.to(dtype)).float().sum().backward()
    assert probe.record().dtype is Format.FP32
    survey = loka.measure(record, kernels=["reference.rowwise"], device="cpu")
    errors = {site.site: [candidate.error for candidate in site.candidates] for site in survey.sites}
    assert errors["body"]
    assert not errors["calibration"]
    reasons = {site.site: site.reason for site in loka.make_plan(survey, goal="serving").sites}
    assert told in reasons["calibration"]


def test_each_backward_pass_of_a_step_shows_its_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    probe = loka.Probe(model, every=1)
    with probe.step():
        y = model(torch.randn(64, 8))
        (1000 * y[:, 0].sum()).backward(retain_graph=True)
        y[:, 1].sum().backward()
    site = probe.record().sites["0"]
    assert site.calls == {64: 1.0}  # forward ran once
    _, dy = site.sample(512, torch.Generator().manual_seed(0))
    assert dy is not None
    sizes = dy.norm(dim=1)
    assert (sizes > 10).any()
    assert ((sizes > 0) & (sizes < 10)).any()


def test_calls_without_a_gradient_beside_others_are_told_unless_they_are_repetitions() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(64, 8, requires_grad=True)

    def notes(step: Callable[[], Tensor]) -> list[str]:
        probe = loka.Probe(model, every=1, example=(x,))
        with probe.step():
            step().sum().backward()
        record = probe.record()
        assert record.sites["0"].calls == {64: 1.0}
        return [note for note in record.sites["0"].notes if "without a gradient" in note]

    def stopped(other: Tensor) -> Tensor:
        with torch.no_grad():
            model(other)
        return model(x)

    assert notes(lambda: checkpoint(model, x, use_reentrant=True)) == []
    assert notes(lambda: checkpoint(model, x, use_reentrant=False)) == []
    assert notes(lambda: stopped(1000 * x))
    assert notes(lambda: stopped(x[:32]))


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_so_are_steps_without_a_gradient(order: tuple[bool, bool]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    probe = loka.Probe(model, every=1)
    for trains in order:
        with torch.set_grad_enabled(trains), probe.step():
            loss = model(torch.randn(16, 8)).sum()
            if trains:
                loss.backward()
    assert any("without a gradient too" in note for note in probe.record().sites["0"].notes)


@pytest.mark.parametrize("trains", [True, False])
def test_a_step_without_a_backward_pass_is_told_where_there_might_be_one(
    trains: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).train(trains)
    probe = loka.Probe(model, every=1)
    with caplog.at_level(logging.WARNING, "loka"):
        for _ in range(3):
            with probe.step():
                loss = model(torch.randn(4, 8)).mean()
            loss.backward()
    assert caplog.text.count("put backward() inside `with probe.step():` too") == trains


def test_an_example_on_which_the_model_does_not_run_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    probe = loka.Probe(model, every=1, example=(torch.randn(4, 7),))
    with caplog.at_level(logging.WARNING, "loka"), probe.step():
        model(torch.randn(4, 8)).sum().backward()
    assert "does not run on the example that the Probe was given: RuntimeError: mat1 and mat2 shapes" in caplog.text


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_without_features_is_passed_by() -> None:
    model = nn.Sequential(nn.Linear(8, 0), nn.ReLU(), nn.Linear(0, 4))
    record = record_of(model, (torch.randn(4, 8),))
    assert [site.calls for site in record.sites.values()] == [{}, {}]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_calls_whose_rows_are_not_to_be_had_are_passed_by() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    probe = loka.Probe(model, every=1)
    jagged = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    with probe.step():
        model(jagged).values().sum().backward()
    for sparse in (torch.eye(8).to_sparse(), torch.eye(8).to_sparse_csr()):
        with probe.step():
            model[0](sparse).sum().backward()
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, parameters, (x,)).sum()

    with probe.step():
        vmap(grad(loss), in_dims=(None, 0))(parameters, torch.randn(4, 8))
    with probe.step():
        model(torch.randn(32, 8)).sum().backward()
    assert probe.record().sites["0"].calls == {32: pytest.approx(1 / 5)}


def test_a_layer_that_was_replaced_is_told(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    probe = loka.Probe(model, every=1)
    with probe.step():
        model(torch.randn(32, 8)).sum().backward()
    model[0] = nn.Linear(8, 8)
    with pytest.raises(InvalidInput, match="0: another module than when this Probe was made"), probe.step():
        pass


def test_a_record_that_could_not_be_written_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    probe = loka.Probe(model, every=1)
    with probe.step():
        model(torch.randn(32, 8)).sum().backward()
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "loka"):
        probe.save(tmp_path / "file" / "run")
        probe.detach()
    assert "could not be written" in caplog.text


@pytest.mark.parametrize(
    ("between", "producer"), [(lambda h: h, "first"), (lambda h: h.flip(1), None), (lambda h: h.reshape(4, 8, 16), None)]
)
def test_a_chain_leads_to_what_reads_a_block_as_it_is(between: Callable[[Tensor], Tensor], producer: str | None) -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.act, self.second, self.head = (
                nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 1),
            )  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.second(between(self.act(self.norm(self.first(x))))).relu())

    model = Chain()
    probe = loka.Probe(model, every=1)
    with probe.step():
        model(torch.randn(32, 8)).mean().backward()
    assert probe.record().sites["second"].producer == producer


@pytest.mark.parametrize(
    ("norm", "act", "absorbed"),
    [
        (nn.LayerNorm(16), nn.ReLU(), ("norm", "act", "first")),
        (nn.LayerNorm(16), F.relu, ("norm", None, None)),
        (partial(F.layer_norm, normalized_shape=(16,)), nn.ReLU(), (None, None, None)),
        (nn.Identity(), F.relu, (None, None, None)),
    ],
)
def test_a_function_is_not_absorbed_and_nothing_behind_it(
    norm: Callable[[Tensor], Tensor], act: Callable[[Tensor], Tensor], absorbed: tuple[str | None, str | None, str | None]
) -> None:
    """A kernel that ran what is around it would run past it: the function would come behind both, or behind a whole chain."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)
            self.norm, self.act = norm, act

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.second(self.act(self.norm(self.first(x)))).relu())

    model = Chain()
    probe = loka.Probe(model, every=1)
    with probe.step():
        model(torch.randn(32, 8)).mean().backward()
    first, second = (probe.record().sites[name] for name in ("first", "second"))
    assert (first.norm, first.activation, second.producer) == absorbed
    assert first.activation_kind in ("relu", "ReLU")


class Stages(nn.Module):
    """Runs to its end, or stops early: then the body is the head, called twice, and no norm stands in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body, self.end = BlockNorm(8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, *, early: bool) -> Tensor:
        return self.body(nn.functional.silu(self.body(x))) if early else self.end(self.body(self.norm(x)))


@pytest.mark.parametrize("early_first", [True, False])
def test_what_holds_in_one_branch_alone_is_told_and_nothing_is_built_on_it(early_first: bool) -> None:
    model, x = Stages(), torch.randn(32, 8)
    probe = loka.Probe(model, every=1)
    for early in (early_first, not early_first):
        with probe.step():
            model(x, early=early).sum().backward()
    record = probe.record()
    body = record.sites["body"]
    assert (body.is_head, body.entry) == (True, None)
    assert "called 2 times" in " ".join(body.notes)
    assert record.uncovered == ("silu in the model",)


class Elsewhere(nn.Module):
    """A norm behind a layer and in front of another, and a layer that is called twice, once behind that one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.norm, self.own = BlockNorm(16), BlockNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.again(torch.tanh(self.norm(self.first(x)))))
        return self.head(self.again(self.own(self.last(x.sin()))).relu())


def test_what_runs_elsewhere_too_is_in_no_block_and_in_no_chain() -> None:
    model = Elsewhere()
    probe = loka.Probe(model, every=1)
    with probe.step():
        model(torch.randn(32, 8)).mean().backward()
    sites = probe.record().sites
    assert {name: site.norm for name, site in sites.items()} == {"first": None, "again": None, "last": "own", "head": None}
    assert all(site.producer is None for site in sites.values())
    told = "norm behind it runs elsewhere too, so that no block can absorb it"
    assert [name for name, site in sites.items() if told in site.notes] == ["first"]


def test_every_domain_of_many_is_looked_at() -> None:
    """More of them than flows that reach nothing new may be."""
    names = [f"d{index}" for index in range(12)]
    model = Domains()
    model.tower = nn.ModuleDict({name: nn.Linear(16, 16) for name in names})
    model.head = nn.ModuleDict({name: nn.Linear(16, 5) for name in names})
    record = record_of(model, *((torch.randn(16, 8), name) for name in names))
    assert [name for name, site in record.sites.items() if site.is_head] == [f"head.{name}" for name in names]
    assert not any(site.stays for site in record.sites.values())
