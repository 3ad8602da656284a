"""``loka measure`` as a user calls it: from a record on disk to a survey, with one message where there is none."""

from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

import loka
from loka.cli import app
from loka.cli.measure import _print
from loka.core.environment import current_environment
from loka.core.errors import InvalidFile, InvalidInput, LokaError
from loka.core.gemm import Role
from loka.core.recipe import Format
from loka.core.survey import Candidate, SiteSurvey, Survey, SurveyDocument
from loka.kernels.device import device_of


def run(words: str) -> None:
    app(words, exit_on_error=False, result_action="return_value")


def record(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 1))
    probe = loka.Probe(model, every=1)
    for _ in range(4):
        with probe.step():
            model(torch.randn(64, 24)).square().mean().backward()
    probe.record().save(folder)
    probe.detach()


@pytest.mark.parametrize(("more", "told"), [("", ""), ("--kernels torch.bf16 onednn.int8 --device cpu",) * 2])
def test_interrupted_it_tells_the_whole_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: str, told: str
) -> None:
    """With other kernels it would begin again."""
    record(tmp_path)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("loka.measure.survey"), "measure", interrupt)  # loka.measure is a function
    with pytest.raises(SystemExit, match="130"):
        run(f"measure {tmp_path} {more}")
    assert f"stopped: run `{f'loka measure {tmp_path} {told}'.strip()}` to continue" in capsys.readouterr().err


def test_takes_the_paths_of_files_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path)
    run(f"measure {tmp_path}/record.safetensors --kernels torch.bf16 --device cpu")
    run(f"plan {tmp_path}/survey.json")
    assert loka.Plan.load(tmp_path).document == loka.Plan.load(tmp_path / "plan.json").document
    assert f"loka report {tmp_path}," in capsys.readouterr().out.replace("\n", "")


def test_what_was_measured_compiled_is_planned_for_serving(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path)
    run(f"measure {tmp_path} --compiled --kernels torch.fp32 --device cpu")
    assert f"Next: loka plan {tmp_path} --goal serving" in capsys.readouterr().out
    run(f"plan {tmp_path} --goal serving")
    with pytest.raises(InvalidInput, match="plan for serving by it"):
        run(f"plan {tmp_path}")


def test_measures_what_a_probe_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path)
    run(f"measure {tmp_path} --kernels torch.bf16 reference.rowwise --device cpu")
    survey = Survey.load(tmp_path)
    assert [site.site for site in survey.sites] == ["0", "2"]
    assert survey.ceiling == survey.document.ceiling
    assert Survey.load(tmp_path / "survey.json").document == survey.document
    assert {c.kernel for c in survey.sites[0].candidates} == {"torch.fp32", "torch.bf16", "reference.rowwise"}
    printed = capsys.readouterr().out
    assert "2 sites" in printed.splitlines()[0]
    assert "64×24×32" in printed
    assert f"Next: loka plan {tmp_path}" in printed.replace("\n", "")


TRIED_IN_VAIN = (
    "failed: RuntimeError: cutlass cannot implement",
    "failed: out of memory: CUDA out of memory. Tried to allocate 6 GiB",
    "returned NaN or inf",
    "returned nonsense: relative RMS error 1.2, where e4m3 rowwise gives 0.04",
    "hung for 60 s at fprop of 128x256x256, tried in a process of its own",
    "ended its process with exit code 3 at fprop of 128x256x256, tried in a process of its own",
)


def test_of_what_could_not_run_it_tells_what_was_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the text alone, as surveys have always kept it: what kernels refuse by themselves would be lines without end."""
    refused = ("needs an NVIDIA GPU", "needs a contraction of at least 64, got k=24", None)
    candidates = tuple(Candidate(f"k{i}", Role.FPROP, "e4m3", why_not=why) for i, why in enumerate((*refused, *TRIED_IN_VAIN)))
    site = SiteSurvey("a", 24, 32, False, False, {64: 1.0}, "torch.fp32", candidates, ())
    environment = current_environment(device_of(torch.device("cpu")))
    Survey(SurveyDocument("fingerprint", environment, Format.FP32, (site,))).save(tmp_path)
    _print(Survey.load(tmp_path))
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("left out: ") == len(TRIED_IN_VAIN)
    for i, why in enumerate(TRIED_IN_VAIN, start=len(refused)):
        assert f"left out: k{i} at a fprop: {why}" in told


@pytest.mark.parametrize(
    ("kernels", "message"), [("torch.rowwise", "none of the kernels that were named"), ("", "no kernel is")]
)
def test_a_survey_of_nothing_does_not_take_the_place_of_one(tmp_path: Path, kernels: str, message: str) -> None:
    model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 1))
    probe = loka.Probe(model, every=1)
    with probe.step():
        model(torch.randn(64, 24)).square().mean().backward()
    probe.record().save(tmp_path)
    probe.detach()
    (tmp_path / "survey.json").write_text("whole")
    with pytest.raises(LokaError, match=message):
        run(f"measure {tmp_path} --device cpu --kernels {kernels}")
    assert (tmp_path / "survey.json").read_text() == "whole"


def test_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InvalidFile, match=r"there is no .*record.safetensors: make it with `loka probe"):
        run(f"measure {tmp_path}")
