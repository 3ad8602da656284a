"""What training under the Probe costs: sampled steps, the steps between, and taking a Record, against steps without a Probe.

    python benchmarks/probe_overhead.py                             # Wukong, DLRM and DCNv2; on a GPU of size base, compiled
    python benchmarks/probe_overhead.py --models dlrm --preset tiny --rounds 3      # to try it

A plain step, one under an idle Probe and a sampled one take turns on the same trainer, so that a machine that slows down
slows all alike; the fastest of each counts. The overhead is that of a hundred steps, one of them sampled. It is computed from
these parts, as if everything learned from a sample had to be waited for. On a GPU it is also measured by the clock: a hundred
steps without a Probe in turn with a hundred under one, sixteen times, with a 95 % interval, since a GPU's clock wanders by more
than a Probe takes. Seconds are the clock's on a GPU; on the CPU they are those that this process was busy.
"""

import argparse
import gc
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from scaling import seconds

from loka.core.environment import current_command, current_environment
from loka.core.results import markdown_table, write_results
from loka.data.dataset import open_dataset
from loka.kernels.device import device_named, device_of
from loka.models.registry import build_model
from loka.numerics.confidence import estimate_mean
from loka.probe.probe import Probe
from loka.train.config import Precision, TrainConfig
from loka.train.trainer import Trainer

FOLDER = Path(__file__).parent / "results"
EVERY = 100
SAMPLES = 16  # timed together: a Probe looks at some statistics only at every second, fourth, eighth or sixteenth sample


def measure_overhead(model: str, preset: str, batch_size: int, device: torch.device, rounds: int) -> dict[str, Any]:
    is_gpu = device.type == "cuda"
    torch.manual_seed(0)
    data = open_dataset("synthetic", device=device)
    config = TrainConfig(
        model=model,
        preset=preset,
        batch_size=batch_size,
        precision=Precision.BF16 if is_gpu else Precision.FP32,
        compile=is_gpu,
        device=str(device),
    )
    trainer = Trainer(build_model(model, preset, data.schema), config)
    (batch,) = islice(data.train(batch_size), 1)
    idle = Probe(trainer.model.dense_part, every=2**62)
    sampling = Probe(trainer.model.dense_part, every=1)

    def under(probe: Probe) -> Callable[[], None]:
        def step() -> None:
            with probe.step():
                trainer.step(batch)

        return step

    steps = {"plain": lambda: trainer.step(batch), "idle": under(idle), "sampled": under(sampling)}
    first_s = seconds(steps["sampled"], device)
    for step in steps.values():  # compiles, and gets over the idle Probe's first sample, its only one
        for _ in range(2):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(sum(seconds(step, device) for _ in range(SAMPLES)) / SAMPLES)
    fastest = {name: min(values) for name, values in times.items()}  # other work on the machine only adds to a step
    extra = max(0.0, fastest["sampled"] - fastest["plain"])
    probe_itself = _nothing_inside(idle, device)
    return {
        "model": f"{model} {preset}{', compiled' if is_gpu else ''}",
        "batch_size": batch_size,
        "sites": len(sampling.record().sites),
        "plain_ms": 1e3 * fastest["plain"],
        "idle_ms": 1e3 * fastest["idle"],
        "idle_probe_us": 1e6 * probe_itself,
        "sampled_ms": 1e3 * fastest["sampled"],
        "first_sample_ms": 1e3 * first_s,
        "record_ms": 1e3 * seconds(sampling.record, device),
        "parts_percent": 100 * (extra / EVERY + probe_itself) / fastest["plain"],
        **(_of_whole_runs(trainer, batch, device) if is_gpu else {}),
    }


def _of_whole_runs(trainer: Trainer, batch: Any, device: torch.device) -> dict[str, Any]:
    """By how many percent EVERY steps under a Probe, with one sample among them, take longer than as many without."""
    probe = Probe(trainer.model.dense_part, every=EVERY)

    def plain() -> None:
        for _ in range(EVERY):
            trainer.step(batch)

    def probed() -> None:
        for _ in range(EVERY):
            with probe.step():
                trainer.step(batch)

    for _ in range(2):  # the first sample is learned at once, later ones while steps go on
        probed()
    percents = []
    gc.collect()  # or what compilers left would be looked through in the middle of a turn, for half a second
    for turn in range(SAMPLES):
        order = (plain, probed) if turn % 2 else (probed, plain)
        taken_s = {run: seconds(run, device) for run in order}
        percents.append(100 * (taken_s[probed] / taken_s[plain] - 1))
    whole = estimate_mean(percents)
    return {"whole_percent": whole.mean, "whole_half_width": whole.high - whole.mean}


def _nothing_inside(idle: Probe, device: torch.device, repeats: int = 1000) -> float:
    """Seconds that an idle Probe adds to a step, timed alone: too few to show in the difference of two steps."""

    def steps() -> None:
        for _ in range(repeats):
            with idle.step():
                pass

    return seconds(steps, device) / repeats


def make_table(rows: list[dict[str, Any]]) -> str:
    header = [
        "model",
        "rows",
        "sites",
        "step, ms",
        "under an idle Probe",
        "the Probe itself, µs",
        "sampled, ms",
        "first sample",
    ]
    cells = [
        [
            row["model"],
            str(row["batch_size"]),
            str(row["sites"]),
            *(
                f"{row[name]:.3g}"
                for name in ("plain_ms", "idle_ms", "idle_probe_us", "sampled_ms", "first_sample_ms", "record_ms")
            ),
            f"{row['parts_percent']:.2f} %",
            f"**{row['whole_percent']:.2f} % ± {row['whole_half_width']:.2f}**" if "whole_percent" in row else "–",
        ]
        for row in rows
    ]
    return markdown_table([*header, "record()", f"overhead at every={EVERY}, by parts", "by the clock"], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["wukong", "dlrm", "dcnv2"])
    parser.add_argument("--preset", help="default: base on a GPU, small on a CPU")
    parser.add_argument("--batch-size", type=int, help="default: 4096 on a GPU, 2048 on a CPU")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    device = device_named(arguments.device)
    preset, batch_size = ("base", 4096) if device.type == "cuda" else ("small", 2048)
    preset, batch_size = arguments.preset or preset, arguments.batch_size or batch_size
    rows = []
    for model in arguments.models:
        rows.append(measure_overhead(model, preset, batch_size, device, arguments.rounds))
        print(rows[-1], flush=True)
    notes = (
        f"Overhead by parts: what a sampled step takes beyond a plain one, learning included, over {EVERY}, with what an idle "
        f"Probe takes, of a step. By the clock: {EVERY} steps under a Probe in turn with as many without, {SAMPLES} times, "
        "where learning a sample hides behind the steps that follow.\n"
    )
    table = f"{make_table(rows)}\n{notes}"
    environment = current_environment(device_of(device))
    print(table, *write_results(arguments.out, "probe-overhead", environment, current_command(), rows, table), sep="\n")


if __name__ == "__main__":
    main()
