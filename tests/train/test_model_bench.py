"""``loka bench model``: the arms do what they are called, are timed in turn, and the tables say what the rows hold."""

import copy
import gc
import math
import multiprocessing
import weakref
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from cyclopts import CoercionError
from int8_here import needs
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError, Unsupported

from loka.cli import app
from loka.core.environment import current_environment
from loka.core.errors import InvalidFile, InvalidInput, UnknownName
from loka.core.plan import Goal
from loka.core.results import GatheredResults
from loka.kernels.device import device_of
from loka.measure.failure import OUT_OF_MEMORY
from loka.measure.side_by_side import WorkerLost
from loka.nn.linear import LokaLinear
from loka.train import model_arms, model_crew
from loka.train.fp8_everywhere import apply_everywhere
from loka.train.model_arms import ARMS, BASELINE, Subject, reading_transposes
from loka.train.model_bench import Cell, ModelBench, dense_arguments
from loka.train.model_crew import BaselineLost, Failure, measure_side_by_side
from loka.train.model_tables import ceiling, make_tables
from loka.train.step_profile import Kind, StepProfile
from loka.train.step_timer import StepTimer, step_timer, take_turns

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench() -> ModelBench:
    return ModelBench(CPU, timed_steps=3)


@pytest.mark.parametrize("goal", list(Goal))
def test_every_arm_gives_a_row_or_a_reason(bench, goal, monkeypatch):
    monkeypatch.setattr(StepProfile, "is_sound", True)  # where the shares come from is asked here, not how busy the machine is
    arms = [ARMS[name] for name in ("fp32", "mods", "mods.no_bias", "fbgemm", "torchao.rowwise")]
    rows = dict(bench.measure(Cell("dlrm", "tiny", 32, goal), arms))
    assert rows["fbgemm"]["failed"].startswith("kernel fbgemm.rowwise_fast cannot run on")
    for arm in (BASELINE, "fp32", "mods", "mods.no_bias"):
        row = rows[arm]
        assert row["speedup"] == pytest.approx(row["baseline_us"] / row["time_us"]["median_us"])
        assert row["time_us"]["rounds"] == 3
    shares = rows[BASELINE]["shares"]
    assert shares[Kind.GEMM] > 0
    assert shares[Kind.ELEMENTWISE] > 0
    assert (shares[Kind.OPTIMIZER] > 0) is (goal is Goal.TRAINING)
    assert all("shares" not in rows[arm] for arm in ("fp32", "mods"))
    assert all(rows[arm]["baseline_shares"] == shares for arm in ("fp32", "mods"))
    assert "baseline_shares" not in rows[BASELINE]


def test_serving_is_in_the_arms_dtype_and_training_moves_the_weights(bench):
    def weights(goal: Goal) -> list[torch.Tensor]:
        subjects: list[Subject] = []
        bench.ready(
            Cell("dlrm", "tiny", 32, goal), replace(ARMS[BASELINE], prepare=lambda subject: str(subjects.append(subject)))
        )
        return list(subjects[0].dense_part.parameters())

    before = [
        weight.detach()
        for weight in bench._model(Cell("dlrm", "tiny", 32, Goal.SERVING), ARMS[BASELINE]).dense_part.parameters()
    ]
    served, trained = weights(Goal.SERVING), weights(Goal.TRAINING)
    assert all(torch.equal(weight, first.bfloat16()) for weight, first in zip(served, before, strict=True))
    assert {weight.dtype for weight in trained} == {torch.float32}  # autocast
    assert not all(torch.equal(weight, first) for weight, first in zip(trained, before, strict=True))


@needs("onednn.int8_dynamic")
@pytest.mark.usefixtures("without_trials")
def test_arms_made_ready_side_by_side_give_the_same_rows():
    """More of them than there is room for at once; one cannot run, and one is planned from a survey that is made here."""
    bench = ModelBench(CPU, timed_steps=3, kernels=["onednn.int8_dynamic"])
    cell, arms = Cell("dlrm", "tiny", 32, Goal.SERVING), [ARMS[name] for name in ("fp32", "fbgemm", "loka")]
    rows = {name: row for _, name, row in measure_side_by_side(bench, {cell: arms}, workers=2)}
    assert list(rows) == [BASELINE, "fp32", "fbgemm", "loka"]
    assert rows["fbgemm"]["failed"].startswith("kernel fbgemm.rowwise_fast cannot run on")
    alone = dict(ModelBench(CPU, timed_steps=3).measure(cell, [ARMS["fp32"]]))
    for arm in (BASELINE, "fp32"):
        assert rows[arm].keys() == alone[arm].keys()
        assert rows[arm]["speedup"] == pytest.approx(rows[arm]["baseline_us"] / rows[arm]["time_us"]["median_us"])
        assert rows[arm]["time_us"]["rounds"] == 3
    assert "sites" in rows["loka"]["did"]
    assert not multiprocessing.active_children()


