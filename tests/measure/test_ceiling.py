"""The ceiling: how much of a step its sites hold."""

import dataclasses

import msgspec
import pytest
from stand_in_records import normal_weight, record_of, site_record

from loka.core.progress import Silent
from loka.core.survey import BlockCandidate, Ceiling, SiteSurvey
from loka.measure.ceiling import describe_ceiling, with_blocks
from loka.measure.survey import measure


class TestCeiling:
    def test_is_the_share_of_the_baseline_in_a_step(self) -> None:
        said: list[str] = []

        class Listening(Silent):
            def say(self, line: str) -> None:
                said.append(line)

        record = record_of(site_record("a", normal_weight(), calls={128: 3.0}), step_us=1e5, uncovered=("linear in top",))
        survey = measure(record, kernels=["torch.fp32"], progress=Listening())
        ceiling = survey.document.ceiling
        assert ceiling is not None
        step_us = 3 * sum(c.gemm_us[128] for c in survey.sites[0].candidates)
        assert ceiling.sites_us == pytest.approx(step_us)  # timed once, so the very numbers
        assert ceiling.uncovered == ("linear in top",)
        assert said[0].startswith(f"the GEMMs of 1 sites take {step_us / 1e5:.0%} of a step")
        assert said[0].endswith("Not covered: linear in top.")

    def test_of_a_step_shorter_than_its_sites_no_share_is_told(self) -> None:
        record = record_of(site_record("a", normal_weight(), calls={128: 3.0}))
        told = describe_ceiling(Ceiling(step_us=124e3, sites_us=194e3), record)
        assert told == (
            "the GEMMs of 1 sites, each timed by itself, take 194 ms together, and a whole step took 124 ms: "
            "their share in it is not known."
        )

    def test_rows_that_were_not_timed_take_what_the_nearest_above_do(self) -> None:
        calls = {m: 2.0 if m in (8, 16, 32, 64, 128, 256) else 1.0 for m in (8, 12, 16, 24, 32, 64, 128, 256, 512)}
        survey = measure(record_of(site_record("a", normal_weight(), calls=calls), step_us=1e6), kernels=["torch.fp32"])
        stand_ins = {8: 2.0, 16: 1.0 + 2.0, 32: 1.0 + 2.0, 64: 2.0, 128: 2.0, 256: 2.0, 512: 1.0}
        step_us = sum(n * sum(c.gemm_us[m] for c in survey.sites[0].candidates) for m, n in stand_ins.items())
        assert survey.document.ceiling is not None
        assert survey.document.ceiling.sites_us == pytest.approx(step_us)

    def test_what_blocks_take_over_is_in_reach_too(self) -> None:
        able = {"epilogue_training_us": {8: 5.0, 64: 20.0}, "entry_baseline_training_us": {64: 7.0}}
        one = SiteSurvey(
            "a", 4, 4, False, False, {6: 2.0, 64: 1.0, 100: 1.0}, "torch.fp32", (), (),
            blocks=(
                BlockCandidate("triton.block", "norm", None, why_not="no Triton here"),
                BlockCandidate("triton.block", None, "act", epilogue_training_us={64: 1.0}),
                BlockCandidate("triton.block", "norm", "act", **able),  # type: ignore[arg-type]
            ),
        )  # fmt: skip
        ceiling = with_blocks(Ceiling(1000.0, 100.0), [one, msgspec.structs.replace(one, blocks=())])
        assert ceiling is not None
        assert ceiling.sites_us == 100.0 + (2 * 5.0 + 20.0 + 20.0) + (2 * 7.0 + 7.0 + 7.0)
        assert with_blocks(None, [one]) is None

    def test_is_not_claimed_of_another_machine(self) -> None:
        record = record_of(site_record("a", normal_weight()), step_us=1e5)
        environment = msgspec.structs.replace(record.environment, device="NVIDIA H200")
        elsewhere = dataclasses.replace(record, environment=environment)
        assert measure(elsewhere, kernels=["torch.fp32"]).document.ceiling is None
