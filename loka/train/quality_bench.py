"""Does low precision cost quality? ``loka bench quality``: arms trained pairwise, setting by setting and seed by seed.

Every number is a difference between runs that share weights, batches and their order. Runs that are in the results file are
not repeated, so a table can be filled over several calls and days.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loka.core.errors import InvalidInput, UnknownName
from loka.core.files import atomic_write
from loka.core.results import GatheredResults, markdown_table
from loka.train.config import TrainConfig
from loka.train.jobs import run_jobs
from loka.train.line_chart import Line, line_chart
from loka.train.paired import PLANS_AS_OF, Run, change_in_percent, changes_in_percent, describe_change, train_run
from loka.train.quality_settings import SETTINGS, arms_on

# The arms that others are compared with: fp32; bf16; and, for arms with Mods, the same Mods in high precision.
BASE, BF16, HIGH_MODS = "fp32", "bf16", "mods"
NOTES = (
    "Held-out log-loss and its relative change, mean over paired seeds with a 95 % interval (Student's t); negative is better, "
    "and a change whose interval leaves out 0 is called worse or better. What bf16 does to fp32 is the measure of harmless. "
    "Mods alone: the same model in high precision, with the Mods LoKA makes by default. Single seeds: the smallest change, the "
    "median and the largest against the last of these columns that is filled; where one seed is far off, the median says more. "
    "Rounding alone: what the weights that were learned cost more in 8 bits than in high precision."
)


@dataclass(frozen=True)
class Campaign:
    """Which runs to make."""

    settings: Sequence[str]
    arms: Sequence[str]
    seeds: Sequence[int]
    device_type: str
    paths: Mapping[str, str] = field(default_factory=dict)  # of data sets that are read from files
    overrides: Mapping[str, Any] = field(default_factory=dict)  # fields of the settings' configs: model, preset, steps, …
    kernels: Sequence[str] | None = None  # that plans choose from beside blocks


@dataclass(frozen=True)
class _Job:
    key: str
    setting: str
    run: Run


@dataclass(frozen=True)
class _PlanJob:
    """Make the plan that ``run`` trains by, and every run with the same ``plan``."""

    setting: str
    run: Run
    kernels: Sequence[str] | None


def run_campaign(
    campaign: Campaign,
    results: GatheredResults,
    *,
    parallel: int = 1,
    budget_s: float = float("inf"),
    say: Callable[[str], None] = print,
) -> None:
    """Make the runs that ``results`` does not hold yet, each written as soon as it is done.

    A run that needs a plan waits until that is made; with ``parallel`` above 1 other runs go first.
    """
    jobs = [job for job in _jobs(campaign, results) if not _is_done(results, job)]
    waiting = {job.run.plan: job for job in jobs if job.run.plan and not (Path(job.run.plan) / "plan.json").exists()}
    plans = [_PlanJob(job.setting, job.run, campaign.kernels) for job in waiting.values()]
    n_done = 0
    for plan in plans:
        say(f"planning for {plan.setting}, {plan.run.arm.name}")

    def is_ready(task: _Job | _PlanJob) -> bool:
        return isinstance(task, _PlanJob) or task.run.plan not in waiting

    tasks: list[_Job | _PlanJob] = [*plans, *jobs]
    for task, outcome in run_jobs(tasks, _do, parallel=parallel, budget_s=budget_s, is_ready=is_ready):
        if isinstance(task, _PlanJob):
            waiting.pop(str(task.run.plan))
            say(f"planned for {task.setting}, {task.run.arm.name}: {outcome}")
            continue
        about = {"setting": task.setting, "arm": task.run.arm.name, "seed": task.run.config.seed}
        results.add(task.key, about | outcome)
        n_done += 1
        is_finite = "test" in outcome
        loss = f"log-loss {outcome['test']['log_loss']:.5f}" if is_finite else f"not finite at step {outcome['nonfinite_step']}"
        say(f"{task.key}: {loss} ({n_done} of {len(jobs)})")
    if n_done < len(jobs):
        say(f"{len(jobs) - n_done} runs left for the next call: the time budget is spent")


def _do(task: _Job | _PlanJob) -> Any:
    """A run's row, or a line about the plan that was made."""
    if isinstance(task, _PlanJob):
        from loka.train.loka_plan import make_plan_for  # loads all stages of LoKA, which the other arms do without

        assert task.run.plan is not None
        return make_plan_for(task.run, Path(task.run.plan), kernels=task.kernels)
    return train_run(task.run) | {"config": task.run.settings}


def _jobs(campaign: Campaign, results: GatheredResults) -> Iterator[_Job]:
    """Seed by seed, so that an interrupted call leaves whole seeds behind."""
    known = arms_on(campaign.device_type)
    if missing := [name for name in campaign.arms if name not in known]:
        raise UnknownName(f"no arm is called {missing[0]!r}. Known: {', '.join(known)}")
    plans = results.json_path.with_name(f"{results.json_path.stem}-plans")
    for seed in campaign.seeds:
        for setting in campaign.settings:
            config = _config(campaign, setting, seed)
            training = f"{setting}/{config.model}-{config.preset}/{config.steps or 'epoch'}x{config.batch_size}"
            for arm in (known[name] for name in campaign.arms):
                if arm.is_planned and campaign.kernels:  # its plan, and so its runs, are others
                    arm = replace(arm, name="-".join((arm.name, *campaign.kernels)))
                run = Run(replace(config, precision=arm.precision), arm)
                if arm.is_planned:
                    run = replace(run, plan=str(plans / f"{training}-{arm.name}-{PLANS_AS_OF}".replace("/", "-")))
                yield _Job(f"{training}/{arm.name}/{seed}", training, run)


