"""Do Mods cost quality? Wukong and DCNv2 trained with and without them, Mod by Mod, on paired seeds in high precision.

    python benchmarks/mods_quality.py --movielens ml-1m                              # both data sets, preset small
    python benchmarks/mods_quality.py --preset tiny --steps 60 --batch-size 512      # to try it on a CPU

Runs of a seed start from the same weights where they share any, and see the same batches in the same order; the change of
the held-out log-loss is taken seed by seed, and its mean has a 95 % interval (Student's t). Beside it stands the change by
training in bf16, where there is a GPU: what a harmless change of arithmetic does. Runs already in the results file are not
repeated, so a later call may add seeds.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch

from loka.core.environment import current_command, current_environment
from loka.core.errors import LokaError
from loka.core.results import GatheredResults, markdown_table
from loka.data.dataset import Dataset, open_dataset
from loka.kernels.device import device_of
from loka.models.recommender import Recommender
from loka.models.registry import build_model
from loka.mods.apply import apply_mods
from loka.mods.report import ModReport
from loka.numerics.confidence import estimate_mean
from loka.train.config import Precision, TrainConfig
from loka.train.loop import evaluate
from loka.train.precision import matmul_precision, resolve_device
from loka.train.trainer import Trainer

FOLDER = Path(__file__).parent / "results"
MODELS = ("wukong", "dcnv2")
SETTINGS: dict[str, dict] = {
    "synthetic": {"batch_size": 2048, "steps": 1000, "lr": 1e-3, "data_options": {"test_examples": 131_072}},
    "movielens": {"batch_size": 2048, "lr": 1e-3, "embedding_lr": 0.05, "warmup_steps": 20},  # one epoch
}


@dataclass(frozen=True)
class Variant:
    name: str
    mods: tuple[str, ...]
    precision: Precision = Precision.FP32


DEFAULT = ("no_bias", "block_norm", "hard_swish")
PLAIN = Variant("none", ())
VARIANTS = (
    *(Variant(mod, (mod,)) for mod in DEFAULT),
    Variant("all three", DEFAULT),
    Variant("and insert_norm", (*DEFAULT, "insert_norm")),
)


def build(
    model: str, preset: str, data: Dataset, seed: int, device: torch.device, mods: tuple[str, ...]
) -> tuple[Recommender, ModReport]:
    """A model whose weights, where it shares any with the model without Mods, are the same for one seed."""
    torch.manual_seed(seed)
    network = build_model(model, preset, data.schema).to(device)
    batch = next(data.train(64))
    with torch.no_grad():
        example = (batch.dense_BD, *network.embeddings(batch))
    return network, apply_mods(network.dense_part, mods, example=example)


def run(config: TrainConfig, data: Dataset, variant: Variant, device: torch.device) -> dict:
    network, report = build(config.model, config.preset, data, config.seed, device, variant.mods)
    trainer = Trainer(network, config)
    assert config.steps is not None
    clock_from = config.steps // 5  # behind what the first steps cost once
    begin = time.perf_counter()
    for batch in islice(data.train(config.batch_size), config.steps):
        if trainer.steps_done == clock_from:
            begin = now(device)
        trainer.step(batch)
    seconds = now(device) - begin
    if (step := trainer.guard.first_bad_step()) is not None:
        raise LokaError(f"{config.model} with {variant.name}, seed {config.seed}: the loss of step {step} is not finite")
    test = evaluate(network, data.test(config.batch_size), config.precision)
    return {
        "steps": config.steps,
        "test": asdict(test),
        "samples_per_s": (config.steps - clock_from) * config.batch_size / seconds,
        "changes": len(report.changes),
        "removed": report.n_removed,
        "parameters": sum(parameter.numel() for parameter in network.dense_part.parameters()),
    }


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def variants_of(model: str, preset: str, data: Dataset, device: torch.device) -> Iterator[tuple[Variant, str | None]]:
    """Each variant, with the earlier one that makes the very same model of this one: it need not be trained again."""
    yield PLAIN, None
    if device.type == "cuda":
        yield Variant("none, in bf16", (), Precision.BF16), None
    seen: dict[frozenset, str] = {frozenset(): PLAIN.name}
    for variant in VARIANTS:
        _, report = build(model, preset, data, 0, device, variant.mods)
        same = seen.setdefault(frozenset((change.name, change.after) for change in report.changes), variant.name)
        yield variant, None if same == variant.name else same


def planned_runs(
    arguments: argparse.Namespace, device: torch.device
) -> Iterator[tuple[TrainConfig, Dataset, Variant, str | None]]:
    """All runs, seed by seed, so that an interrupted call leaves whole seeds behind."""
    paths = {"synthetic": None} | ({"movielens": str(arguments.movielens)} if arguments.movielens else {})
    given = {"steps": arguments.steps, "batch_size": arguments.batch_size}
    for seed in arguments.seeds:
        for name, path in paths.items():
            settings = SETTINGS[name] | {option: value for option, value in given.items() if value}
            data = open_dataset(name, path=path, seed=seed, device=device, **settings.get("data_options", {}))
            settings.setdefault("steps", data.batches_per_epoch(settings["batch_size"]))
            fixed = {"data": name, "seed": seed, "device": str(device), "out": None, **settings}
            for model in arguments.models:
                for variant, same_as in variants_of(model, arguments.preset, data, device):
                    config = TrainConfig(model, arguments.preset, precision=variant.precision, **fixed)
                    yield config, data, variant, same_as


def make_table(results: GatheredResults) -> str:
    groups: dict[tuple, dict[str, dict[int, dict]]] = {}
    for row in results.rows.values():
        config = row["config"]
        training = (config["data"], f"{config['model']} {config['preset']}", f"{config['steps']}×{config['batch_size']}")
        groups.setdefault(training, {}).setdefault(row["variant"], {})[config["seed"]] = row
    header = ["data", "model", "batches", "mods", "seeds", "log-loss", "its change, 95 % interval", "parameters", "samples/s"]
    rows = []
    for training, variants in groups.items():
        plain = variants.get(PLAIN.name, {})
        for variant, runs in variants.items():
            if same := next((row["same_as"] for row in runs.values() if "same_as" in row), None):
                rows.append([*training, variant, "", "", f"the same model as {same}", "", ""])
            elif seeds := sorted(runs.keys() & plain.keys()):
                mean = sum(runs[seed]["test"]["log_loss"] for seed in seeds) / len(seeds)
                speed = sum(runs[seed]["samples_per_s"] for seed in seeds) / len(seeds)
                change = change_of_loss(runs, plain, seeds) if runs is not plain else ""
                parameters = f"{runs[seeds[0]]['parameters']:,}"
                rows.append([*training, variant, str(len(seeds)), f"{mean:.5f}", change, parameters, f"{speed:,.0f}"])
    return markdown_table(header, rows)


def change_of_loss(runs: dict[int, dict], plain: dict[int, dict], seeds: list[int]) -> str:
    """The mean over seeds of the relative change in percent; negative is better."""
    changes = [100 * (runs[seed]["test"]["log_loss"] / plain[seed]["test"]["log_loss"] - 1) for seed in seeds]
    estimate = estimate_mean(changes)
    verdict = "" if estimate.low <= 0 <= estimate.high else (" worse" if estimate.mean > 0 else " better")
    return f"{estimate.mean:+.3f} % ± {(estimate.high - estimate.low) / 2:.3f}{verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--movielens", type=Path, help="folder of MovieLens-1M; without it the synthetic stream alone")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--seeds", nargs="+", type=int, default=range(8))
    parser.add_argument("--steps", type=int, help="default: 1000 on the synthetic stream, one epoch of MovieLens")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start no run after this many seconds")
    parser.add_argument("--results", type=Path, help="results file to continue; default: one of today's in benchmarks/results")
    arguments = parser.parse_args()
    device = resolve_device(arguments.device, Precision.FP32)
    environment = current_environment(device_of(device))
    results = GatheredResults(FOLDER, "mods-quality", environment, current_command(), arguments.results)

    begin = time.monotonic()
    for config, data, variant, same_as in planned_runs(arguments, device):
        batches = f"{config.steps}×{config.batch_size}"
        key = f"{config.data}/{config.model}/{config.preset}/{batches}/{variant.name}/{config.seed}"
        settings = json.loads(json.dumps(asdict(config)))  # as the file gives it back
        if key in results.rows and results.rows[key]["config"] == settings:
            continue
        if same_as:
            results.add(key, {"variant": variant.name, "same_as": same_as, "config": settings})
        elif time.monotonic() - begin > arguments.budget_s:
            print(f"{key} left for the next call: the time budget is spent")
        else:
            with matmul_precision(variant.precision):
                row = run(config, data, variant, device)
            results.add(key, {"variant": variant.name, **row, "config": settings})
            print(f"{key}: log-loss {row['test']['log_loss']:.5f} after {time.monotonic() - begin:.0f} s", flush=True)

    notes = "Held-out log-loss, fp32 unless said otherwise; changes are relative to no Mods, seed by seed. Negative is better."
    table = make_table(results)
    path = results.write_markdown(f"{notes}\n\n{table}")
    print(f"{table}\n{path}\n{results.json_path}")


if __name__ == "__main__":
    main()
