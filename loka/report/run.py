"""Reading a run's folder: what is there, and for all else why it is missing and the command that makes it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import TypeVar

import msgspec

from loka.core.comparison import HIGH, OTHER, PLANNED, TWINS, Comparison
from loka.core.errors import InvalidFile, InvalidInput
from loka.core.plan import Plan, PlanDocument
from loka.core.record import Record
from loka.core.record_file import FILE as RECORD_FILE
from loka.core.survey import Survey, SurveyDocument
from loka.report.page_data import MissingPart

Part = TypeVar("Part", Record, SurveyDocument, PlanDocument, Comparison)

# For each part its file, and the command that makes it.
PARTS = {
    "record": (RECORD_FILE, "loka probe WORKLOAD -o {run}"),
    "survey": ("survey.json", "loka measure {run}"),
    "plan": ("plan.json", "loka plan {run}"),
    "comparison": ("comparison.json", "loka demo -o {run}"),
    "training": ("metrics.jsonl", "loka train --model MODEL --plan {run}/plan.json --steps 500 --out {run}"),
}


class WindowMetrics(msgspec.Struct, frozen=True):
    examples: int
    log_loss: float | None
    ne: float | None = None
    best_ne: float | None = None


class MetricsLine(msgspec.Struct, frozen=True):
    """The part of a line of ``metrics.jsonl`` that the report draws."""

    step: int
    window: WindowMetrics


@dataclass(frozen=True)
class Run:
    path: Path
    record: Record | None = None
    survey: SurveyDocument | None = None
    plan: PlanDocument | None = None
    comparison: Comparison | None = None
    training: dict[str, list[MetricsLine]] = field(default_factory=dict)  # by name of the curve
    missing: tuple[MissingPart, ...] = ()


def read_run(run: str | Path) -> Run:
    """Read what the folder ``run`` holds. A file that is damaged, has another schema, or is of another model than the newest
    file is left out, and listed as missing with the reason. A survey of another record, or a plan of another survey, is listed
    too, but not left out."""
    path = Path(run)
    if not path.is_dir():
        what = f"{run} is a file" if path.exists() else f"there is no folder {run}"
        raise InvalidInput(f"{what}: name a run's folder, or make one with `loka demo`")
    missing: list[MissingPart] = []
    models: dict[str, str] = {}  # the fingerprint of each part's model

    def lacks(part: str, why: str) -> None:
        named = quote(str(run).encode(errors="replace").decode())  # the name may not be valid text
        missing.append(MissingPart(part, why, PARTS[part][1].format(run=named)))

    def read(part: str, load: Callable[[], Part]) -> Part | None:
        if not (path / PARTS[part][0]).exists():
            if part != "comparison" or (path / TWINS).is_dir():  # a comparison is made by a demo alone, of its own model
                lacks(part, f"there is no {PARTS[part][0]}")
            return None
        try:
            loaded = load()
        except InvalidFile as error:
            lacks(part, str(error))
            return None
        models[part] = loaded.fingerprint
        return loaded

    record = read("record", lambda: Record.load(path))
    survey = read("survey", lambda: Survey.load(path).document)
    plan = read("plan", lambda: Plan.load(path).document)
    comparison = read("comparison", lambda: Comparison.load(path))
    training = _read_training(path)
    # Commands write into the same folder by default, so it may hold parts of two models: those of the newest file's count.
    newest = max(models, key=lambda part: (path / PARTS[part][0]).stat().st_mtime_ns, default="")
    others = [part for part, model in models.items() if model != models[newest]]
    if "comparison" in others and training:
        others.append("training")  # of the models that were compared
    for part in others:
        lacks(part, f"{PARTS[part][0]} belongs to a different model than {PARTS[newest][0]}")
    # Older files do not name what they were made from. Such a survey is taken for another's if the record has an id, and such a
    # plan if the survey names its record.
    if record and survey and "survey" not in others and record.id and survey.record != record.id:
        lacks("survey", "survey.json was measured from a different record than the one in this folder")
    if survey and plan and "plan" not in others and (plan.survey or survey.record) and plan.survey != survey.digest:
        lacks("plan", "plan.json was made from a different survey than the one in this folder")
    if not training:
        lacks("training", "there is no metrics.jsonl (`loka train` writes it, for LoKA's built-in models only)")
    return Run(
        path,
        None if "record" in others else record,
        None if "survey" in others else survey,
        None if "plan" in others else plan,
        None if "comparison" in others else comparison,
        {} if "training" in others else training,
        tuple(missing),
    )


def _read_training(path: Path) -> dict[str, list[MetricsLine]]:
    """The twins' curves where there are twins, otherwise the run's own."""
    twins = {name: _read_metrics(path / TWINS / name / "metrics.jsonl") for name in (HIGH, OTHER, PLANNED)}
    if twins[HIGH] and twins[PLANNED]:
        return {name: lines for name, lines in twins.items() if lines}
    own = twins[HIGH] or _read_metrics(path / "metrics.jsonl")
    return {"training": own} if own else {}


def _read_metrics(file: Path) -> list[MetricsLine]:
    """Whole lines only: the last may have been cut off by a kill."""
    if not file.is_file():
        return []
    lines = []
    for text in file.read_bytes().splitlines():
        try:
            line = msgspec.json.decode(text, type=MetricsLine)
        except msgspec.DecodeError:
            break
        if line.window.examples > 0:
            lines.append(line)
    return lines
