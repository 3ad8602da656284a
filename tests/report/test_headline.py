"""The report's answer: its sentence, its large numbers and the sentences below, against numbers worked out by hand."""

from pathlib import Path

import msgspec
import pytest

from loka.core.estimate import Estimate
from loka.core.gemm import Role
from loka.core.plan import Goal
from loka.core.survey import Ceiling, Survey
from loka.planner.plan import make_plan
from loka.report.headline import headline, summarize
from loka.report.page import gather_page
from loka.report.run import Run, read_run
from loka.report.words import NBSP


def plain(text: str) -> str:
    return text.replace(NBSP, " ")


class TestHeadline:
    def test_leads_with_what_was_measured(self, whole_run: Path) -> None:
        assert plain(headline(read_run(whole_run))) == "Serving 1.80× as fast at +0.003 % ± 0.020 % log-loss"

    @pytest.mark.parametrize(
        ("low", "mean", "high", "words"),
        [
            (0.98, 1.0, 1.02, "Serving as fast as before"),
            (0.98, 1.02, 1.06, "Serving as fast as before (1.02×)"),
            (0.94, 0.98, 1.02, "Serving as fast as before (0.98×)"),
            (0.7, 0.8, 0.9, "Serving slower (0.80× the speed)"),
        ],
    )
    def test_claims_no_speed_up_that_was_not_there(self, comparison, low, mean, high, words) -> None:
        pair = comparison.times[-1]
        slower = msgspec.structs.replace(
            comparison, times=(msgspec.structs.replace(pair, speedup=Estimate(mean, low, high, 9)),)
        )
        assert headline(Run(Path("run"), comparison=slower)).startswith(words)
        assert gather_page(Run(Path("run"), comparison=slower)).tiles[0].is_good is False

    def test_a_loss_within_what_another_precision_makes_is_not_called_worse(self, comparison) -> None:
        tiles = {tile.label: tile for tile in gather_page(Run(Path("run"), comparison=comparison)).tiles}
        assert tiles["log-loss, training"].is_good is None  # +1 % ± 0.5, and bf16 makes up to 1.3 %
        assert tiles["log-loss, serving"].is_good is None  # 0.003 % ± 0.02: not known to be within 0.02 %
        training = msgspec.structs.replace(comparison.quality[0], other=None)
        alone = msgspec.structs.replace(comparison, quality=(training,))
        tiles = {tile.label: tile for tile in gather_page(Run(Path("run"), comparison=alone)).tiles}
        assert tiles["log-loss, training"].is_good is False
        unknown = msgspec.structs.replace(training, change=Estimate(0.001, -0.001, 0.003, 9))  # worse, or by chance
        page = gather_page(Run(Path("run"), comparison=msgspec.structs.replace(comparison, quality=(unknown,))))
        assert {tile.label: tile.is_good for tile in page.tiles}["log-loss, training"] is None

    def test_tiles_say_what_was_before_and_what_is_now(self, whole_run: Path) -> None:
        tiles = gather_page(read_run(whole_run)).tiles
        assert [(tile.label, plain(tile.value), plain(tile.note)) for tile in tiles] == [
            ("training step", "1.04×", "± 0.01; 29.4 ms → 28.2 ms a batch of 8,192"),
            ("serving", "1.80×", "± 0.02; 9 ms → 5 ms a batch of 2,048"),
            ("log-loss, training", "+1.000 %", "± 0.500 %; 0.12000 → 0.12120"),
            ("log-loss, serving", "+0.003 %", "± 0.020 %; 0.12000 → 0.12000"),
            ("sites in low precision", "1 of 4", "60 % of the sites' time; onednn.int8"),
        ]

    @pytest.mark.parametrize(
        ("names", "words"), [("aabbcd", "; a, b and 2 more"), ("aabbc", "; a, b and 1 more"), ("aab", "; a, b")]
    )
    def test_of_many_kernels_the_rest_is_counted(self, survey, names, words) -> None:
        plan = make_plan(survey, goal=Goal.SERVING).document
        chosen = plan.sites[0]
        kernel = chosen.kernels[Role.FPROP]
        sites = [
            msgspec.structs.replace(chosen, kernels={Role.FPROP: msgspec.structs.replace(kernel, kernel=name)})
            for name in names
        ]
        page = gather_page(Run(Path("run"), plan=msgspec.structs.replace(plan, sites=tuple(sites))))
        assert plain(page.tiles[0].note).endswith(words)

    def test_the_summary_says_the_limits_and_the_ceiling(self, survey) -> None:
        plan = make_plan(survey, goal=Goal.SERVING, max_error={Role.FPROP: 0.1, Role.WGRAD: 0.3}).document
        limits, ceiling = gather_page(Run(Path("run"), plan=plan, survey=survey.document)).summary
        assert "error at most 0.3, speed-up at least 1.05×, casts included." in limits
        assert plain(ceiling) == (
            "Sites and blocks take 80 % of the 5 ms step that was probed. "
            "If they took no time at all, the step would be at most 5.0× as fast."
        )
        (whole,) = summarize(Run(Path("run"), survey=msgspec.structs.replace(survey.document, ceiling=Ceiling(5000, 4990))))
        assert plain(whole) == "Sites and blocks take nearly all of the 5 ms step that was probed."  # no 500×

    def test_the_summary_says_with_what_the_model_was_compared(self, comparison) -> None:
        (both,) = summarize(Run(Path("run"), comparison=comparison))
        assert plain(both) == (
            "Wukong small on the synthetic stream, compared with the same model in fp32. "
            "Training: 400 steps each on the same batches, log-loss +1.000 % ± 0.500 % (bf16: +0.900 % ± 0.400 %). "
            "Serving: the same weights in both, 131,072 held-out examples."
        )

    def test_then_with_what_is_planned_surveyed_or_nothing(self, survey) -> None:
        plan = make_plan(survey, goal=Goal.SERVING).document
        promised = "The plan puts 1 of 4 sites in low precision, and promises 1.67× over all sites"  # 1000 ÷ 600 µs
        assert headline(Run(Path("run"), plan=plan)) == promised
        none = make_plan(survey, goal=Goal.SERVING, max_error=0.001).document
        nothing = Run(Path("run"), plan=none, survey=survey.document)
        assert headline(nothing) == "All 4 sites stay in fp32: nothing was both safe and faster"
        assert headline(Run(Path("run"), survey=survey.document)) == "4 sites measured, no plan yet"
        assert headline(Run(Path("run"))) == "Nothing measured yet"

    def test_sites_that_an_exact_kernel_makes_faster_are_counted_apart(self, exact_survey) -> None:
        plan = make_plan(exact_survey, goal=Goal.SERVING).document
        run = Run(Path("run"), plan=plan)
        words = "The plan puts 1 of 4 sites in low precision, 1 in fp32 on another kernel, and promises 1.72× over all sites"
        assert headline(run) == words  # 1000 ÷ 580 µs
        page = gather_page(run)
        moved = "The plan for serving moves 1 of 4 sites (60 % of all sites' time) out of fp32, and 1 to another kernel in it."
        assert plain(page.summary[0]).startswith(moved)
        assert [tile.value for tile in page.tiles] == ["1 of 4", "1.72×"]
        nothing_low = make_plan(exact_survey, goal=Goal.SERVING, kernels=["torch.fp32_left"]).document
        promised = "The plan puts 0 of 4 sites in low precision, 1 in fp32 on another kernel, and promises 1.02× over all sites"
        assert headline(Run(Path("run"), plan=nothing_low)) == promised
        assert [tile.value for tile in gather_page(Run(Path("run"), plan=nothing_low)).tiles] == ["0 of 4", "1.02×"]

    def test_where_no_kernel_is_able_that_is_the_reason(self, survey, comparison) -> None:
        sites = []
        for site in survey.sites:
            unable = [
                candidate if candidate.kernel == site.baseline else msgspec.structs.replace(candidate, why_not="needs VNNI")
                for candidate in site.candidates
            ]
            sites.append(msgspec.structs.replace(site, candidates=tuple(unable)))
        document = msgspec.structs.replace(survey.document, sites=tuple(sites))
        plan = make_plan(Survey(document), goal=Goal.SERVING).document
        nothing_to_compare = msgspec.structs.replace(comparison, quality=(), times=())
        run = Run(Path("run"), plan=plan, survey=document, comparison=nothing_to_compare)
        assert headline(run) == "All 4 sites stay in fp32: no low-precision kernel can run here"
        page = gather_page(run)
        assert [tile.label for tile in page.tiles] == ["sites in low precision"]
        assert len(page.summary) == 2  # of the plan and of the ceiling
