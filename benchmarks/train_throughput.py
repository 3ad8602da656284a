"""Samples a second of every model and preset, and where a training step's time goes: a map of what low precision can help.

    python benchmarks/train_throughput.py                          # on a GPU: bf16, compiled
    python benchmarks/train_throughput.py --device cpu             # fp32, eager, small models: to try the script

Steps are whole: synthetic batches are made on the device, learned from, and counted in the metrics. A call that runs out of
its time budget keeps what it has measured, and the same call again measures the rest.
"""

import argparse
import gc
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from loka.core.environment import current_command, current_environment
from loka.core.results import GatheredResults, markdown_table
from loka.data.dataset import open_dataset
from loka.kernels.device import device_of
from loka.models.registry import MODELS, build_model
from loka.train.config import Precision, TrainConfig
from loka.train.precision import resolve_device
from loka.train.step_profile import Kind, StepProfile, profile_step
from loka.train.trainer import Trainer

FOLDER = Path(__file__).parent / "results"
PRESETS = {"cuda": ["small", "base", "large"], "cpu": ["tiny", "small"]}


def measure(model: str, preset: str, batch_size: int, device: torch.device) -> StepProfile:
    on_cuda = device.type == "cuda"
    config = TrainConfig(
        model,
        preset,
        batch_size=batch_size,
        precision=Precision.BF16 if on_cuda else Precision.FP32,
        compile=on_cuda,
        device=str(device),
        out=None,
    )
    data = open_dataset("synthetic", device=device, test_examples=1)
    with torch.device(device):  # first weights made in place: a large model's would take minutes on the CPU
        network = build_model(model, preset, data.schema)
    timed = 32 if on_cuda else 2
    profiled = 16 if on_cuda else 1  # on a GPU up to 16 batches are drawn at once: fewer steps might see none drawn, or all
    return profile_step(Trainer(network, config), data.train(batch_size), warmup=4, timed=timed, profiled=profiled)


def release_memory() -> None:
    torch._dynamo.reset()  # each shape is compiled for itself, not as a dynamic version of the one before
    gc.collect()
    torch.cuda.empty_cache()


def make_table(results: GatheredResults) -> str:
    header = ["model", "preset", "batch", "samples/s", "ms/step", "kernels busy", *map(str, Kind)]
    rows = []
    for row in results.rows.values():
        cells = [row["model"], row["preset"], str(row["batch_size"])]
        if "failed" in row:
            rows.append([*cells, row["failed"], *[""] * (len(header) - 4)])
            continue
        cells += [f"{row['samples_per_s']:,.0f}", f"{row['step_ms']:.2f}"]
        if row["busy"] is None:
            cells += ["not known", *["" for _ in Kind]]
        else:
            cells += [f"{100 * row['busy']:.0f} %", *(f"{100 * row['shares'].get(kind, 0.0):.1f} %" for kind in Kind)]
        rows.append(cells)
    return markdown_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--models", nargs="+", default=MODELS.names(), choices=MODELS.names())
    parser.add_argument("--presets", nargs="+", help="default: small, base and large; tiny and small on the CPU")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[2048, 6144])
    parser.add_argument("--budget-s", type=float, default=220, help="start no measurement after this many seconds")
    parser.add_argument("--results", type=Path, help="results file to continue; default: one of today's in benchmarks/results")
    arguments = parser.parse_args()
    device = resolve_device(arguments.device, Precision.FP32)
    presets = arguments.presets or PRESETS[device.type]

    environment = current_environment(device_of(device))
    results = GatheredResults(FOLDER, "train-throughput", environment, current_command(), arguments.results)
    begin = time.monotonic()
    for batch_size in arguments.batch_sizes:
        for preset in presets:
            for model in arguments.models:
                key = f"{model}/{preset}/{batch_size}"
                if key in results.rows:
                    continue
                if time.monotonic() - begin > arguments.budget_s:
                    print(f"{key} left for the next call: the time budget is spent")
                    continue
                row: dict = {"model": model, "preset": preset, "batch_size": batch_size}
                try:
                    profile = measure(model, preset, batch_size, device)
                    row |= asdict(profile if profile.is_sound else replace(profile, busy=None, shares={}))
                except torch.OutOfMemoryError:
                    row["failed"] = "out of memory"
                if device.type == "cuda":
                    release_memory()
                results.add(key, row)
                print(f"{key} after {time.monotonic() - begin:.0f} s", flush=True)

    if not results.rows:
        return
    table = make_table(results)
    how = "bf16 by autocast, dense part compiled" if device.type == "cuda" else "fp32, eager"
    notes = f"Whole training steps on the synthetic stream, {how}. Shares are of kernel time; busy is kernel time ÷ step time. "
    notes += "Not known: the profiler told of more kernel time than the step took, which cannot be."
    path = results.write_markdown(f"{notes}\n\n{table}")
    print(table)
    print(f"\n{path}\n{results.json_path}")


if __name__ == "__main__":
    main()
