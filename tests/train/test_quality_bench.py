"""Paired runs: what they share, what is taken from them, and what a table and a picture say of it."""

import itertools
import math
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from loka.core.environment import current_environment
from loka.core.errors import InvalidInput, UnknownName
from loka.core.estimate import Estimate
from loka.core.gemm import Role
from loka.core.plan import BlockPlan, Choice, Plan, SitePlan
from loka.core.recipe import Format
from loka.core.results import GatheredResults
from loka.core.survey import BlockCandidate, Candidate, SiteSurvey, Survey, SurveyDocument
from loka.kernels.device import device_of
from loka.nn.linear import LokaLinear
from loka.planner.plan import make_plan
from loka.train import quality_bench
from loka.train.config import TrainConfig
from loka.train.jobs import run_jobs
from loka.train.line_chart import Line, line_chart
from loka.train.loka_plan import _rounded, as_if_8_bits_always_paid, only_in_roles
from loka.train.paired import Run, _in_high_precision, change_in_percent, dataset_of, describe_change, prepare, train_run
from loka.train.quality_bench import Campaign, make_table, run_campaign, trajectories, write_report
from loka.train.quality_settings import SETTINGS, Arm, arms_on
from loka.train.trainer import Trainer

SVG = "{http://www.w3.org/2000/svg}"
CPU = torch.device("cpu")


@pytest.fixture
def config(planted: str) -> TrainConfig:
    return TrainConfig("wukong", "tiny", data=planted, steps=12, batch_size=64, device="cpu", out=None)