class FakeWorker:
    """An arm of a crew without a process: what it says when it is asked, and for how long."""

    alive: ClassVar[set[str]] = set()
    made: ClassVar[list[str]] = []
    most = 0

    def __init__(self, name: str, says: str = "", calls: float = math.inf) -> None:
        self.name, self.says, self.calls = name, says, calls
        self.alive.add(name)
        self.made.append(name)
        FakeWorker.most = max(FakeWorker.most, len(self.alive))
        self.company = len(self.alive) > 2

    def wait_until_ready(self) -> None:
        if self.says == "late" or (self.says == "late in company" and self.company):
            raise WorkerLost("not ready after 240 s")

    def call(self, function: object) -> object:
        self.wait_until_ready()
        self.calls -= 1
        if self.calls < 0 or (self.says == "lost in company" and self.company):
            raise WorkerLost("its process ended")
        if function is model_crew._facts:
            is_short = self.says == "short of memory" or (self.says == "short of memory in company" and self.company)
            return Failure(OUT_OF_MEMORY, crowded=True) if is_short else ("", 1.0, None, False)
        return 1000.0 if function is model_crew._step_us else None

    def stop(self) -> None:
        self.alive.discard(self.name)


@pytest.fixture
def crew(bench, monkeypatch):
    """Measures two cells with fake workers, made by "cell arm"; tells the rows in a word each, as they come."""

    def measure(workers: int, made: dict[str, dict] | None = None, told: dict[str, str] | None = None, **options):
        told = {} if told is None else told

        def start(self, cell, arm, held):
            name = f"{cell.model} {arm.name}"
            worker = FakeWorker(name, **(made or {}).get(name, {}))
            held.callback(worker.stop)
            return worker

        monkeypatch.setattr(model_crew.Crew, "_start", start)
        wanted = {
            Cell("dlrm", "tiny", 32, Goal.SERVING): [ARMS["fp32"], ARMS["mods"], ARMS["tf32"]],
            Cell("wukong", "tiny", 32, Goal.SERVING): [ARMS[BASELINE], ARMS["fp32"]],
        }
        for cell, name, row in measure_side_by_side(bench, wanted, workers=workers, **options):
            assert f"{cell.model} {name}" not in told, "measured twice"
            told[f"{cell.model} {name}"] = row.get("failed", "ran")
        return told

    FakeWorker.alive.clear()
    FakeWorker.made.clear()
    FakeWorker.most = 0
    return measure


