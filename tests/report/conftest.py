"""A planted run: every number in it is known, so that what a page says can be checked."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from loka.core.comparison import WAITING, Comparison, QualityPair, TimePair
from loka.core.environment import Environment
from loka.core.estimate import Estimate
from loka.core.gemm import Role, TensorName
from loka.core.plan import Goal
from loka.core.recipe import Format
from loka.core.record import Record
from loka.core.site_record import Finding
from loka.core.survey import Candidate, CastTime, Ceiling, SiteSurvey, Survey, SurveyDocument
from loka.planner.plan import make_plan
from loka.probe.probe import Probe

ENVIRONMENT = Environment("a test device", "3.12.0", "0.1.0", {"torch": "2.13.0"}, None, "2026-11-15")
CAST = "int8 rowwise"


def around(mean: float, half: float = 0.0) -> Estimate:
    return Estimate(mean, mean - half, mean + half, 50)


def make_site(name: str, base_us: float, low_us: float, error: float, *, k: int = 64, n: int = 64) -> SiteSurvey:
    """A site at 2048 rows: ``base_us`` for fprop in fp32, ``low_us`` in INT8 of which 10 µs are the cast of x."""
    candidates = [Candidate("torch.fp32", role, "fp32", forms=("fp32", "fp32"), gemm_us={2048: base_us}) for role in Role]
    low = [
        Candidate(
            "onednn.int8",
            Role.FPROP,
            "int8 rowwise",
            error={"mere_floored": around(error, error / 20)},
            forms=(CAST, CAST),
            gemm_us={2048: low_us - 10},
        ),
        *(
            Candidate(kernel, role, "e4m3", why_not="needs FP8 tensor cores, this is a test device")
            for kernel in ("torch.rowwise", "torch.tensorwise")
            for role in Role
        ),
    ]
    casts = (CastTime(TensorName.X, (CAST,), {2048: 10.0}),)
    return SiteSurvey(name, k, n, False, False, {2048: 1.0}, "torch.fp32", tuple(candidates + low), casts)


@pytest.fixture
def survey() -> Survey:
    """One site in each field of the map: 60, 20, 10 and 10 % of the time."""
    sites = (
        make_site("layers.0.hidden", 600, 200, 0.02, n=128),
        make_site("layers.1.hidden", 200, 400, 0.02),
        make_site("layers.0.out", 100, 50, 0.5),
        make_site("top.0", 100, 200, 0.4),
    )
    ceiling = Ceiling(step_us=5000, sites_us=4000, uncovered=("bmm in layers.0",))
    return Survey(SurveyDocument("0123456789abcdef", ENVIRONMENT, Format.FP32, sites, ceiling))


@pytest.fixture
def exact_survey(survey: Survey) -> Survey:
    """The same, and two of its sites can be multiplied as in fp32 on another kernel: one gains by that, and one does not."""
    exact_us = {"layers.0.out": 80.0, "top.0": 99.0}

    def with_exact(site: SiteSurvey) -> SiteSurvey:
        times = {2048: exact_us[site.site]}
        exact = Candidate(
            "torch.fp32_left", Role.FPROP, "fp32", error={"mere_floored": around(1e-7)}, forms=("fp32", "fp32"), gemm_us=times
        )
        return msgspec.structs.replace(site, candidates=(*site.candidates, exact))

    sites = tuple(with_exact(site) if site.site in exact_us else site for site in survey.sites)
    return Survey(msgspec.structs.replace(survey.document, sites=sites))


@pytest.fixture
def comparison() -> Comparison:
    return Comparison(
        model="Wukong small on the synthetic stream",
        fingerprint="0123456789abcdef",
        environment=ENVIRONMENT,
        dtype=Format.FP32,
        training_steps=400,
        quality=(
            QualityPair(Goal.TRAINING, 0.12, 0.1212, around(1e-2, 5e-3), 131_072, around(9e-3, 4e-3)),
            QualityPair(Goal.SERVING, 0.12, 0.1200036, around(3e-5, 2e-4), 131_072),
        ),
        times=(
            TimePair(  # as on a GPU: casts on one side alone, and time in which nothing runs
                goal=Goal.TRAINING,
                batch_size=8192,
                high_us=29_400.0,
                planned_us=28_200.0,
                speedup=around(1.04, 0.01),
                high_by_kind={"GEMM": 18_000.0, "norm, activation": 5_000.0, "optimizer": 2_100.0, WAITING: 4_300.0},
                planned_by_kind={
                    "GEMM": 12_500.0,
                    "cast": 2_300.0,
                    "norm, activation": 5_100.0,
                    "optimizer": 2_100.0,
                    WAITING: 6_200.0,
                },
            ),
            TimePair(
                goal=Goal.SERVING,
                batch_size=2048,
                high_us=9000.0,
                planned_us=5000.0,
                speedup=around(1.8, 0.02),
                high_by_kind={"GEMM": 6000.0, "norm, activation": 2000.0, "embedding": 1000.0},
                planned_by_kind={"GEMM": 2000.0, "norm, activation": 2000.0, "embedding": 1000.0},
            ),
        ),
    )


@pytest.fixture(scope="session")
def record() -> Record:
    """A real Probe's, of a model whose sites have the survey's names."""
    torch.manual_seed(0)
    layer = [
        nn.ModuleDict({"hidden": nn.Linear(64, 128), "out": nn.Linear(128, 64)}),
        nn.ModuleDict({"hidden": nn.Linear(64, 64)}),
    ]
    model = nn.ModuleDict({"layers": nn.ModuleList(layer), "top": nn.Sequential(nn.Linear(64, 64))})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = model["layers"]
            x = first["out"](torch.relu(first["hidden"](x)))
            return model["top"](torch.relu(second["hidden"](x))).sum()

    whole = Model()
    probe = Probe(whole, every=1)
    for _ in range(3):
        with probe.step():
            whole(torch.randn(256, 64)).backward()
    found = probe.record()
    renamed = [dataclasses.replace(site, name=site.name.removeprefix("parts.")) for site in found.sites.values()]
    sites = {site.name: site for site in renamed}
    finding = Finding("layers.0.out", "cancellation", "outputs are much smaller than their terms", {"ratio": 0.01}, "center")
    return Record("0123456789abcdef", ENVIRONMENT, Format.FP32, 5000.0, sites, (finding,), (), 3)


def write_metrics(folder: Path, losses: list[float]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for index, loss in enumerate(losses):
        window = {"examples": 2048, "log_loss": None if math.isnan(loss) else loss, "ne": loss / 0.13, "best_ne": 0.11 / 0.13}
        lines.append(json.dumps({"step": 10 * (index + 1), "window": window, "samples_per_s": 1e5}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def whole_run(tmp_path: Path, survey: Survey, comparison: Comparison, record: Record) -> Path:
    """A folder with every part."""
    run = tmp_path / "run"
    run.mkdir()
    record.save(run)
    survey = Survey(msgspec.structs.replace(survey.document, record=record.id))
    survey.save(run)
    make_plan(survey, goal=Goal.SERVING).save(run)
    comparison.save(run)
    high = [0.2 * 0.97**step + 0.12 for step in range(40)]
    write_metrics(run / "twins" / "high", high)
    write_metrics(run / "twins" / "other", [loss * (1 - 1e-4 * (index % 3)) for index, loss in enumerate(high)])
    write_metrics(run / "twins" / "planned", [loss * (1 + 2e-4 * (-1) ** index) for index, loss in enumerate(high)])
    return run


@pytest.fixture
def big_run(tmp_path: Path) -> Callable[[int], Path]:
    """A run with as many sites as asked for, without a record."""

    def make(count: int) -> Path:
        run = tmp_path / "big"
        run.mkdir()
        sites = tuple(
            make_site(
                f"towers.{index // 8}.layers.{index % 8}.hidden",
                100 + 7 * (index % 97),
                60 + 5 * (index % 53),
                0.005 * (1 + index % 60),
            )
            for index in range(count)
        )
        survey = Survey(SurveyDocument("feed", ENVIRONMENT, Format.FP32, sites))
        survey.save(run)
        make_plan(survey, goal=Goal.SERVING).save(run)
        return run

    return make


@pytest.fixture
def one_sided_run(tmp_path: Path) -> Callable[[float, float], Path]:
    """Sites that are all far slower, or all far faster, in low precision."""

    def make(base_us: float, low_us: float) -> Path:
        run = tmp_path / "one-sided"
        run.mkdir()
        sites = tuple(
            make_site(f"a.rather.long.name.of.a.site.{index}", base_us, low_us, 1e-5 * 10**index) for index in range(5)
        )
        survey = Survey(SurveyDocument("feed", ENVIRONMENT, Format.FP32, sites))
        survey.save(run)
        make_plan(survey, goal=Goal.SERVING).save(run)
        return run

    return make
