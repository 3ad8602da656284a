"""Test quality of every model on MovieLens-1M and Criteo-80k, three seeds each.

    python benchmarks/train_quality.py --movielens ml-1m --criteo criteo_dac_80k.txt

MovieLens-1M: would a user give four stars or more; random 90/10 split, one epoch, batch 2048. Criteo: the first 80 % of the
file to train on and the last 20 % to test on, one epoch. Runs already in the results file are not repeated. Settings were
chosen on other splits: for MovieLens a different random one, for Criteo the last 12.5 % of the training part.
"""

import argparse
import json
import statistics
from dataclasses import asdict
from pathlib import Path

from loka.core.environment import current_command, current_environment
from loka.core.errors import InvalidInput
from loka.core.results import GatheredResults, markdown_table
from loka.kernels.device import device_of
from loka.models.registry import MODELS
from loka.train.config import Precision, TrainConfig
from loka.train.loop import train
from loka.train.precision import resolve_device

FOLDER = Path(__file__).parent / "results"
SEEDS = (0, 1, 2)
METRICS = ("log_loss", "ne", "auc", "calibration")
GOALS = {"movielens": "log-loss ≤ 0.540", "criteo": "NE ≤ 0.838, one-hot logistic regression's"}

# What all models of a data set share, and the widths of each there. Criteo's 64,000 rows are few for a deep model. So models
# are narrow and shallow, steps are small, and every category seen in training has an id of its own.
SETTINGS: dict[str, dict] = {
    "movielens": {"preset": "small", "batch_size": 2048, "lr": 1e-3, "embedding_lr": 0.05, "warmup_steps": 20},
    "criteo": {
        "preset": "small",
        "batch_size": 64,
        "lr": 5e-4,
        "embedding_lr": 0.05,
        "warmup_steps": 20,
        "decay_steps": 100,
        "data_options": {"ids": "counted", "min_count": 1, "dense": "log", "train_fraction": 0.8},
    },
}
WIDTHS: dict[tuple[str, str], dict] = {
    ("criteo", "dcnv2"): {"top_widths": (64,)},
    ("criteo", "dlrm"): {"top_widths": (64,), "dense_widths": (64,)},
    ("criteo", "interformer"): {"top_widths": (64,), "n_layers": 1, "interaction_widths": (64,), "dim": 64},
    ("criteo", "wukong"): {"top_widths": (64,), "n_layers": 1, "fmb_widths": (64,), "n_fmb": 4, "n_lcb": 16},
}


def config_of(data: str, path: Path, model: str, seed: int, device: str) -> TrainConfig:
    return TrainConfig(
        model,
        model_options=WIDTHS.get((data, model), {}),
        data=data,
        data_path=str(path),
        seed=seed,
        device=device,
        log_every=10_000,
        out=None,
        **SETTINGS[data],
    )


def make_table(results: GatheredResults) -> str:
    rows = []
    for data in SETTINGS:
        for model in MODELS.names():
            runs = [row["test"] for row in results.rows.values() if (row["data"], row["model"]) == (data, model)]
            if runs:
                cells = [mean_and_deviation([run[metric] for run in runs]) for metric in METRICS]
                rows.append([data, model, str(len(runs)), *cells, GOALS[data]])
    return markdown_table(["data", "model", "seeds", "log-loss", "NE", "AUC", "calibration", "goal"], rows)


def mean_and_deviation(values: list[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{deviation}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--movielens", type=Path, help="folder of MovieLens-1M")
    parser.add_argument("--criteo", type=Path, help="TSV of the Criteo Display Advertising set's first 80,000 rows")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--models", nargs="+", default=MODELS.names(), choices=MODELS.names())
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--results", type=Path, help="results file to continue; default: one of today's in benchmarks/results")
    arguments = parser.parse_args()
    paths = {data: path for data in SETTINGS if (path := getattr(arguments, data)) is not None}
    if not paths:
        raise InvalidInput("nothing to train on: pass --movielens, --criteo, or both")

    environment = current_environment(device_of(resolve_device(arguments.device, Precision.FP32)))
    results = GatheredResults(FOLDER, "train-quality", environment, current_command(), arguments.results)
    for data, path in paths.items():
        for seed in arguments.seeds:
            for model in arguments.models:
                key = f"{data}/{model}/{seed}"
                config = config_of(data, path, model, seed, arguments.device)
                settings = json.loads(json.dumps(asdict(config) | {"data_path": path.name}))  # as the file gives it back
                if key in results.rows and results.rows[key]["config"] == settings:
                    continue
                result = train(config)
                row = {"data": data, "model": model, "seed": seed, "steps": result.steps, "test": asdict(result.test)}
                results.add(key, row | {"config": settings})
                print(f"{key}: log-loss {result.test.log_loss:.4f}  NE {result.test.ne:.4f}", flush=True)

    table = make_table(results)
    notes = "Mean ± standard deviation over seeds, on held-out examples. Settings are in the script and in the JSON beside."
    path = results.write_markdown(f"{notes}\n\n{table}")
    print(table)
    print(f"\n{path}\n{results.json_path}")


if __name__ == "__main__":
    main()