class TestCrew:
    ALL = dict.fromkeys(("dlrm bf16", "dlrm fp32", "dlrm mods", "dlrm tf32", "wukong bf16", "wukong fp32"), "ran")

    @pytest.mark.parametrize(("workers", "most"), [(1, 2), (2, 3), (4, 5), (9, 6)])
    def test_no_more_arms_than_workers_and_their_baselines_are_in_memory(self, crew, workers, most):
        assert crew(workers) == self.ALL
        assert FakeWorker.most == most
        assert not FakeWorker.alive

    def test_an_arm_that_is_lost_or_late_costs_its_own_row(self, crew):
        told = crew(3, {"dlrm mods": {"says": "late"}, "dlrm tf32": {"calls": 2}})
        assert told == self.ALL | {"dlrm mods": "not ready after 240 s", "dlrm tf32": "its process ended"}

    @pytest.mark.parametrize("fate", ["short of memory", "late", "lost"])
    @pytest.mark.parametrize("name", ["dlrm mods", "dlrm bf16", "wukong bf16"])
    def test_what_fails_for_the_others_sake_is_tried_again_alone(self, crew, name, fate):
        assert crew(9, {name: {"says": f"{fate} in company"}}) == self.ALL
        assert not FakeWorker.alive

    @pytest.mark.parametrize("workers", [1, 2, 3, 9])
    def test_a_lost_baseline_is_made_again_and_costs_no_row(self, crew, workers):
        """It is there for two arms or more; the third worker's second group is of one arm."""
        assert crew(workers, {"dlrm bf16": {"calls": 12}}) == self.ALL
        assert FakeWorker.made.count("dlrm bf16") > 1

    @pytest.mark.parametrize("workers", [1, 3, 9])
    @pytest.mark.parametrize("says", ["late", "short of memory"])
    def test_without_its_baseline_nothing_of_a_cell_is_written_down(self, crew, workers, says):
        told = {}
        with pytest.raises(BaselineLost, match=r"to compare with \(dlrm/tiny/32/serving: (not ready|out of memory)"):
            crew(workers, {"dlrm bf16": {"says": says}}, told)
        assert told == {"wukong bf16": "ran", "wukong fp32": "ran"}
        assert not FakeWorker.alive

    def test_nothing_is_begun_without_time_left(self, crew, monkeypatch):
        assert crew(3, budget_s=-1.0) == {}
        passed = iter(range(99))
        monkeypatch.setattr(model_crew.time, "monotonic", lambda: float(next(passed)))
        told = crew(4, {"dlrm mods": {"says": "late in company"}}, budget_s=1.0)  # time for the first group alone
        assert told.keys() == {"dlrm bf16", "dlrm fp32", "dlrm tf32", "wukong bf16"}

    def test_there_must_be_workers(self, crew):
        with pytest.raises(InvalidInput, match="workers must be at least 1"):
            crew(0)


def test_what_an_arm_drops_in_serving_is_gone(bench):
    dropped = []

    def drop(subject: Subject) -> str:
        for module in subject.dense_part.modules():
            if isinstance(module, nn.Linear):
                dropped.append(weakref.ref(module.weight))
                module.weight = nn.Parameter(module.weight.detach().clone())
        return ""

    ready = bench.ready(Cell("dlrm", "tiny", 32, Goal.SERVING), replace(ARMS[BASELINE], prepare=drop))
    gc.collect()
    assert dropped
    assert not any(weight() is not None for weight in dropped), ready


@needs("onednn.int8_dynamic")
@pytest.mark.usefixtures("without_trials")
def test_a_survey_that_was_kept_is_planned_from(tmp_path, monkeypatch):
    cell = Cell("dlrm", "tiny", 32, Goal.SERVING)
    measured = dict(
        ModelBench(CPU, timed_steps=2, surveys=tmp_path, kernels=["onednn.int8_dynamic"]).measure(cell, [ARMS["loka"]])
    )
    monkeypatch.setattr("loka.train.model_bench.record_run", None)  # it is not called again
    kept = dict(ModelBench(CPU, timed_steps=2, surveys=tmp_path, kernels=["onednn.int8_dynamic"]).measure(cell, [ARMS["loka"]]))
    assert "sites" in measured["loka"]["did"]
    assert kept["loka"]["did"] == measured["loka"]["did"]


def test_a_survey_is_of_one_model_with_its_mods_its_rows_and_the_kernels(bench):
    """Training and serving plan from the same; nothing else does, neither in one call nor from a folder."""
    cell = Cell("dlrm", "tiny", 32, Goal.TRAINING)
    cells = [cell, replace(cell, model="wukong"), replace(cell, preset="small"), replace(cell, batch_size=64)]
    other = ModelBench(CPU, kernels=["onednn.int8"])
    names = [
        one.name_of_survey(cell, ARMS[arm]) for one in (bench, other) for cell in cells for arm in ("loka", "loka-without-mods")
    ]
    assert len(set(names)) == len(names) == 16
    assert bench.name_of_survey(replace(cell, goal=Goal.SERVING), ARMS["loka"]) == names[0]


def test_the_probed_model_is_gone_when_kernels_are_measured(monkeypatch):
    """With its gradients and optimizer it is several times its weights, and a wide layer's errors take the rest of a GPU."""
    probed, at_measure = [], []

    class Watched(ModelBench):
        def _trainer(self, cell, arm):
            trainer = super()._trainer(cell, arm)
            probed.extend(weakref.ref(parameter) for parameter in trainer.model.parameters())
            return trainer

    monkeypatch.setattr("loka.train.model_bench.measure", lambda *_, **__: at_measure.extend(ref() for ref in probed))
    Watched(CPU).survey(Cell("dlrm", "tiny", 32, Goal.SERVING), ARMS["loka"])
    assert at_measure
    assert not any(parameter is not None for parameter in at_measure)


