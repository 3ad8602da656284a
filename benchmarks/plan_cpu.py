"""Serving on the CPU by a plan, beside the same model in fp32, in one process and in turns.

    python benchmarks/plan_cpu.py

Each model, as it is and with the Mods, is trained for a while under a Probe, measured as it serves compiled, planned for
serving and frozen. It and the model in fp32 without Mods run the same batch in turn, compiled, so that a busy machine slows
both alike; what counts is the median of the ratios. A plan may run sites in INT8, and those over another axis in fp32 from
the left. The change of log-loss is against the same weights in fp32, on held-out examples. The preset's layers are 128 wide,
and most of its time is spent elsewhere; the other models are the preset with wider layers.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch

import loka
from loka.core.environment import current_command, current_environment
from loka.core.plan import Plan
from loka.core.record import Record
from loka.core.results import markdown_table, write_results
from loka.data.batch import Batch
from loka.data.dataset import Dataset, open_dataset
from loka.kernels.device import device_of
from loka.models.recommender import Recommender
from loka.models.registry import build_model
from loka.train.config import TrainConfig
from loka.train.loop import evaluate
from loka.train.trainer import Trainer

KERNELS = ("onednn.int8", "onednn.int8_tensorwise", "onednn.int8_dynamic", "torch.fp32_left")
MODELS: dict[str, dict[str, tuple[int, ...]]] = {
    "small": {},
    "small, 512 wide": {"fmb_widths": (512, 512), "top_widths": (512, 256)},
    "small, 1024 wide": {"fmb_widths": (1024, 1024), "top_widths": (1024, 512)},
}
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60, help="of training under the Probe")
    parser.add_argument("--repeats", type=int, default=25, help="timed passes of each model")
    parser.add_argument("--kernels", nargs="*", default=list(KERNELS), help="that a plan may choose beside fp32's")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--out", default="benchmarks/results")
    arguments = parser.parse_args()
    settings = arguments.kernels, arguments.batch_size, arguments.steps, arguments.repeats
    rows = [measure_model(name, has_mods, *settings) for name in arguments.models for has_mods in (False, True)]
    environment = current_environment(device_of(CPU))
    for path in write_results(arguments.out, "plan-cpu", environment, current_command(), rows, tables(rows)):
        print(f"wrote {path}")


def measure_model(
    name: str, has_mods: bool, kernels: list[str], batch_size: int, steps: int, repeats: int
) -> dict[str, object]:
    torch.manual_seed(0)
    data = open_dataset("synthetic", path=None, seed=0, device=CPU, test_examples=16 * batch_size)
    plain = build_model("wukong", "small", data.schema, **MODELS[name])
    model = copy.deepcopy(plain)
    if has_mods:
        loka.apply_mods(model.dense_part, example=model.dense_inputs(next(data.train(batch_size))))
    record = probed(model, data, batch_size, steps)
    plans, seconds = {}, {}
    for compiled in (False, True):
        begin = time.perf_counter()
        survey = loka.measure(record, kernels=kernels, device="cpu", compiled=compiled)
        seconds[compiled] = time.perf_counter() - begin
        plans[compiled] = loka.make_plan(survey, goal="serving")
    for one in (plain, model):
        # As ``freeze`` leaves the planned model: torch multiplies some operands differently with gradients.
        one.eval().requires_grad_(False)
    by_parts, fast = (served_by(plan, model) for plan in plans.values())
    high, low = (evaluate(one, data.test(batch_size)).log_loss for one in (model, fast))
    torch.compiler.reset()  # or graphs of all models would add up to torch's limit
    for one in (plain, by_parts, fast):
        one.dense_part.compile(fullgraph=True)
    sites = plans[True].sites
    low_sites = {compiled: [site for site in plan.sites if site.is_low_precision] for compiled, plan in plans.items()}
    moved = [site for site in sites if plans[True].document.moves(site)]
    errors = [choice.error.high for site in low_sites[True] for choice in site.kernels.values() if choice.error]
    row = {
        "model": name,
        "mods": has_mods,
        "batch_size": batch_size,
        "int8_sites": len(low_sites[True]),
        "exact_sites": len(moved) - len(low_sites[True]),
        "int8_sites_by_parts": len(low_sites[False]),
        "sites": len(sites),
        "worst_error": max(errors, default=0.0),
        "log_loss_change_percent": 100 * (low / high - 1),
        "measured_s": seconds[True],
        "measured_by_parts_s": seconds[False],
        "linear_layers_ms": sum(site.baseline_us for site in sites) / 1e3,
        **time_in_turns(plain, by_parts, fast, next(data.train(batch_size)), repeats),
    }
    print(row)
    return row


def probed(model: Recommender, data: Dataset, batch_size: int, steps: int) -> Record:
    """A short training run under the Probe."""
    config = TrainConfig("wukong", steps=steps, batch_size=batch_size, warmup_steps=10, device="cpu", out=None)
    trainer = Trainer(model, config)
    probe = loka.Probe(model.dense_part, every=max(1, steps // 8))
    for batch in islice(data.train(batch_size), steps):
        with probe.step():
            trainer.step(batch)
    record = probe.record()
    probe.detach()
    return record


def served_by(plan: Plan, model: Recommender) -> Recommender:
    fast = copy.deepcopy(model)
    loka.apply_plan(fast.dense_part, plan)
    loka.freeze(fast.dense_part)
    return fast


@torch.no_grad()
def time_in_turns(plain: Recommender, by_parts: Recommender, fast: Recommender, batch: Batch, repeats: int) -> dict[str, float]:
    """Median milliseconds of a pass, and the median of the ratios turn by turn, of the dense part and of the whole model."""
    inputs = (batch.dense_BD, *plain.embeddings(batch))
    calls: dict[str, Callable[[], object]] = {
        "dense_fp32": lambda: plain.dense_part(*inputs),
        "dense_by_parts": lambda: by_parts.dense_part(*inputs),
        "dense_plan": lambda: fast.dense_part(*inputs),
        "whole_fp32": lambda: plain(batch),
        "whole_plan": lambda: fast(batch),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 3):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn >= 3:  # the first turns compile and warm up
                times[name].append(1e3 * (time.perf_counter() - start))
    result = {f"{name}_ms": statistics.median(values) for name, values in times.items()}
    for what in ("dense_by_parts", "dense_plan", "whole_plan"):
        pairs = zip(times[f"{what.partition('_')[0]}_fp32"], times[what], strict=True)
        result[f"{what}_speedup"] = statistics.median(high / low for high, low in pairs)
    return result


def tables(rows: list[dict[str, Any]]) -> str:
    def cell(row: dict[str, Any], what: str) -> str:
        high_ms = row[f"{what.partition('_')[0]}_fp32_ms"]
        return f"{high_ms:.1f} → {row[f'{what}_ms']:.1f} ms, **{row[f'{what}_speedup']:.2f}×**"

    table = [
        [
            f"{row['model']}{', with Mods' if row['mods'] else ''}",
            f"{row['int8_sites']} of {row['sites']}",
            str(row["exact_sites"]),
            f"{row['worst_error']:.3f}",
            f"{row['log_loss_change_percent']:+.4f} %",
            cell(row, "dense_plan"),
            cell(row, "whole_plan"),
            f"{row['int8_sites_by_parts']}: {row['dense_by_parts_speedup']:.2f}×",
            f"{row['measured_s']:.0f}, {row['measured_by_parts_s']:.0f}",
        ]
        for row in rows
    ]
    header = [
        "Wukong",
        "sites in INT8",
        "from the left",
        "worst error",
        "log-loss",
        "dense part",
        "whole model",
        "by eager times: dense part",
        "measured, s",
    ]
    note = (
        f"\nBoth compiled, fp32 without Mods → the plan at batch {rows[0]['batch_size']}: medians, and the median of the "
        "ratios turn by turn. From the left: sites over another axis, in fp32. Worst error: mere_floored, upper end; the limit "
        "is 0.2. Log-loss: against the same weights in fp32. By eager times: sites in INT8, and speed, of a plan by times of "
        "eager parts, as `loka.measure` takes them without `compiled`. Measured: what that took with `compiled`, and without.\n"
    )
    return markdown_table(header, table) + note


if __name__ == "__main__":
    main()
