"""Do Mods cost quality? Wukong and DCNv2 trained with and without them, Mod by Mod, on paired seeds in high precision.

    python benchmarks/mods_quality.py --movielens ml-1m --parallel 12                # on a GPU: both data sets, preset small
    python benchmarks/mods_quality.py --preset tiny --steps 60 --batch-size 512      # to try it on a CPU

Runs of a seed start from the same weights, as far as they share any, and see the same batches in the same order. The change of
held-out log-loss is taken seed by seed, and its mean has a 95 % interval (Student's t). On a GPU the change by training in bf16
is given too: it shows what a harmless change of arithmetic does. Speed is that of a whole training step (on a GPU in bf16,
compiled and replayed as a CUDA graph), with each variant in turn with the model without Mods. Runs already in the results file
are not repeated, so a later call may add seeds.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from loka.core.environment import current_command, current_environment
from loka.core.errors import LokaError
from loka.core.plan import Goal
from loka.core.results import GatheredResults, markdown_table
from loka.kernels.device import device_of
from loka.mods.apply import apply_mods
from loka.train.config import Precision, TrainConfig
from loka.train.jobs import run_jobs
from loka.train.model_arms import ModelArm
from loka.train.model_bench import Cell, ModelBench
from loka.train.paired import Run, change_in_percent, dataset_of, describe_change, example_of, prepare, train_run
from loka.train.precision import resolve_device
from loka.train.quality_settings import MODS as DEFAULT
from loka.train.quality_settings import Arm, easy_stream

FOLDER = Path(__file__).parent / "results"
MODELS = ("wukong", "dcnv2")
SETTINGS: dict[str, dict[str, Any]] = {
    "synthetic": {"batch_size": 4096, "steps": 600, "data_options": {"test_examples": 131_072}},
    "movielens": {"batch_size": 2048, "warmup_steps": 20},  # one epoch
    "easy": {"data": "synthetic", "batch_size": 1024, "steps": 2000, "data_options": easy_stream()},
}
PLAIN = Arm("none")
IN_BF16 = Arm("none, in bf16", Precision.BF16)
VARIANTS = (
    *(Arm(mod, mods=(mod,)) for mod in DEFAULT),
    Arm("all three", mods=DEFAULT),
    Arm("insert_norm", mods=("insert_norm",)),
    Arm("all four", mods=(*DEFAULT, "insert_norm")),
)


@dataclass(frozen=True)
class Job:
    key: str
    setting: str
    run: Run


def train_group(jobs: tuple[Job, ...]) -> list[dict[str, Any]]:
    """Train the variants of one model on one seed, in one process, which reads the data once."""
    rows = []
    for job in jobs:
        row = train_run(job.run)
        if "test" not in row:
            raise LokaError(f"{job.key}: the loss of step {row['nonfinite_step']} is not finite")
        del row["trajectory"], row["samples_per_s"]  # several runs at once slow each other down
        rows.append(row | {"settings": job.run.settings})
    return rows


def base_config(arguments: argparse.Namespace, setting: str, model: str, device: torch.device) -> TrainConfig:
    given = {"steps": arguments.steps, "batch_size": arguments.batch_size}
    settings = {"data": setting} | SETTINGS[setting] | {option: value for option, value in given.items() if value}
    path = str(arguments.movielens) if setting == "movielens" else None
    return TrainConfig(model, arguments.preset, data_path=path, device=device.type, out=None, **settings)


def variants_of(config: TrainConfig, device: torch.device) -> Iterator[tuple[Arm, str | None]]:
    """Each variant, and the earlier one that makes the very same model, if there is one: then it need not be trained again."""
    yield PLAIN, None
    if device.type == "cuda":
        yield IN_BF16, None
    data = dataset_of(config, device)
    model, _ = prepare(Run(config, PLAIN), data, device)
    example = example_of(model, data, 64)
    seen: dict[frozenset[tuple[str, str]], str] = {frozenset(): PLAIN.name}
    for variant in VARIANTS:
        report = apply_mods(model.dense_part, variant.mods, example=example, dry_run=True)
        same = seen.setdefault(frozenset((change.name, change.after) for change in report.changes), variant.name)
        yield variant, None if same == variant.name else same


def planned_jobs(
    configs: list[tuple[str, TrainConfig]], seeds: list[int], device: torch.device
) -> Iterator[tuple[Job, str | None]]:
    """All runs, seed by seed, so that an interrupted call leaves whole seeds behind."""
    variants = {(setting, config.model): list(variants_of(config, device)) for setting, config in configs}
    for seed in seeds:
        for setting, config in configs:
            for variant, same_as in variants[setting, config.model]:
                fields = vars(config) | {"seed": seed, "precision": variant.precision}
                batches = f"{config.steps or 'epoch'}x{config.batch_size}"
                key = f"{setting}/{config.model}/{config.preset}/{batches}/{variant.name}/{seed}"
                yield Job(key, setting, Run(TrainConfig(**fields), variant)), same_as


def measure_speed(results: GatheredResults, models: list[str], preset: str, device: torch.device, deadline: float) -> None:
    """Time the step of each variant that is a model of its own, in turn with the step of the model without Mods."""
    precision = Precision.BF16 if device.type == "cuda" else Precision.FP32
    bench = ModelBench(device)
    for model in models:
        cell = Cell(model, preset, 2048, Goal.TRAINING)
        same = {row["variant"] for row in results.rows.values() if row.get("model") == model and "same_as" in row}
        arms = [ModelArm(v.name, precision, v.mods) for v in VARIANTS if v.name not in same]
        arms = [arm for arm in arms if f"speed/{cell}/{arm.name}" not in results.rows]
        if not arms or time.monotonic() > deadline:
            continue
        for name, row in bench.measure(cell, arms, ModelArm(PLAIN.name, precision)):
            results.add(f"speed/{cell}/{name}", {"speed_of": model, "variant": name, "preset": preset, **row})
            print(f"speed/{cell}/{name}: {row.get('speedup', row.get('failed'))}", flush=True)
            if time.monotonic() > deadline:
                print("speed of the rest left for the next call: the time budget is spent")
                return


def make_table(results: GatheredResults) -> str:
    groups: dict[tuple[str, ...], dict[str, dict[int, dict[str, Any]]]] = {}
    speeds = {(row["speed_of"], row["variant"]): row for row in results.rows.values() if "speed_of" in row}
    for row in results.rows.values():
        if "speed_of" not in row:
            group = (row["data"], row["model"], row["preset"], row["batches"])
            groups.setdefault(group, {}).setdefault(row["variant"], {})[row["seed"]] = row
    table = []
    for (data, model, preset, batches), variants in groups.items():
        losses = {
            variant: {seed: row["test"]["log_loss"] for seed, row in runs.items() if "test" in row}
            for variant, runs in variants.items()
        }
        for variant in (arm.name for arm in (PLAIN, IN_BF16, *VARIANTS) if arm.name in variants):
            runs = variants[variant]
            cells = [data, f"{model} {preset}", batches, variant]
            first = next(iter(runs.values()))
            if "same_as" in first:
                table.append([*cells, "", "", f"the same model as {first['same_as']}", "", ""])
                continue
            change = None if variant == PLAIN.name else change_in_percent(losses[variant], losses.get(PLAIN.name, {}))
            speedup = speeds.get((model, variant), {}).get("speedup")
            mean = f"{statistics.fmean(losses[variant].values()):.5f}"
            cells += [str(len(runs)), mean, describe_change(change), f"{first['parameters']:,}"]
            table.append([*cells, "" if speedup is None else f"{speedup:.2f}"])
    header = ["data", "model", "batches", "mods", "seeds", "log-loss", "its change, 95 % interval", "parameters", "speed"]
    return markdown_table(header, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--movielens", type=Path, help="folder of MovieLens-1M; without it the synthetic stream alone")
    parser.add_argument("--data", nargs="+", default=tuple(SETTINGS), choices=SETTINGS, help="default: all that is at hand")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--seeds", nargs="+", type=int, default=range(8))
    parser.add_argument("--steps", type=int, help="default: 600 on the synthetic stream, one epoch of MovieLens")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--parallel", type=int, default=1, help="runs at once, each a process with one core")
    parser.add_argument("--budget-s", type=float, default=240, help="start nothing after this many seconds")
    parser.add_argument("--results", type=Path, help="results file to continue; default: one of today's in benchmarks/results")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.budget_s
    device = resolve_device(arguments.device, Precision.FP32)
    environment = current_environment(device_of(device))
    results = GatheredResults(FOLDER, "mods-quality", environment, current_command(), arguments.results)

    settings = [setting for setting in arguments.data if setting != "movielens" or arguments.movielens]
    configs = [(name, base_config(arguments, name, model, device)) for name in settings for model in arguments.models]
    missing = []
    for job, same_as in planned_jobs(configs, arguments.seeds, device):
        if same_as:
            results.rows[job.key] = {"key": job.key, **describe_run(job), "same_as": same_as}
        elif results.rows.get(job.key, {}).get("settings") != job.run.settings:
            missing.append(job)
    groups = [tuple(jobs) for _, jobs in groupby(missing, group_of)]
    for jobs, rows in run_jobs(groups, train_group, parallel=arguments.parallel, budget_s=deadline - time.monotonic()):
        for job, row in zip(jobs, rows, strict=True):
            results.add(job.key, describe_run(job) | row)
            print(f"{job.key}: log-loss {row['test']['log_loss']:.5f}, {deadline - time.monotonic():.0f} s left", flush=True)
    measure_speed(results, arguments.models, arguments.preset, device, deadline)

    notes = "Held-out log-loss, fp32 unless said otherwise; changes are relative to no Mods, seed by seed; negative is better. "
    notes += "Speed is of a whole training step of 2048 examples relative to no Mods; above 1 is faster."
    table = make_table(results)
    path = results.write_markdown(f"{notes}\n\n{table}")
    print(f"{table}\n{path}\n{results.json_path}")


def group_of(job: Job) -> tuple[str, str, int]:
    config = job.run.config
    return job.setting, config.model, config.seed


def describe_run(job: Job) -> dict[str, Any]:
    config = job.run.config
    batches = f"{config.steps or 'epoch'}×{config.batch_size}"
    about = {"data": job.setting, "model": config.model, "preset": config.preset, "batches": batches}
    return {**about, "variant": job.run.arm.name, "seed": config.seed}


if __name__ == "__main__":
    main()