def _config(campaign: Campaign, setting: str, seed: int) -> TrainConfig:
    if setting not in SETTINGS:
        raise UnknownName(f"no setting is called {setting!r}. Known: {', '.join(SETTINGS)}")
    config, overrides = SETTINGS[setting], dict(campaign.overrides)
    path = campaign.paths.get(config.data)
    if config.data in ("movielens", "criteo") and path is None:
        raise InvalidInput(f"setting {setting!r} needs the {config.data} data: pass its path with --{config.data}")
    if overrides.get("model", config.model) != config.model:
        overrides["model_options"] = {}  # those are for the setting's own model
    return replace(config, **overrides, seed=seed, data_path=path, device=campaign.device_type)


def _is_done(results: GatheredResults, job: _Job) -> bool:
    row = results.rows.get(job.key)
    if row is not None and row["config"] != job.run.settings:
        raise InvalidInput(f"{results.json_path} holds {job.key} with other settings: write to another file with --results")
    return row is not None


Runs = dict[str, dict[int, dict[str, Any]]]  # arm → seed → row


def by_setting(results: GatheredResults) -> dict[str, Runs]:
    settings: dict[str, Runs] = {}
    for row in results.rows.values():
        settings.setdefault(row["setting"], {}).setdefault(row["arm"], {})[row["seed"]] = row
    return settings


def make_table(results: GatheredResults) -> str:
    bases = {BASE: "against fp32", BF16: "against bf16", HIGH_MODS: "against Mods alone"}
    header = ["setting", "arm", "seeds", "log-loss", *bases.values(), "single seeds", "rounding alone", "8-bit sites"]
    rows = []
    for setting, runs in by_setting(results).items():
        losses = {arm: _losses(of_arm) for arm, of_arm in runs.items()}
        for arm, of_arm in runs.items():
            bad = len(of_arm) - len(losses[arm])
            seeds = f"{len(of_arm)}, {bad} not finite" if bad else str(len(of_arm))
            mean = f"{statistics.fmean(losses[arm].values()):.5f}" if losses[arm] else ""
            first = next(iter(of_arm.values()))
            compared = [base for base in bases if base != arm and (base != HIGH_MODS or first["config"]["arm"]["mods"])]
            others = [losses.get(base, {}) if base in compared else {} for base in bases]
            cells = [describe_change(change_in_percent(losses[arm], other)) for other in others]
            changes = [change for other in others if (change := changes_in_percent(losses[arm], other))]
            cells.append(_spread(changes[-1]) if changes else "")
            cells.append(describe_change(change_in_percent(losses[arm], _losses(of_arm, "test_in_high_precision"))))
            rows.append([setting, arm, seeds, mean, *cells, str(first["sites"])])
    return markdown_table(header, rows)


def _spread(changes: Sequence[float]) -> str:
    return " / ".join(f"{change:+.3f}" for change in (min(changes), statistics.median(changes), max(changes)))


def _losses(of_arm: dict[int, dict[str, Any]], test: str = "test") -> dict[int, float]:
    return {seed: row[test]["log_loss"] for seed, row in of_arm.items() if test in row}


def write_report(results: GatheredResults) -> list[Path]:
    """Write the table, and for each setting a picture of how training losses drew apart; returns the files."""
    pictures = []
    for setting, runs in by_setting(results).items():
        lines = list(trajectories(runs))
        if lines:
            path = results.json_path.with_name(f"{results.json_path.stem}-{setting.replace('/', '-')}.svg")
            title = f"{setting}: training loss against fp32"
            atomic_write(path, line_chart(lines, title=title, x_label="step", y_label="change of training loss, %"))
            pictures.append(path)
    images = "\n".join(f"![training loss against fp32]({path.name})" for path in pictures)
    return [results.write_markdown(f"{NOTES}\n\n{make_table(results)}\n{images}\n"), *pictures, results.json_path]


def trajectories(runs: Runs) -> Iterator[Line]:
    """For each arm the relative change of its training loss from fp32's, window by window: mean over seeds, with interval."""
    base = _losses_by_step(runs.get(BASE, {}))
    for arm, of_arm in runs.items():
        losses = _losses_by_step(of_arm) if arm != BASE else {}
        found = {step: change_in_percent(of_seed, base.get(step, {})) for step, of_seed in losses.items()}
        changes = {step: change for step, change in found.items() if change is not None}
        if changes:
            estimates = list(changes.values())
            band = estimates if all(estimate.n > 1 for estimate in estimates) else []
            mean = [estimate.mean for estimate in estimates]
            yield Line(arm, list(changes), mean, [estimate.low for estimate in band], [estimate.high for estimate in band])


def _losses_by_step(of_arm: dict[int, dict[str, Any]]) -> dict[int, dict[int, float]]:
    """step → seed → loss; a loss that is not finite is null in the file."""
    losses: dict[int, dict[int, float]] = {}
    for seed, row in of_arm.items():
        for step, loss in row["trajectory"]:
            if loss is not None and math.isfinite(loss):
                losses.setdefault(step, {})[seed] = loss
    return losses
