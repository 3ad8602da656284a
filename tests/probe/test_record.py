"""The Record's file, its errors, and Records that are merged."""

import dataclasses
import threading
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import loka
from loka.core.errors import InvalidFile, InvalidInput
from loka.core.recipe import Format
from loka.core.record import Record
from loka.core.record_file import FILE, SCHEMA, id_in
from loka.core.site_record import Finding


def make_model(width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 1))


def record_of(batches: list[torch.Tensor], model: nn.Module | None = None, trains: bool = True, **options: object) -> Record:
    model = model or make_model()
    probe = loka.Probe(model, every=1, half_life=None, **options)
    for x_MK in batches:
        with torch.set_grad_enabled(trains), probe.step():
            loss = model(x_MK).square().mean()
            if trains:
                loss.backward()
    return probe.record()


@pytest.fixture(scope="module")
def record() -> Record:
    return record_of([torch.randn(64, 12) + 3])


def test_a_record_comes_back_as_it_was(record: Record, tmp_path: Path) -> None:
    path = record.save(tmp_path / "run")
    assert path == tmp_path / "run" / FILE
    for loaded in (Record.load(tmp_path / "run"), Record.load(path)):
        for field in dataclasses.fields(Record):
            if field.name != "sites":
                assert getattr(loaded, field.name) == getattr(record, field.name), field.name
        assert list(loaded.sites) == list(record.sites)
        for name, site in record.sites.items():
            other = loaded.sites[name]
            assert (other.k, other.n, other.calls, other.consumers) == (site.k, site.n, site.calls, site.consumers)
            assert (other.bias_norms, other.notes, other.is_head) == (site.bias_norms, site.notes, site.is_head)
            assert torch.equal(other.weight_NK, site.weight_NK)
            assert torch.equal(other.bias_N, site.bias_N)
            assert other.statistics.keys() == site.statistics.keys()
            for key, statistic in site.statistics.items():
                assert other.statistics[key].rule is statistic.rule
                for tensor_name, tensor in statistic.tensors.items():
                    assert torch.equal(other.statistics[key].tensors[tensor_name], tensor)


def test_sites_whose_names_begin_alike_keep_what_is_theirs(tmp_path: Path) -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            names = ("user", "user/age", "user/age/weight", "item")
            self.tower = nn.ModuleDict({name: nn.Linear(12, 5 + len(name)) for name in names})

        def forward(self, x_MK: torch.Tensor) -> torch.Tensor:
            return torch.cat([layer(x_MK) for layer in self.tower.values()], dim=1)

    record = record_of([torch.randn(32, 12)], Towers())
    record.save(tmp_path)
    loaded = Record.load(tmp_path)
    assert list(loaded.sites) == [f"tower.{name}" for name in ("user", "user/age", "user/age/weight", "item")]
    for name, site in record.sites.items():
        assert torch.equal(loaded.sites[name].weight_NK, site.weight_NK)
        assert loaded.sites[name].statistics.keys() == site.statistics.keys()


def test_a_truncated_file_is_told(record: Record, tmp_path: Path) -> None:
    path = record.save(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InvalidFile, match=r"record.safetensors cannot be read .*: make it again with `loka probe"):
        Record.load(tmp_path)


def test_a_foreign_file_is_told(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / FILE)
    with pytest.raises(InvalidFile, match="holds tensors but no Record"):
        Record.load(tmp_path)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidFile, match=r"there is no .*: make it with `loka probe WORKLOAD -o"):
        Record.load(tmp_path)