@pytest.mark.parametrize(
    ("wrapping", "told"),
    [
        (Unsupported("when making a call\n  Explanation: …"), "sizes must be multiples of 16"),
        (BackendCompilerFailed(print, ValueError("no such kernel"), None), "no such kernel"),
        (BackendCompilerFailed(print, torch.OutOfMemoryError("tried to allocate 2 GiB"), None), "out of memory"),
        (InvalidFile("another version's: make it again"), "another version's: make it again"),
    ],
    ids=["traced", "compiled", "out of memory", "ours"],
)
def test_an_arm_that_fails_says_why_and_not_that_torch_compile_did(wrapping, told):
    def fails(subject: object) -> str:
        raise wrapping from ValueError("sizes must be multiples of 16\nby the way")

    arm = replace(ARMS["mods"], prepare=fails)
    rows = dict(ModelBench(CPU, timed_steps=2).measure(Cell("dlrm", "tiny", 16, Goal.SERVING), [arm]))
    assert rows["mods"] == {"failed": told}


def test_an_error_that_torch_compile_tells_in_passing_is_the_reason():
    wrapping = TorchRuntimeError(
        "RuntimeError when making fake tensor call\n  Explanation: f(*(x,), **{}): got AssertionError('no')\n  Hint: …"
    )

    def fails(subject: object) -> str:
        raise wrapping

    arm = replace(ARMS["mods"], prepare=fails)
    rows = dict(ModelBench(CPU, timed_steps=2).measure(Cell("dlrm", "tiny", 16, Goal.SERVING), [arm]))
    assert rows["mods"] == {"failed": "AssertionError('no')"}


def test_layers_that_read_transposes_are_found(bench):
    """Wukong's products over the embedding axis, as torchao's rowwise recipes cannot take them."""
    model = bench._model(Cell("wukong", "tiny", 16, Goal.TRAINING), ARMS[BASELINE])
    batch = next(bench.data.train(16))
    found = reading_transposes(model.dense_part, dense_arguments(model, batch, torch.float32))
    assert {name.rpartition(".")[2] for name in found} == {"project", "lcb", "residual"}
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--goals serve", "serve"),
        ("--kernels torch.rowise", "did you mean 'torch.rowwise'"),
        ("--arms loca", "no arm is called"),
    ],
)
def test_a_name_that_is_wrong_is_told_before_anything_is_written(tmp_path, words, message):
    with pytest.raises((UnknownName, CoercionError), match=f"(?i){message}"):
        app(f"bench model {words} --device cpu --out {tmp_path}", exit_on_error=False, print_error=False)
    assert not list(tmp_path.iterdir())


class TestEverywhere:
    def test_layers_may_be_called_by_the_name_of_their_argument(self):
        class Named(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body, self.head = torch.nn.Linear(32, 48), torch.nn.Linear(48, 1)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.head(self.body(input=x).relu())

        assert apply_everywhere(Named(), (torch.randn(8, 32),), "reference.rowwise").moved == ("body",)

    def test_moves_what_the_kernel_takes_and_says_why_not_the_rest(self):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(32, 48), torch.nn.ReLU(), torch.nn.Linear(48, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)
        )
        x = torch.randn(8, 32)
        expected = model(x)
        weights = dict(model.named_parameters())
        done = apply_everywhere(model, (x,), "reference.rowwise")
        assert done.moved == ("0", "2")
        assert done.left == {"4": "is a prediction head"}
        assert isinstance(model[0], LokaLinear)
        assert all(parameter is weights[name] for name, parameter in model.named_parameters())
        error = (model(x) - expected).norm() / expected.norm()
        assert 1e-3 < error < 0.1

    def test_a_refused_role_keeps_the_site_where_it_trains(self):
        def moved(trains: bool) -> tuple[str, ...]:
            model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
            return apply_everywhere(model, (torch.randn(4, 32),), "reference.static", trains=trains).moved

        assert moved(False) == ("0",)
        assert moved(True) == ()  # dgrad reads no x, so it has no static scale

    def test_where_it_never_trains_codes_stand_in_place_of_weights_as_in_a_frozen_model(self):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.ReLU(), torch.nn.Linear(48, 1))
        x = torch.randn(8, 32)
        trained = copy.deepcopy(model)
        apply_everywhere(trained, (x,), "reference.rowwise")
        weight = weakref.ref(model[0].weight)
        apply_everywhere(model, (x,), "reference.rowwise", trains=False)
        assert weight() is None
        assert model.state_dict()["0.codes"].dtype == torch.float8_e4m3fn
        with torch.no_grad():
            assert torch.equal(model(x), trained(x))


