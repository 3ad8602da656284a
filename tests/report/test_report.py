"""What the report says, against numbers worked out by hand."""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import msgspec
import pytest
import torch

from loka.core.comparison import WAITING
from loka.core.errors import InvalidInput
from loka.core.estimate import Estimate
from loka.core.gemm import Role
from loka.core.plan import Goal, Plan
from loka.core.survey import Survey
from loka.planner.plan import make_plan
from loka.probe.statistics.binades import counts_by_binade
from loka.report.curves import MOST_POINTS, draw_curves
from loka.report.distributions import format_ranges, histogram_of
from loka.report.page import gather_page, render_page
from loka.report.plan_view import draw_map, shares
from loka.report.run import MetricsLine, Run, WindowMetrics, read_run
from loka.report.words import NBSP, change_percent, duration, number, with_interval
from loka.report.write import write_report


def plain(text: str) -> str:
    return text.replace(NBSP, " ")


def line(step: int, loss: float | None, best: float | None = None) -> MetricsLine:
    return MetricsLine(step, WindowMetrics(100 * step, loss, loss, best))


class TestMap:
    def test_every_site_is_in_its_field(self, survey) -> None:
        plan = make_plan(survey, goal=Goal.SERVING).document
        points = {point.site: point for point in draw_map(plan, survey.document).points}
        fields = {site: (point.is_safe, point.is_fast, point.is_chosen) for site, point in points.items()}
        assert fields == {
            "layers.0.hidden": (True, True, True),
            "layers.1.hidden": (True, False, False),
            "layers.0.out": (False, True, False),
            "top.0": (False, False, False),
        }
        assert points["layers.0.hidden"].speedup == pytest.approx(3.0)  # 600 µs against 190 and a cast of 10
        assert points["layers.1.hidden"].speedup == pytest.approx(0.5)
        assert points["layers.0.out"].error == 0.5
        assert shares(plan)["layers.0.hidden"] == pytest.approx(0.6)

    def test_a_site_whose_interval_reaches_past_the_limit_is_not_safe(self, survey) -> None:
        drawn = draw_map(make_plan(survey, goal=Goal.SERVING, max_error=0.51).document, survey.document)
        (near,) = (point for point in drawn.points if point.site == "layers.0.out")  # 0.5, and up to 0.525
        assert (near.error, near.is_safe, near.is_chosen) == (0.5, False, False)

    def test_limits_that_differ_by_role_share_an_axis(self, survey) -> None:
        plan = make_plan(survey, goal=Goal.SERVING, max_error={Role.FPROP: 0.1, Role.DGRAD: 0.2}).document
        drawn = draw_map(plan, survey.document)
        assert (drawn.max_error, drawn.error_axis) == (1.0, "error ÷ the role's limit")
        assert {point.site: point.error for point in drawn.points}["layers.0.out"] == pytest.approx(5.0)

    def test_sites_without_numbers_are_listed_beside_it(self, survey) -> None:
        plan = make_plan(survey, goal=Goal.SERVING).document
        drawn = draw_map(plan, None)
        assert [point.site for point in drawn.points] == ["layers.0.hidden"]
        assert [site for site, _ in drawn.off_the_map] == ["layers.1.hidden", "layers.0.out", "top.0"]

    def test_a_site_that_an_exact_kernel_makes_faster_is_beside_it_too(self, exact_survey) -> None:
        """It has no error; and what it might have had in low precision, it was not given."""
        drawn = draw_map(make_plan(exact_survey, goal=Goal.SERVING).document, exact_survey.document)
        assert drawn.off_the_map == (("layers.0.out", "1.25× torch.fp32, casts included"),)
        assert {point.site: point.kernel for point in drawn.points}["top.0"] == "onednn.int8"