@pytest.fixture
def campaign(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> Campaign:
    monkeypatch.setitem(quality_bench.SETTINGS, "planted", config)
    return Campaign(["planted"], ["fp32", "naive"], [0, 1], "cpu")


@pytest.fixture
def results(tmp_path: Path) -> GatheredResults:
    return GatheredResults(tmp_path, "quality", current_environment(device_of(CPU)), "loka bench quality")


class TestRuns:
    def test_arms_share_weights_and_batches(self, config):
        plain, _ = prepare(Run(config, Arm("plain")), dataset_of(config, CPU), CPU)
        modded, done = prepare(Run(config, Arm("modded", mods=("no_bias",))), dataset_of(config, CPU), CPU)
        before = plain.state_dict()
        assert done["changes"] == len(before) - len(modded.state_dict()) > 0
        assert all(torch.equal(tensor, before[name]) for name, tensor in modded.state_dict().items())
        again = train_run(Run(config, Arm("plain")))
        twin = train_run(Run(config, Arm("twin")))
        assert again["test"] == twin["test"]
        assert again["trajectory"] == twin["trajectory"]

    def test_in_a_run_of_an_epoch_the_learning_rate_falls_too(self, config):
        """As it does in one of as many steps."""
        config = replace(config, warmup_steps=0)
        epoch = dataset_of(config, CPU).batches_per_epoch(config.batch_size)
        of_epoch, of_steps = (
            train_run(Run(replace(config, steps=steps, decay_steps=8), Arm("plain"))) for steps in (None, epoch)
        )
        constant = train_run(Run(replace(config, steps=None), Arm("plain")))
        assert of_epoch["steps"] == epoch
        assert of_epoch["test"] == of_steps["test"] != constant["test"]

    def test_a_kernel_everywhere_leaves_the_head_alone_and_changes_the_loss_a_little(self, config):
        plain, naive = train_run(Run(config, Arm("plain"))), train_run(Run(config, Arm("n", kernel="reference.tensorwise")))
        exact = train_run(Run(config, Arm("exact", kernel="torch.fp32")))
        assert naive["sites"] == exact["sites"] > 5
        model, _ = prepare(Run(config, Arm("n", kernel="reference.tensorwise")), dataset_of(config, CPU), CPU)
        assert type(model.dense_part.head) is torch.nn.Linear
        assert exact["test"]["log_loss"] == pytest.approx(plain["test"]["log_loss"], rel=1e-6)
        change = naive["test"]["log_loss"] / plain["test"]["log_loss"] - 1
        assert 1e-6 < abs(change) < 0.02

        assert "test_in_high_precision" not in plain
        assert exact["test_in_high_precision"]["log_loss"] == pytest.approx(exact["test"]["log_loss"], rel=1e-6)
        rounding = naive["test"]["log_loss"] / naive["test_in_high_precision"]["log_loss"] - 1
        assert 1e-6 < abs(rounding) < 0.02
        assert naive["test_in_high_precision"]["log_loss"] != plain["test"]["log_loss"], "it is what 8 bits have learned"

    def test_what_a_planned_arm_has_learned_is_tested_in_high_precision_without_its_plan(self, config):
        run = Run(config, Arm("planned", kernel="reference.tensorwise"), plan="a folder that is not there")
        data = dataset_of(config, CPU)
        learned, _ = prepare(replace(run, plan=None), data, CPU)
        with torch.no_grad():
            for parameter in learned.parameters():
                parameter.add_(1.0)
        high, weights = _in_high_precision(run, learned, data, CPU), learned.state_dict()
        assert any(isinstance(module, LokaLinear) for module in learned.modules())
        assert not any(isinstance(module, LokaLinear) for module in high.modules())
        assert all(torch.equal(tensor, weights[name]) for name, tensor in high.state_dict().items())

    def test_the_trajectory_is_the_loss_of_examples_not_yet_learned_from(self, config):
        row = train_run(Run(config, Arm("plain")))
        model, _ = prepare(Run(config, Arm("plain")), dataset_of(config, CPU), CPU)
        trainer = Trainer(model, config)
        for (step, loss), batch in zip(row["trajectory"], dataset_of(config, CPU).train(64), strict=False):
            logits_B = model(batch).double()
            expected = torch.nn.functional.binary_cross_entropy_with_logits(logits_B, batch.label_B.double())
            assert loss == pytest.approx(expected.item(), rel=1e-6), step
            trainer.step(batch)
        assert [step for step, _ in row["trajectory"]] == list(range(1, 13))

    def test_every_seed_has_weights_and_batches_of_its_own(self, config):
        data = [dataset_of(replace(config, seed=seed), CPU) for seed in (0, 1)]
        first, second = (next(one.train(64)) for one in data)
        assert not torch.equal(first.dense_BD, second.dense_BD)
        weights = [
            prepare(Run(replace(config, seed=seed), Arm("plain")), data[0], CPU)[0].dense_part.head.weight for seed in (0, 1)
        ]
        assert not torch.equal(*weights)

    def test_a_loss_that_is_not_finite_ends_the_run(self, config, monkeypatch):
        monkeypatch.setattr("loka.train.paired.time", SimpleNamespace(perf_counter=iter([10.0, 12.0]).__next__))
        bad = replace(config, model="dlrm", data_options={"inf_at": 5})
        row = train_run(Run(bad, Arm("plain")))
        assert row["nonfinite_step"] == 5
        assert "test" not in row
        assert len(row["trajectory"]) == 6
        assert row["samples_per_s"] == 6 * 64 / 2

    def test_what_plans_and_mods_are_by_now_is_part_of_what_decides_the_numbers(self, config, monkeypatch):
        """Rows of a results file from before are not taken for those of today."""
        arms = arms_on("cpu")
        runs = {name: Run(config, arms[name]) for name in ("fp32", "mods", "loka-without-mods")}
        before = {name: run.settings for name, run in runs.items()}
        monkeypatch.setattr("loka.train.paired.PLANS_AS_OF", 1_000)
        assert [name for name, run in runs.items() if run.settings != before[name]] == ["loka-without-mods"]
        monkeypatch.setattr("loka.train.paired.MODS_AS_OF", 1_000)
        assert [name for name, run in runs.items() if run.settings != before[name]] == ["mods", "loka-without-mods"]


class TestCampaign:
    def test_fills_a_table_over_several_calls(self, campaign, results):
        said: list[str] = []
        run_campaign(campaign, results, say=said.append)
        assert len(results.rows) == 4
        loss = {(row["arm"], row["seed"]): row["test"]["log_loss"] for row in results.rows.values()}
        changes = [100 * (loss["naive", seed] / loss["fp32", seed] - 1) for seed in (0, 1)]
        half = 12.706204736 * statistics.stdev(changes) / math.sqrt(2)  # Student's t for 95 % and one degree of freedom
        expected = f"| planted/wukong-tiny/12x64 | naive | 2 | {(loss['naive', 0] + loss['naive', 1]) / 2:.5f} | "
        spread = (
            f"{min(changes):+.3f} / {statistics.fmean(changes):+.3f} / {max(changes):+.3f}"  # of two the median is the mean
        )
        assert f"{expected}{statistics.fmean(changes):+.3f} % ± {half:.3f} |  |  | {spread} |" in make_table(results)
        in_full = {
            row["seed"]: row["test_in_high_precision"]["log_loss"] for row in results.rows.values() if row["arm"] == "naive"
        }
        rounding = [100 * (loss["naive", seed] / in_full[seed] - 1) for seed in (0, 1)]
        half = 12.706204736 * statistics.stdev(rounding) / math.sqrt(2)
        assert f"| {spread} | {statistics.fmean(rounding):+.3f} % ± {half:.3f} |" in make_table(results)

        reopened = GatheredResults("", "quality", current_environment(device_of(CPU)), "again", results.json_path)
        said.clear()
        run_campaign(Campaign(["planted"], ["fp32", "naive"], [0, 1, 2], "cpu"), reopened, say=said.append)
        assert [line.split(":")[0] for line in said] == [f"planted/wukong-tiny/12x64/{arm}/2" for arm in ("fp32", "naive")]

        markdown, picture, _ = write_report(reopened)
        assert f"]({picture.name})" in markdown.read_text()
        ElementTree.parse(picture)

    def test_refuses_what_it_cannot_mean(self, campaign, results, config):
        with pytest.raises(UnknownName, match=r"no arm is called 'fp31'\. Known: fp32, bf16"):
            run_campaign(Campaign(["planted"], ["fp31"], [0], "cpu"), results)
        with pytest.raises(UnknownName, match=r"no setting is called 'criteo'\. Known: synthetic"):
            run_campaign(Campaign(["criteo"], ["fp32"], [0], "cpu"), results)
        with pytest.raises(InvalidInput, match="needs the criteo data: pass its path with --criteo"):
            run_campaign(Campaign(["criteo-raw"], ["fp32"], [0], "cpu"), results)
        run_campaign(Campaign(["planted"], ["fp32"], [0], "cpu"), results, say=lambda _: None)
        with pytest.raises(InvalidInput, match="with other settings"):
            run_campaign(Campaign(["planted"], ["fp32"], [0], "cpu", overrides={"lr": 0.1}), results)

    def test_every_ablation_takes_one_thing_away(self):
        for device_type in ("cpu", "cuda"):
            arms = arms_on(device_type)
            loka = arms["loka"]
            for mod in loka.mods:
                arm = arms[f"loka-without-{mod.replace('_', '-')}"]
                assert set(loka.mods) - set(arm.mods) == {mod}
                assert arm.is_planned
            assert replace(loka, name="loka-without-check", is_checked=False) == arms["loka-without-check"]
            assert replace(loka, name="loka-without-mods", mods=()) == arms["loka-without-mods"]
            assert arms["loka-without-selection"].mods == loka.mods == arms["mods"].mods
        assert all(config.out is None for config in SETTINGS.values())


class TestChange:
    def test_is_taken_seed_by_seed_over_those_both_have(self):
        change = change_in_percent({0: 1.01, 1: 2.04, 7: 9.0}, {0: 1.0, 1: 2.0, 3: 1.0})
        assert change is not None
        assert (change.mean, change.n) == (pytest.approx(1.5), 2)
        assert change_in_percent({0: 1.0}, {1: 1.0}) is None

    def test_says_worse_only_where_the_interval_leaves_out_0(self):
        base = dict.fromkeys(range(3), 1.0)
        assert describe_change(change_in_percent({0: 1.010, 1: 1.011, 2: 1.012}, base)).endswith("worse")
        assert describe_change(change_in_percent({0: 0.990, 1: 0.989, 2: 0.988}, base)).endswith("better")
        assert describe_change(change_in_percent({0: 1.02, 1: 0.99, 2: 1.0}, base)) == "+0.333 % ± 3.795"
        assert describe_change(change_in_percent({0: 1.02}, base)) == "+2.000 % (one seed)"

    def test_trajectory_is_the_mean_of_the_seeds_differences(self):
        def rows(*losses: list[float | None]) -> dict:
            return {seed: {"trajectory": list(enumerate(of_seed, 1))} for seed, of_seed in enumerate(losses)}

        runs = {"fp32": rows([1.0, 2.0], [1.0, 4.0]), "naive": rows([1.1, 2.0], [1.3, None])}
        (line,) = trajectories(runs)
        assert (line.name, list(line.x)) == ("naive", [1, 2])
        assert line.y == pytest.approx([20.0, 0.0])
        assert line.low == []  # of the second step there is one seed


class TestChart:
    def test_draws_each_curve_where_its_values_are(self):
        lines = [Line("a < b", [0, 10], [0.0, 2.0], [-1.0, 1.0], [1.0, 3.0]), Line("c", [0, 5, 10], [1.0, math.nan, 1.0])]
        root = ElementTree.fromstring(line_chart(lines, title="t & t", x_label="step", y_label="%"))
        curves = [curve.attrib["points"].split() for curve in root.iter(f"{SVG}polyline")]
        assert [len(points) for points in curves] == [2, 2]  # NaN is left out
        (x0, y0), (x1, y1) = (tuple(map(float, point.split(","))) for point in curves[0])
        (_, flat0), (_, flat1) = (tuple(map(float, point.split(","))) for point in curves[1])
        assert x0 < x1
        assert flat0 == flat1 == pytest.approx((y0 + y1) / 2, abs=0.1)  # 1 lies midway between 0 and 2
        assert len(list(root.iter(f"{SVG}polygon"))) == 1
        assert {"a < b", "c", "t & t", "step", "%"} <= {text.text for text in root.iter(f"{SVG}text")}

    @pytest.mark.parametrize("lines", [[], [Line("one", [1], [0.0])]], ids=["nothing", "one point"])
    def test_of_nothing_and_of_one_point_is_still_a_picture(self, lines):
        root = ElementTree.fromstring(line_chart(lines, title="", x_label="", y_label=""))
        assert root.tag == f"{SVG}svg"
        assert [curve.attrib["points"].count(",") for curve in root.iter(f"{SVG}polyline")] == [1] * len(lines)


class TestJobs:
    def test_starts_none_behind_the_budget(self):
        clock = itertools.count()
        done = list(run_jobs(range(5), lambda job: (job, next(clock)), budget_s=-1))
        assert done == []
        assert [result for _, result in run_jobs(range(3), lambda job: job * job)] == [0, 1, 4]

    def test_one_that_is_not_ready_lets_others_pass(self):
        done: list[int] = []
        for job, _ in run_jobs(range(5), lambda job: job, is_ready=lambda job: job not in (0, 4) or 2 in done):
            done.append(job)
        assert done == [1, 2, 0, 3, 4]
        assert [job for job, _ in run_jobs(range(3), lambda job: job, is_ready=lambda job: job != 1)] == [0, 2]

    @pytest.mark.slow
    def test_in_processes_gives_the_same(self):
        done = dict(run_jobs([1.0, 4.0, 9.0], math.sqrt, parallel=2))
        assert done == {1.0: 1.0, 4.0: 2.0, 9.0: 3.0}
        assert dict(run_jobs(range(4), math.sqrt, parallel=2, budget_s=0)) == {}
        done: list[float] = []
        for job, _ in run_jobs([1.0, 4.0, 9.0], math.sqrt, parallel=2, is_ready=lambda job: job != 1.0 or 9.0 in done):
            done.append(job)
        assert done[-1] == 1.0


@pytest.mark.usefixtures("without_trials")
class TestPlannedArms:
    def test_what_is_accurate_goes_to_8_bits_in_all_roles_though_it_is_slower(self):
        def candidate(kernel: str, role: Role, error: float, time_us: float | None) -> Candidate:
            estimate = Estimate(error, error, error, 9)
            recipe = "fp32" if kernel == "torch.fp32" else f"e4m3 {kernel.partition('.')[2]}"
            forms = ("fp32", "fp32") if kernel == "torch.fp32" else (recipe, recipe)
            times = {} if time_us is None else {64: time_us}
            return Candidate(kernel, role, recipe, error={"mere_floored": estimate}, forms=forms, gemm_us=times)

        candidates = [candidate("torch.fp32", role, 0.0, 5.0) for role in Role]
        candidates += [candidate("reference.tensorwise", role, 0.3 if role is Role.WGRAD else 0.1, None) for role in Role]
        candidates += [candidate("reference.rowwise", role, 0.1, None) for role in Role]
        site = SiteSurvey("tower", 32, 32, False, False, {64: 1.0}, "torch.fp32", tuple(candidates), ())
        environment = current_environment(device_of(CPU))
        survey = Survey(SurveyDocument("f" * 16, environment, Format.FP32, (site,)))
        (planned,) = make_plan(as_if_8_bits_always_paid(survey)).sites
        assert {role: choice.kernel for role, choice in planned.kernels.items()} == {
            Role.FPROP: "reference.tensorwise",
            Role.DGRAD: "reference.tensorwise",
            Role.WGRAD: "reference.rowwise",
        }

    def test_int8_is_for_forward_alone_and_blocks_always_pay_too(self):
        """As on a GPU: gradients span too many binades for it."""
        error, times = {"mere_floored": Estimate(0.1, 0.1, 0.1, 9)}, {64: 5.0}
        high = [Candidate("torch.fp32", role, "fp32", forms=("fp32", "fp32"), gemm_us=times) for role in Role]
        int8 = [Candidate("reference.int8_rowwise", role, "int8 rowwise", error=error, forms=("i8", "i8")) for role in Role]
        slow = BlockCandidate(
            "triton.block",
            "norm",
            None,
            error=dict.fromkeys(Role, error),
            training_us={64: 99.0},
            baseline_training_us={64: 5.0},
        )
        plain = SiteSurvey("tower", 32, 32, False, False, {64: 1.0}, "torch.fp32", (*high, *int8), ())
        block = SiteSurvey("block", 32, 32, False, False, {64: 1.0}, "torch.fp32", tuple(high), (), blocks=(slow,))
        document = SurveyDocument("f" * 16, current_environment(device_of(CPU)), Format.FP32, (plain, block))
        tower, fused = make_plan(as_if_8_bits_always_paid(Survey(document))).sites
        assert [role for role, choice in tower.kernels.items() if choice.kernel == "reference.int8_rowwise"] == [Role.FPROP]
        assert fused.block is not None
        (alone, _) = only_in_roles(Survey(document), ["dgrad"]).sites
        assert {(c.kernel, c.role) for c in alone.candidates if c.kernel != "torch.fp32"} == {
            ("reference.int8_rowwise", Role.DGRAD)
        }
        assert all(site.blocks == () for site in only_in_roles(Survey(document), ["dgrad"]).sites)

    def test_all_seeds_of_an_arm_share_a_plan_from_a_run_of_its_own(self, campaign, results, monkeypatch):
        monkeypatch.setattr("loka.train.loka_plan.CHECKED_EXAMPLES", 2048)
        said: list[str] = []
        campaign = replace(campaign, arms=["loka"], overrides={"model": "dlrm", "steps": 3, "batch_size": 32})
        run_campaign(campaign, results, say=said.append)
        assert sum(line.startswith("planning") for line in said) == 1
        (folder,) = results.json_path.with_name(f"{results.json_path.stem}-plans").iterdir()
        n_moved = sum(site.is_low_precision for site in Plan.load(folder).sites)
        assert [row["sites"] for row in results.rows.values()] == [n_moved, n_moved]
        assert n_moved > 0
        assert sum(f"{n_moved} sites by the plan" in line for line in said) == 1

    @pytest.mark.parametrize("role", list(Role))
    def test_a_role_alone_leaves_the_others_in_high_precision(self, role, campaign, results):
        small = {"model": "dlrm", "steps": 2, "batch_size": 32}
        run_campaign(replace(campaign, arms=[f"loka-{role}-alone"], seeds=[0], overrides=small), results, say=lambda _: None)
        (folder,) = results.json_path.with_name(f"{results.json_path.stem}-plans").iterdir()
        sites = Plan.load(folder).sites
        assert {role for site in sites for role, choice in site.kernels.items() if choice.kernel != "torch.fp32"} == {role}
        assert all(site.block is None for site in sites)

    def test_an_arm_that_plans_from_other_kernels_is_another_arm(self, campaign, results):
        """Or a plan that lies there from other kernels would be taken for its own, and seeds of both averaged."""
        small = {"model": "dlrm", "steps": 2, "batch_size": 32}
        campaign = replace(campaign, arms=["fp32", "loka-without-check"], seeds=[0], overrides=small)
        for kernel in ("reference.rowwise", "reference.tensorwise"):
            run_campaign(replace(campaign, kernels=[kernel]), results, say=lambda _: None)
            (folder,) = results.json_path.with_name(f"{results.json_path.stem}-plans").glob(f"*-loka-without-check-{kernel}-*")
            used = {choice.kernel for site in Plan.load(folder).sites for choice in site.kernels.values()}
            assert used - {"torch.fp32"} == {kernel}
        arms = ["fp32", "loka-without-check-reference.rowwise", "loka-without-check-reference.tensorwise"]
        assert [row["arm"] for row in results.rows.values()] == arms


def test_each_arm_is_compared_with_the_bases_that_fit_it_and_seeds_with_the_last(results: GatheredResults) -> None:
    """Only what has Mods is held against Mods alone; what is not finite is counted, and in no mean."""
    losses = {"fp32": 0.5, "bf16": 0.505, "mods": 0.4, "loka": 0.402}
    for (arm, loss), seed in itertools.product(losses.items(), (0, 1, 2)):
        row = {"setting": "planted", "arm": arm, "seed": seed, "sites": 0, "trajectory": []}
        row["config"] = {"arm": {"mods": ["no_bias"] if arm in ("mods", "loka") else []}}
        finite = {"test": {"log_loss": loss}} if (arm, seed) != ("loka", 2) else {"nonfinite_step": 7}
        results.add(f"{arm}/{seed}", row | finite)
    cells = {line.split(" | ")[1]: line.split(" | ")[2:] for line in make_table(results).splitlines()[2:]}
    assert cells["bf16"][:6] == ["3", "0.50500", "+1.000 % ± 0.000 worse", "", "", "+1.000 / +1.000 / +1.000"]
    assert cells["loka"][:2] == ["3, 1 not finite", "0.40200"]
    assert [cell.split(" %")[0] for cell in cells["loka"][2:5]] == ["-19.600", "-20.396", "+0.500"]
    assert cells["loka"][5] == "+0.500 / +0.500 / +0.500"


@pytest.mark.parametrize(
    ("overrides", "options"), [({}, {"n_layers": 1}), ({"model": "wukong"}, {"n_layers": 1}), ({"model": "dlrm"}, {})]
)
def test_a_settings_own_options_are_for_its_own_model(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, overrides: dict, options: dict
) -> None:
    monkeypatch.setitem(quality_bench.SETTINGS, "planted", replace(config, model_options={"n_layers": 1}))
    campaign = Campaign(["planted"], ["fp32"], [0], "cpu", overrides=overrides)
    assert quality_bench._config(campaign, "planted", 0).model_options == options


def test_products_in_8_bits_are_counted() -> None:
    """A block is in 8 bits whole, another site where a kernel of its own was accurate enough, and a head nowhere."""
    error, high = Estimate(0.1, 0.1, 0.1, 3), {role: Choice("torch.bf16", "") for role in Role}
    sites = (
        SitePlan("a", 64, 32, high, 1.0, 1.0, "", block=BlockPlan("triton.block", None, None)),
        SitePlan("b", 64, 32, high | {Role.FPROP: Choice("a.one", "", error)}, 1.0, 1.0, ""),
    )
    assert _rounded(SimpleNamespace(sites=sites)) == "4 of 6 products in 8 bits"  # type: ignore[arg-type]