@pytest.mark.parametrize("change", [{"k": 65}, {"n": 1}, {"calls": {"64": 0.0}}, {"calls": {"-5": 1.0}}, "twice"])
def test_sites_that_are_not_what_the_file_holds_are_told(
    record: Record, tmp_path: Path, change: dict[str, object] | str
) -> None:
    path = record.save(tmp_path)
    with safe_open(path, framework="pt") as file:
        fields = msgspec.json.decode(file.metadata()["document"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    first = fields["sites"][0]
    fields["sites"] = [first, *fields["sites"]] if isinstance(change, str) else [first | change, *fields["sites"][1:]]
    save_file(tensors, path, metadata={"document": msgspec.json.encode(fields).decode()})
    with pytest.raises(InvalidFile, match="it was written by something else"):
        Record.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "loka.record/99"}, "written by a newer LoKA"),
        ({"schema": "loka.plan/1"}, "is no loka.record"),
        ({"surprise": 1}, "does not hold what loka.record/"),
        ({"steps_seen": "many"}, "does not hold what loka.record/"),
    ],
)
def test_another_document_is_told(record: Record, tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = record.save(tmp_path)
    with safe_open(path, framework="pt") as file:
        fields = msgspec.json.decode(file.metadata()["document"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert fields["schema"] == SCHEMA
    save_file(tensors, path, metadata={"document": msgspec.json.encode(fields | change).decode()})
    with pytest.raises(InvalidFile, match=message):
        Record.load(path)


def test_a_record_is_taken_now_and_written_later(tmp_path: Path) -> None:
    """Training goes on while the file is written: what it holds is of the moment it was asked for."""
    model = make_model()
    probe = loka.Probe(model, every=1)
    with probe.step():
        model(torch.randn(8, 12)).sum().backward()
    writer_may_go = threading.Event()
    probe._writer.submit(writer_may_go.wait)
    before = model[0].weight.detach().clone()
    saving = probe.save(tmp_path)
    assert not saving.done()
    with torch.no_grad():
        model[0].weight.add_(1)
    with probe.step():
        model(torch.randn(8, 12) + 100).sum().backward()
    writer_may_go.set()
    loaded = Record.load(saving.result(timeout=30))
    assert torch.equal(loaded.sites["0"].weight_NK, before)
    assert loaded.steps_seen == 1
    probe.detach()


def test_a_record_can_be_saved_behind_the_last_step_and_detach(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    probe = loka.Probe(model)
    with probe.step():
        model(torch.randn(8, 4)).sum().backward()
    probe.detach()
    assert Record.load(probe.save(tmp_path).result()).sites.keys() == {""}


def test_the_record_of_a_model_that_diverged_comes_back(tmp_path: Path) -> None:
    """JSON has no NaN, and the bias before it became one is what the findings speak of."""
    model = nn.Linear(4, 2)
    probe = loka.Probe(model, every=1)
    for bias in (3.0, torch.nan, torch.inf):
        with probe.step():
            model(torch.randn(8, 4)).sum().backward()
            nn.init.constant_(model.bias, bias)
    path = probe.record().save(tmp_path)
    assert Record.load(path).sites[""].bias_norms == pytest.approx((3.0 * 2**0.5,))


def test_a_save_that_fails_says_so_when_it_is_asked_for(tmp_path: Path) -> None:
    model = make_model()
    probe = loka.Probe(model)
    with probe.step():
        model(torch.randn(8, 12)).sum().backward()
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="file is a file: name a folder"):
        probe.save(tmp_path / "file" / "run").result(timeout=30)
    probe.detach()


def test_two_shards_merge_to_the_record_of_all_rows() -> None:
    first = [torch.randn(200, 12) + 5]
    second = [torch.randn(40, 12) + 4, torch.randn(40, 12) - 7]
    model = make_model()
    both = record_of([*first, *second], model)
    parts = record_of(first, model), record_of(second, model)
    merged = parts[0].merge(parts[1])
    assert merged.steps_seen == 3
    for name, site in both.sites.items():
        shards = merged.sites[name].statistics
        found_D, expected_D = shards["moments"].tensors["mean_D"], site.statistics["moments"].tensors["mean_D"]
        torch.testing.assert_close(found_D[: site.k], expected_D[: site.k], rtol=1e-5, atol=1e-5)
        found_DD, expected_DD = shards["moments"].tensors["scatter_DD"], site.statistics["moments"].tensors["scatter_DD"]
        torch.testing.assert_close(found_DD[: site.k, : site.k], expected_DD[: site.k, : site.k], rtol=1e-5, atol=1e-4)
        for key in ("dw_NK", "m", "products"):
            torch.testing.assert_close(shards["gradients"].tensors[key], site.statistics["gradients"].tensors[key])
        counts_B = [part.sites[name].statistics["binades"].tensors["x_B"] for part in parts]
        assert torch.equal(shards["binades"].tensors["x_B"], counts_B[0] + counts_B[1])
        assert merged.sites[name].calls == pytest.approx(site.calls)
    assert both.sites["0"].statistics["gradients"].is_exact
    assert not both.sites["0"].statistics["quantiles"].is_exact


def test_gradients_of_two_directions_are_merged_with_a_note() -> None:
    """What is split along one direction is not what is split along another."""
    model = nn.Linear(12, 16)
    records = []
    for direction_N in (torch.eye(16)[0], torch.eye(16)[1]):
        probe = loka.Probe(model, every=1)
        with probe.step():
            (model(torch.randn(64, 12)) * (direction_N + 0.1) * torch.randn(64, 1)).sum().backward()
        records.append(probe.record())
    assert not any("different directions" in note for note in records[0].merge(records[0]).sites[""].notes)
    assert any("different directions" in note for note in records[0].merge(records[1]).sites[""].notes)


def test_a_file_from_before_norms_in_front_is_read(record: Record, tmp_path: Path) -> None:
    path = record.save(tmp_path)
    with safe_open(path, framework="pt") as file:
        fields = msgspec.json.decode(file.metadata()["document"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for site in fields["sites"]:
        for newer in ("entry", "entry_block", "cast_in_step", "across"):
            site.pop(newer, None)
    save_file(tensors, path, metadata={"document": msgspec.json.encode(fields | {"schema": "loka.record/2"}).decode()})
    older = Record.load(path)
    assert {name: (site.entry, site.cast_in_step, site.across) for name, site in older.sites.items()} == dict.fromkeys(
        record.sites, (None, False, None)
    )
    assert [site.producer for site in older.sites.values()] == [site.producer for site in record.sites.values()]


def test_an_older_file_is_told(record: Record, tmp_path: Path) -> None:
    """One with moments of dy, from which nothing is drawn any more."""
    path = record.save(tmp_path)
    with safe_open(path, framework="pt") as file:
        fields = msgspec.json.decode(file.metadata()["document"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    document = msgspec.json.encode(fields | {"schema": "loka.record/1"}).decode()
    save_file(tensors, path, metadata={"document": document})
    with pytest.raises(InvalidFile, match=r"older schema loka.record/1.*make it again with `loka probe"):
        Record.load(path)


def test_what_is_no_record_does_not_merge(record: Record) -> None:
    with pytest.raises(InvalidInput, match=r"the other record.*load it with loka\.Record\.load"):
        record.merge("run")  # type: ignore[arg-type]


def test_records_of_two_models_do_not_merge() -> None:
    with pytest.raises(InvalidInput, match="records of two models"):
        record_of([torch.randn(8, 12)]).merge(record_of([torch.randn(8, 12)], make_model(width=8)))


@pytest.mark.parametrize("trained_first", [True, False])
def test_a_shard_without_gradients_adds_nothing_to_one_with(trained_first: bool) -> None:
    """As inside one Probe: x that was seen without its dy cannot be paired with any."""
    trained, served = record_of([torch.randn(64, 12)]), record_of([torch.randn(64, 12) + 9], trains=False)
    merged = trained.merge(served) if trained_first else served.merge(trained)
    assert merged.sites["0"].trains
    torch.testing.assert_close(merged.sites["0"].mean_K, trained.sites["0"].mean_K)
    assert merged.sites["0"].sample(4, torch.Generator())[1].shape == (4, 16)


def test_covariances_of_two_forms_do_not_merge() -> None:
    model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 1))
    batch = [torch.randn(8, 600)]
    full, blocks = record_of(batch, model), record_of(batch, model, memory_budget=4 * 2**20)
    with pytest.raises(InvalidInput, match=r"site 0: .*full.*block-diagonal.*memory_budget"):
        full.merge(blocks)


def test_what_either_run_needed_is_needed_of_both(record: Record) -> None:
    """And what one run alone did not see, the other tells."""
    name = next(iter(record.sites))
    without = dataclasses.replace(record.sites[name], needs_dx=False, needs_dw=False, notes=("one",), across=4)
    needs = dataclasses.replace(record.sites[name], needs_dx=True, needs_dw=True, notes=("two", "one"))
    one, other = (
        dataclasses.replace(record, sites={**record.sites, name: site}, step_us=step_us)
        for site, step_us in ((without, None), (needs, 7.0))
    )
    for merged in (one.merge(other), other.merge(one)):
        assert (merged.sites[name].needs_dx, merged.sites[name].needs_dw, merged.step_us) == (True, True, 7.0)
        assert set(merged.sites[name].notes) == {"one", "two"}
        assert merged.sites[name].across is None  # not always across
    assert dataclasses.replace(record, step_us=5.0).merge(other).step_us == 5.0


@pytest.mark.parametrize("in_newer", [True, False])
def test_the_optimizer_is_that_of_the_newer_run(in_newer: bool, record: Record) -> None:
    newer, older = (
        dataclasses.replace(
            record, sites={name: dataclasses.replace(site, cast_in_step=is_cast) for name, site in record.sites.items()}
        )
        for is_cast in (in_newer, not in_newer)
    )
    assert {site.cast_in_step for site in newer.merge(older).sites.values()} == {in_newer}


def test_records_of_two_precisions_do_not_merge(record: Record) -> None:
    with pytest.raises(InvalidInput, match=r"multiplied in fp32 and the other in bf16.*measure each by itself"):
        record.merge(dataclasses.replace(record, dtype=Format.BF16))


class Domains(nn.Module):
    """One body, and for each domain what is behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(12, 16), nn.LayerNorm(16)
        self.heads = nn.ModuleDict({name: nn.Linear(16, 5) for name in "ab"})

    def forward(self, x: torch.Tensor, domain: str) -> torch.Tensor:
        h = self.body(x)
        return self.heads[domain](self.norm(h) if domain == "a" else h.relu())


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_what_is_around_a_layer_is_told_by_the_runs_that_called_it(order: str) -> None:
    def record_in(domain: str) -> Record:
        torch.manual_seed(0)
        model = Domains()
        probe = loka.Probe(model, every=1)
        with probe.step():
            model(torch.randn(32, 12), domain).sum().backward()
        return probe.record()

    one, other = map(record_in, order)
    merged = one.merge(other)
    assert [merged.sites[f"heads.{name}"].is_head for name in "ab"] == [True, True]
    assert not any("never called" in site.notes for site in merged.sites.values())
    assert {one.sites["body"].norm_kind, other.sites["body"].norm_kind} == {"LayerNorm", None}
    assert (merged.sites["body"].norm, merged.sites["body"].norm_kind) == (None, None)  # behind it in one of them alone
    assert set(merged.sites["body"].consumers) == {*one.sites["body"].consumers, *other.sites["body"].consumers, "?"}
    assert one.merge(one).sites["body"].norm_kind == one.sites["body"].norm_kind


def test_what_a_run_found_and_how_long_it_took_comes_back(record: Record, tmp_path: Path) -> None:
    finding = Finding("0", "cancellation", "outputs are much smaller than their terms", {"ratio": 0.01}, "center")
    told = dataclasses.replace(record, step_us=12.5, findings=(finding,), uncovered=("bmm in layers.0",))
    told.save(tmp_path)
    loaded = Record.load(tmp_path)
    assert (loaded.step_us, loaded.findings, loaded.uncovered) == (12.5, (finding,), ("bmm in layers.0",))


class Tasks(nn.Module):
    """A trunk, for each task a tower, and one norm, activation and head behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.act, self.norm, self.relu = nn.Linear(12, 12), nn.ReLU(), nn.LayerNorm(12), nn.ReLU()
        self.towers, self.head = nn.ModuleDict({name: nn.Linear(12, 12) for name in "ab"}), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        h = self.towers[task](self.act(self.trunk(x)))
        return self.head(self.relu(self.norm(h)))


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_runs_by_task_know_together_what_one_run_of_both_does(order: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tasks()

    def record_in(tasks: str) -> Record:
        probe = loka.Probe(model, every=1)
        for task in tasks:
            with probe.step():
                model(torch.randn(32, 12), task).sum().backward()
        return probe.record()

    def flow(record: Record) -> dict[str, tuple[object, ...]]:
        return {name: (site.norm, site.activation, site.producer, site.is_head) for name, site in record.sites.items()}

    one, other, both = map(record_in, (*order, order))
    assert flow(one) != flow(both)
    one.merge(other).save(tmp_path)
    for merged in (one.merge(other), Record.load(tmp_path).merge(one)):
        assert flow(merged) == flow(both)
        assert merged.uncovered == both.uncovered


def test_a_head_in_one_run_is_a_head_and_what_stays_in_one_stays(record: Record) -> None:
    name = next(iter(record.sites))
    changed = dataclasses.replace(
        record.sites[name], is_head=True, stays="is a Scaled", stays_serving="torch passes by it", feeds_product=True
    )
    other = dataclasses.replace(record, sites={**record.sites, name: changed}, uncovered=("linear",))
    for merged in (record.merge(other), other.merge(record)):
        site = merged.sites[name]
        assert (site.is_head, site.stays, site.stays_serving) == (True, "is a Scaled", "torch passes by it")
        assert site.feeds_product
        assert merged.uncovered == ("linear",)


def test_records_of_the_same_step_have_one_id() -> None:
    """One that was saved, and one that was measured."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    ids = []
    probe, other = loka.Probe(model, every=1), loka.Probe(model, every=1)
    for _ in range(2):
        for one in (probe, other):
            with one.step():
                model(torch.randn(4, 8)).sum().backward()
            ids += [one.record().id, one.record().id]
    assert [ids.index(id) for id in ids] == [0, 0, 2, 2, 4, 4, 6, 6]
    with torch.no_grad():
        model[0].weight.add_(1e-3)  # trained on, past the Probe
    assert probe.record().id not in ids


def test_a_record_keeps_its_id_in_its_file_and_merged_is_another(record: Record, tmp_path: Path) -> None:
    record.save(tmp_path)
    assert Record.load(tmp_path).id == record.id == id_in(tmp_path)
    assert record.merge(record).id != record.id
    assert id_in(tmp_path / "nowhere") == ""