class TestTimer:
    def test_takes_turns_and_gives_the_median(self):
        order = []
        times = {"a": iter([1.0, 9.0, 2.0]), "b": iter([5.0, 5.0, 5.0])}

        def timer(name: str) -> StepTimer:
            def run() -> float:
                order.append(name)
                return next(times[name])

            return StepTimer(run, is_graph=False)

        timings = take_turns({"a": timer("a"), "b": timer("b")}, rounds=3)
        assert order == ["a", "b"] * 3
        assert (timings["a"].median_us, timings["b"].median_us) == (2.0, 5.0)

    @pytest.mark.gpu
    def test_replays_a_step_and_launches_what_cannot_be_captured(self):
        x = torch.zeros((), device="cuda")
        timer = step_timer(lambda: x.add_(1), torch.device("cuda"))
        before = x.item()
        assert timer.is_graph
        assert timer.run() > 0
        assert x.item() == before + 1
        waits = step_timer(lambda: x.item(), torch.device("cuda"))
        assert not waits.is_graph
        assert waits.run() > 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # that fp32 leaves idle, as it should
@pytest.mark.parametrize("goal", list(Goal))
def test_a_whole_step_is_captured_on_a_gpu(goal):
    arms = [ARMS["fp32"], ARMS["mods"]]
    rows = dict(ModelBench(torch.device("cuda"), timed_steps=3).measure(Cell("dlrm", "small", 256, goal), arms))
    assert all(row.get("is_graph") and row["peak_bytes"] > 0 for row in rows.values()), rows


