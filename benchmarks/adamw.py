"""What the casts of planned weights add to an optimizer's step: behind torch's AdamW, and within loka.AdamW.

    python benchmarks/adamw.py

As many weights of one shape as come to 2²⁸ values are stepped: as plain ones, as those of layers with one scale for all, and as
those of fused blocks. These take turns, each replayed as a CUDA graph.
"""

import argparse
from collections.abc import Callable

import torch
from torch import nn

import loka
from loka.core.environment import current_command, current_environment
from loka.core.results import markdown_table, write_results
from loka.kernels.device import device_named, device_of
from loka.kernels.executor import SiteKernels
from loka.measure.timing import time_together
from loka.nn import adamw

SHAPES = ("512x512", "1024x1024", "4096x1024", "1024x4096", "4096x4096", "1024x12000", "8192x8192")
VALUES = 2**28
KERNEL = "torch.tensorwise_fast"

Make = Callable[[nn.Linear], nn.Module]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--shapes", nargs="*", default=SHAPES, metavar="OUTxIN")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", default="benchmarks/results")
    arguments = parser.parse_args()
    device = device_named(arguments.device)
    adamw.WORTH_IT = 0  # no weight is too small to be cast within the step: the table shows from which size on that pays
    rows = [measure(*map(int, shape.split("x")), device) for shape in arguments.shapes]
    print(table(rows))
    environment = current_environment(device_of(device))
    for path in write_results(arguments.out, "adamw", environment, current_command(), rows, table(rows)):
        print(f"wrote {path}")


def measure(out_features: int, in_features: int, device: torch.device) -> dict[str, float | str]:
    """ms of a step, by what is stepped and by whom."""
    count = max(1, VALUES // (out_features * in_features))
    kinds: dict[str, Make] = {
        "plain": lambda linear: linear,
        "layers": lambda linear: loka.LokaLinear.from_linear(linear, SiteKernels.same(KERNEL)),
        "blocks": lambda linear: loka.FusedBlock.from_modules(linear, loka.BlockNorm(out_features), None),
    }
    steps = {}
    for kind, make in kinds.items():
        optimizers = (torch.optim.AdamW,) if kind == "plain" else (torch.optim.AdamW, loka.AdamW)
        for optimizer in optimizers:
            linears = (nn.Linear(in_features, out_features, bias=False, device=device) for _ in range(count))
            model = nn.ModuleList([make(linear) for linear in linears])
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            stepper = optimizer(model.parameters(), lr=1e-4, fused=True, capturable=True)
            stepper.found_inf = torch.zeros((), device=device)  # as set by a trainer that looks for infinities
            name = f"{kind}, {optimizer.__module__.partition('.')[0]}"
            steps[name] = lambda turn, step=stepper.step, model=model: step()
    times = time_together(steps, device, turns=2)
    return {"shape": f"{out_features}x{in_features}", "weights": count} | {k: t.median_us / 1e3 for k, t in times.items()}


def table(rows: list[dict[str, float | str]]) -> str:
    header = ["out×in", "weights", "AdamW alone, ms"]
    header += [f"casts of {kind} add, {by}" for kind in ("layers", "blocks") for by in ("behind torch's", "within ours")]
    lines = []
    for row in rows:
        alone = float(row["plain, torch"])
        added = [
            f"{(float(row[f'{kind}, {by}']) - alone) / alone:+.1%}" for kind in ("layers", "blocks") for by in ("torch", "loka")
        ]
        lines.append([str(row["shape"]), str(row["weights"]), f"{alone:.3f}", *added])
    note = "\nFP32 weights and gradients; torch's AdamW in its fused form. Codes are written in both layouts.\n"
    return markdown_table(header, lines) + note


if __name__ == "__main__":
    main()