class TestCurves:
    def test_the_difference_is_of_paired_windows(self) -> None:
        high = [line(1, 0.5), line(2, 0.4), line(3, 0.2), line(4, None)]
        planned = [line(1, 0.505), line(2, 0.4), line(3, 0.198), line(5, 0.1)]
        curves = draw_curves({"high": high, "planned": planned}, "bf16")
        assert curves is not None
        assert [curve.name for curve in curves.curves] == ["bf16", "LoKA"]
        assert curves.other is None
        assert curves.difference is not None
        assert curves.difference.steps == (1, 2, 3)
        assert curves.difference.change == pytest.approx((1.0, 0.0, -1.0))
        assert curves.difference.mean == pytest.approx((0.5, 0.0))  # from the second window on
        assert curves.difference.high[-1] == pytest.approx(4.302652729911275 / 3**0.5)  # t of 2 degrees · s/√3, s = 1

    def test_a_twin_that_trained_longer_is_compared_over_the_windows_of_both(self) -> None:
        """However many windows of each are drawn as one."""
        lines = [line(step, 1 + step / 100) for step in range(1, 3 * MOST_POINTS)]
        curves = draw_curves({"high": lines, "planned": lines[: MOST_POINTS + 50]}, "bf16")
        assert curves is not None
        assert curves.difference is not None
        assert curves.difference.change == pytest.approx([0.0] * len(curves.difference.steps), abs=1e-12)
        assert curves.difference.steps[-1] == MOST_POINTS + 50

    def test_long_runs_are_merged_by_examples(self) -> None:
        lines = [line(step, float(step)) for step in range(1, 2 * MOST_POINTS + 1)]
        curves = draw_curves({"training": lines}, "fp32")
        assert curves is not None
        (curve,) = curves.curves
        assert len(curve.steps) == MOST_POINTS
        assert curve.log_loss[0] == pytest.approx((1 * 100 + 2 * 200) / 300)
        assert curve.steps[0] == 2
        assert curves.difference is None
        half = draw_curves({"training": lines[: MOST_POINTS + MOST_POINTS // 2]}, "fp32")
        assert half is not None
        assert len(half.curves[0].steps) == 3 * MOST_POINTS // 4

    def test_the_best_loss_is_in_the_same_unit(self) -> None:
        curves = draw_curves({"training": [MetricsLine(1, WindowMetrics(10, 0.3, 1.5, 1.0))]}, "fp32")
        assert curves is not None
        assert curves.best is not None
        assert curves.best.log_loss == pytest.approx((0.2,))

    def test_where_windows_are_merged_the_best_loss_is_of_all_of_them(self) -> None:
        lines = [line(step, 0.5, None if step == 1 else 0.4) for step in range(1, 2 * MOST_POINTS + 1)]
        curves = draw_curves({"training": lines}, "fp32")
        assert curves is not None
        assert curves.best is not None
        assert (curves.best.steps[0], len(curves.best.steps)) == (4, MOST_POINTS - 1)
        assert curves.best.log_loss == pytest.approx([0.4] * (MOST_POINTS - 1))


class TestDistributions:
    def test_binades_become_shares(self) -> None:
        histogram = histogram_of(counts_by_binade(torch.tensor([[0.0, 1.0, -1.5, 2.0], [0.25, 0.49, -3.99, 0.0]])))
        assert histogram is not None
        assert (histogram.first, histogram.below, histogram.zeros) == (-2, 4.0, 0.25)
        assert histogram.shares == (0.25, 0.0, 0.25, 0.25)

    def test_nothing_is_drawn_of_zeros(self) -> None:
        assert histogram_of(counts_by_binade(torch.zeros(2, 3))) is None
        assert histogram_of(None) is None

    @pytest.mark.parametrize(("name", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
    def test_a_format_flushes_where_it_says(self, name: str, dtype: torch.dtype) -> None:
        ranges = {format.name: format for format in format_ranges()}
        top = torch.finfo(dtype).max
        edge = top * 2.0 ** -ranges[name].flush
        assert torch.tensor(edge * 0.99).to(dtype).float() == 0
        assert torch.tensor(edge * 1.01).to(dtype).float() > 0
        assert top * 2.0 ** -ranges[name].normal == pytest.approx(torch.finfo(dtype).smallest_normal)

    def test_each_site_has_its_own(self, record) -> None:
        page = gather_page(Run(Path("run"), record=record))
        assert [site.site for site in page.distributions] == list(record.sites)
        assert all(site.x and abs(sum(site.x.shares) + site.x.zeros - 1) < 1e-4 for site in page.distributions)
        assert page.findings[0].remedy.startswith("The transform center fixes this")
        for drawn, site in zip(page.distributions, record.sites.values(), strict=True):
            counts = site.statistics["binades"].tensors
            assert (drawn.x, drawn.dy) == (histogram_of(counts["x_B"]), histogram_of(counts["dy_B"]))
            assert drawn.x != drawn.dy

    def test_without_a_plan_the_format_is_the_devices(self, record) -> None:
        for cuda, format in ((None, "int8"), ("13.0", "e4m3")):
            environment = msgspec.structs.replace(record.environment, cuda=cuda)
            page = gather_page(Run(Path("run"), record=dataclasses.replace(record, environment=environment)))
            assert {site.format for site in page.distributions} == {format}


class TestIncompleteRuns:
    def test_a_folder_that_is_not_there(self) -> None:
        with pytest.raises(InvalidInput, match=r"no folder nowhere.*loka demo"):
            write_report("nowhere")

    def test_an_empty_one_names_every_part_and_its_command(self, tmp_path: Path) -> None:
        missing = {part.part: part.command for part in gather_page(read_run(tmp_path)).missing}
        assert set(missing) == {"record", "survey", "plan", "training"}
        assert "--steps" in missing["training"]
        assert missing["plan"] == f"loka plan {tmp_path}"

    def test_a_comparison_is_missing_only_where_a_demo_has_begun(self, tmp_path: Path) -> None:
        """Nothing else makes one."""
        (tmp_path / "twins").mkdir()
        missing = {part.part: part.command for part in gather_page(read_run(tmp_path)).missing}
        assert missing["comparison"] == f"loka demo -o {tmp_path}"

    def test_a_folder_whose_name_is_no_text(self, tmp_path: Path) -> None:
        folder = tmp_path / os.fsdecode(b"bad\xff")
        folder.mkdir()
        assert "loka plan" in render_page(gather_page(read_run(folder)))

    @pytest.mark.parametrize("name", ["survey.json", "plan.json", "comparison.json", "record.safetensors"])
    def test_a_damaged_file_is_told_and_the_rest_is_shown(self, whole_run: Path, name: str) -> None:
        (whole_run / name).write_bytes((whole_run / name).read_bytes()[:50])
        page = gather_page(read_run(whole_run))
        (missing,) = page.missing
        assert name in missing.why
        assert page.headline != "Nothing measured yet"
        render_page(page)

    @pytest.mark.parametrize(
        ("name", "before", "after"),
        [
            ("plan.json", '"wgrad": 0.2', '"wgrad": 0.0'),
            ("plan.json", '"fprop": 0.2,', ""),
            ("survey.json", '"calls": {', '"calls": {"7": 0.0, '),
        ],
    )
    def test_so_is_one_with_numbers_that_cannot_be(self, whole_run: Path, name: str, before: str, after: str) -> None:
        text = (whole_run / name).read_text()
        assert before in text
        (whole_run / name).write_text(text.replace(before, after))
        page = gather_page(read_run(whole_run))
        assert [part.part for part in page.missing] == [name.partition(".")[0]]
        render_page(page)

    def test_a_part_made_from_another_is_told(self, whole_run: Path, record) -> None:
        """Probed again behind the plan: the same model, other values."""
        assert gather_page(read_run(whole_run)).missing == ()
        dataclasses.replace(record, id="another").save(whole_run)
        page = gather_page(read_run(whole_run))
        (told,) = page.missing
        assert (told.part, told.command) == ("survey", f"loka measure {whole_run}")
        assert "survey.json was measured from a different record" in told.why
        assert page.plan

    def test_a_plan_of_another_survey_is_told(self, whole_run: Path) -> None:
        Survey(msgspec.structs.replace(Survey.load(whole_run).document, findings=("measured again",))).save(whole_run)
        (told,) = gather_page(read_run(whole_run)).missing
        assert (told.part, told.command) == ("plan", f"loka plan {whole_run}")
        assert "plan.json was made from a different survey" in told.why

    def test_parts_that_name_nothing_are_of_no_part_that_does(self, whole_run: Path) -> None:
        """Measured and planned by a LoKA that did not write ids, and probed, or measured, by one that does."""
        survey = Survey.load(whole_run)
        nameless = msgspec.structs.replace(survey.document, record="")
        Survey(nameless).save(whole_run)
        make_plan(Survey(nameless)).save(whole_run)
        assert [part.part for part in read_run(whole_run).missing] == ["survey"]
        survey.save(whole_run)
        plan = make_plan(survey)
        Plan(msgspec.structs.replace(plan.document, survey="")).save(whole_run)
        assert [part.part for part in read_run(whole_run).missing] == ["plan"]

    def test_a_copied_run_is_whole(self, whole_run: Path, tmp_path: Path) -> None:
        """Copies are as old as their turn."""
        copied = tmp_path / "copied"
        copied.mkdir()
        for age, name in enumerate(("record.safetensors", "survey.json", "plan.json")):
            shutil.copy(whole_run / name, copied)
            os.utime(copied / name, (1e9 - age, 1e9 - age))
        assert [part.part for part in gather_page(read_run(copied)).missing] == ["training"]

    def test_lines_without_examples_and_folders_in_place_of_files(self, whole_run: Path) -> None:
        file = whole_run / "twins" / "high" / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text(re.sub(r'"examples": \d+', '"examples": 0', lines[0]) + "".join(lines[1:]))
        assert len(read_run(whole_run).training["high"]) == len(lines) - 1
        file.unlink()
        file.mkdir()
        assert "high" not in read_run(whole_run).training
        write_report(whole_run)

    def test_counts_that_are_not_finite_are_not_drawn(self) -> None:
        counts = counts_by_binade(torch.randn(100, 4)).float()
        assert histogram_of(counts) is not None
        counts[0] = torch.nan
        assert histogram_of(counts) is None

    def test_what_another_model_left_in_the_folder_is_not_taken_for_this_ones(self, whole_run: Path, record, survey) -> None:
        """`loka demo`, then one's own model is probed and measured, all into the default folder."""
        dataclasses.replace(record, fingerprint="fedcba9876543210").save(whole_run)
        page = gather_page(read_run(whole_run))
        assert {part.part: part.why for part in page.missing} == {
            "survey": "survey.json belongs to a different model than record.safetensors",
            "plan": "plan.json belongs to a different model than record.safetensors",
            "comparison": "comparison.json belongs to a different model than record.safetensors",
            "training": "metrics.jsonl belongs to a different model than record.safetensors",
        }
        assert page.headline == "4 sites probed, nothing measured yet"
        assert (page.tiles, page.plan, page.curves, page.times) == ((), (), None, ())
        record.save(whole_run)
        document = msgspec.structs.replace(survey.document, fingerprint="fedcba9876543210")
        Survey(document).save(whole_run)  # as loka.measure(record, out=run) does, without a file of its record
        page = gather_page(read_run(whole_run))
        assert page.headline == "4 sites measured, no plan yet"
        assert page.distributions == ()

    def test_a_line_cut_off_by_a_kill_is_left_out(self, whole_run: Path) -> None:
        file = whole_run / "twins" / "high" / "metrics.jsonl"
        file.write_bytes(file.read_bytes()[:-20])
        assert len(read_run(whole_run).training["high"]) == 39

    def test_of_one_twin_alone_its_curve_is_the_runs(self, whole_run: Path) -> None:
        """A demo that was stopped between the two."""
        (whole_run / "twins" / "planned" / "metrics.jsonl").unlink()
        training = read_run(whole_run).training
        assert {name: len(lines) for name, lines in training.items()} == {"training": 40}


def test_the_file_is_one_page_with_nothing_left_to_fill_in(whole_run: Path) -> None:
    text = write_report(whole_run).read_text()
    assert "/*LOKA:" not in text
    assert not re.search(r"""(src|href)=["']?(http|//)|@import|url\(["']?http""", text)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data
    assert json.loads(data[1])["title"] == "Wukong small on the synthetic stream"


def test_what_a_name_holds_does_not_end_the_pages_data() -> None:
    text = render_page(msgspec.structs.replace(gather_page(Run(Path("run"))), title="a</script>b"))
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data
    assert json.loads(data[1])["title"] == "a</script>b"


def test_bars_are_of_what_both_do_then_of_one_alone_then_of_waiting(comparison) -> None:
    training, _ = gather_page(Run(Path("run"), comparison=comparison)).times
    assert [(bar.kind, bar.high_us, bar.planned_us, bar.is_idle) for bar in training.kinds] == [
        ("GEMM", 18_000.0, 12_500.0, False),
        ("norm, activation", 5_000.0, 5_100.0, False),
        ("optimizer", 2_100.0, 2_100.0, False),
        ("cast", 0.0, 2_300.0, False),
        (WAITING, 4_300.0, 6_200.0, True),
    ]


def test_what_no_kernel_covers_is_told_before_anything_is_measured(record, survey) -> None:
    probed = dataclasses.replace(record, uncovered=("softmax in top",))
    assert gather_page(Run(Path("run"), record=probed)).uncovered == ("softmax in top",)
    assert gather_page(Run(Path("run"), record=probed, survey=survey.document)).uncovered == ("bmm in layers.0",)


def test_numbers_read_well() -> None:
    assert [number(value) for value in (0, 0.0123456, 12.3, -2.5, 1e-5, 999.4, 999.7, -1234, 123456, 1e6)] == [
        "0",
        "0.0123",
        "12.3",
        "−2.5",
        "1.00e−05",
        "999",
        "1,000",
        "−1,234",
        "123,456",
        "1.00e+06",
    ]
    assert [plain(duration(us)) for us in (7, 123.4, 999.7, 676130, 999700, 2.5e6)] == [
        "7 µs",
        "123 µs",
        "1 ms",
        "676 ms",
        "1 s",
        "2.5 s",
    ]
    assert [with_interval(m, m - h, m + h) for m, h in ((0.0104, 0.000937), (0.5, 0.02), (2.0, 0.0), (30.0, 4.0))] == [
        "0.0104 ± 0.0009",
        "0.50 ± 0.02",
        "2",
        "30 ± 4",
    ]
    assert plain(change_percent(Estimate(-2e-4, -4e-4, 0.0, 8))) == "−0.020 % ± 0.020 %"


@pytest.mark.parametrize("compiled", [False, True])
def test_times_of_a_compiled_model_are_told(compiled: bool, survey: Survey) -> None:
    document = msgspec.structs.replace(survey.document, compiled=compiled)
    rows = dict(gather_page(Run(Path("run"), survey=document)).environment)
    assert rows.get("times") == ("of a model under torch.compile" if compiled else None)