class TestTables:
    def test_say_what_the_rows_hold(self, tmp_path):
        results = GatheredResults(tmp_path, "model", current_environment(device_of(CPU)), "loka bench model")
        about = {"model": "wukong", "preset": "base", "batch_size": 2048, "goal": "training", "did": "", "is_graph": True}
        shares = dict.fromkeys(map(str, Kind), 0.0) | {Kind.GEMM: 0.5, Kind.ELEMENTWISE: 0.25, Kind.OPTIMIZER: 0.25}
        planned = shares | {Kind.GEMM: 0.4, Kind.CAST: 0.1}
        base = {"time_us": {"median_us": 4000.0}, "speedup": 1.0, "peak_bytes": 3 << 30, "shares": shares}
        results.add("wukong/base/2048/training/bf16", about | {"arm": "bf16"} | base)
        loka = {"arm": "loka", "speedup": 1.333, "did": "7 of 9 sites", "peak_bytes": 2 << 30, "shares": planned}
        results.add("wukong/base/2048/training/loka", about | loka)
        unsound = about | base | {"arm": "bf16", "batch_size": 64, "shares": None}
        results.add("wukong/base/64/training/bf16", unsound)
        before_casts = {kind: share for kind, share in shares.items() if kind != Kind.CAST}
        results.add("wukong/base/128/training/bf16", unsound | {"batch_size": 128, "shares": before_casts})
        results.add("wukong/base/2048/training/fbgemm", about | {"arm": "fbgemm", "failed": "no library"})
        tables = make_tables(results)
        assert "| wukong | base | 2048 | 4.00 | – | 1.33 |" in tables
        assert "| wukong | base | 2048 | – | 1.50 |" in tables  # 3 of 4 ms take 2 of 3, for the optimizer's 1 stays
        assert "| wukong | base | 64 |" not in tables.partition("the dense part alone")[2].partition("peak memory")[0]
        assert "| wukong | base | 2048 | 3.0 |  | 2.0 |" in tables
        assert (
            tables.index("| wukong | base | 64 | 4.00")
            < tables.index("| wukong | base | 128 | 4.00")
            < tables.index("| wukong | base | 2048 | 4.00")
        )
        assert "| arm | GEMM | cast | attention | norm, activation | embedding | optimizer | input | rest |" in tables
        rest = "| 0.0 % | 25.0 % | 0.0 % | 25.0 % | 0.0 % | 0.0 % |"
        assert f"| 2048 | bf16 | 50.0 % | 0.0 % {rest} 2.00 |" in tables
        assert f"| 2048 | loka | 40.0 % | 10.0 % {rest}  |" in tables
        assert f"| 128 | bf16 | 50.0 % |  {rest} 2.00 |" in tables
        assert "| 64 | bf16 | 50.0 %" not in tables
        assert "- loka: 7 of 9 sites (wukong/base/2048/training)" in tables
        assert "- fbgemm: could not run: no library" in tables
        assert "erving" not in tables
        results.add("wukong/base/2048/serving/bf16", about | base | {"arm": "bf16", "goal": "serving"})
        assert f"| 2048 | bf16 | 50.0 % | 0.0 % {rest} 2.00 |" in make_tables(results).partition("a serving call's")[2]

    @pytest.mark.parametrize(("speedup", "is_graph", "told"), [(1.5, False, "2.00*"), (3.0, True, "–"), (4.0, True, "–")])
    def test_dense_speedups_where_the_step_was_launched_or_is_nothing_but_what_stays(self, tmp_path, speedup, is_graph, told):
        results = GatheredResults(tmp_path, "model", current_environment(device_of(CPU)), "loka bench model")
        about = {"model": "wukong", "preset": "base", "batch_size": 2048, "goal": "training", "did": "", "is_graph": is_graph}
        stays = {Kind.OPTIMIZER: 1 / 6, Kind.EMBEDDING: 1 / 12, Kind.INPUT: 1 / 12}
        shares = {Kind.GEMM: 2 / 3, Kind.ELEMENTWISE: 0.0, **stays}
        base = {"arm": "bf16", "time_us": {"median_us": 4000.0}, "speedup": 1.0, "peak_bytes": None, "shares": shares}
        results.add("a", about | base)
        results.add("b", about | {"arm": "loka", "speedup": speedup, "peak_bytes": None})
        assert f"| wukong | base | 2048 | {told} |" in make_tables(results)

    def test_the_dense_part_goes_by_the_baseline_that_a_row_was_timed_beside(self, tmp_path):
        """Of a cell that was gathered over days: since fbgemm's row the optimizer has become faster, and none was profiled
        beside torchao's."""
        results = GatheredResults(tmp_path, "model", current_environment(device_of(CPU)), "loka bench model")
        about = {"model": "wukong", "preset": "base", "batch_size": 2048, "goal": "training", "did": "", "is_graph": True}
        older, newer = ({Kind.GEMM: 1 - rest, Kind.ELEMENTWISE: 0.0, Kind.OPTIMIZER: rest} for rest in (1 / 3, 1 / 5))
        results.add("a", about | {"arm": "bf16", "time_us": {"median_us": 4e3}, "speedup": 1.0, "shares": newer})
        results.add("b", about | {"arm": "fbgemm", "speedup": 1.5, "baseline_shares": older})
        results.add("c", about | {"arm": "loka", "speedup": 5 / 3, "baseline_shares": newer})
        results.add("d", about | {"arm": "torchao.rowwise", "speedup": 1.5, "baseline_shares": None})
        dense = make_tables(results).partition("the dense part alone")[2].partition("Where a")[0]
        assert "| torchao.rowwise | fbgemm | loka |" in dense
        assert "| wukong | base | 2048 |  | 2.00 | 2.00 |" in dense

    def test_the_ceiling_is_amdahls(self):
        assert ceiling({Kind.GEMM: 0.8, Kind.ELEMENTWISE: 0.1}) == pytest.approx(1 / (0.1 + 0.4))


@pytest.mark.parametrize(
    ("module", "fits"),
    [(nn.Linear(16, 32), True), (nn.Linear(17, 32), False), (nn.Linear(16, 1), False), (nn.LayerNorm(16), False)],
)
def test_torchao_is_given_the_layers_that_it_takes(module, fits):
    assert model_arms._fits_torchao(module, "name") is fits
