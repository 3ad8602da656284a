"""Time of probe, measure and plan against the number of sites and against width: none may grow faster than linearly.

    python benchmarks/scaling.py                                    # 10 to 1000 sites of width 64, 10 of width 64 to 1024
    python benchmarks/scaling.py --sites 10 30 --widths 32 64       # to try it

Towers of equal layers (Linear, LayerNorm, SiLU) are probed for a few training steps, measured and planned. The time of probing
is what a sampled step takes beyond one that is not sampled; that of measuring is the whole call, with the kernels that have
fast paths on the device. Seconds are the clock's on a GPU; on the CPU they are those that this process was busy. The slope is
that of a straight line through log(time) over log(size), by least squares: 1 is linear.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.core.environment import current_command, current_environment
from loka.core.results import GatheredResults, markdown_table
from loka.kernels.device import device_named, device_of
from loka.measure.survey import measure
from loka.planner.plan import make_plan
from loka.probe.probe import Probe

FOLDER = Path(__file__).parent / "results"
KERNELS = {"cpu": ["onednn.int8"], "cuda": ["torch.rowwise", "triton.rowwise"]}
STAGES = ("probe", "record", "measure", "plan")
ROWS = 128
FIXED_WIDTH, FIXED_SITES = 64, 10
DEPTH = 10


class Towers(nn.Module):
    """Towers of up to ten layers side by side, so that sites are alike however many there are. Their logits are added up."""

    def __init__(self, n_sites: int, width: int) -> None:
        super().__init__()
        depths = [min(DEPTH, n_sites - first) for first in range(0, n_sites, DEPTH)]
        self.towers = nn.ModuleList(tower(depth, width) for depth in depths)

    def forward(self, x_MK: Tensor) -> Tensor:
        return sum(tower(x_MK) for tower in self.towers).squeeze(1)


def tower(depth: int, width: int) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.SiLU()) for _ in range(depth - 1)]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def measure_stages(n_sites: int, width: int, device: torch.device) -> dict[str, float]:
    """Seconds of each stage."""
    torch.manual_seed(0)
    model = Towers(n_sites, width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        x_MK = torch.randn(ROWS, width, device=device)
        F.binary_cross_entropy_with_logits(model(x_MK), (x_MK[:, 0] > 0).float()).backward()
        optimizer.step()
        optimizer.zero_grad()

    probe = Probe(model, every=1)

    def probed_step() -> None:
        with probe.step():
            step()

    step(), probed_step()  # the first of each has costs that come only once
    plain_s = statistics.median(seconds(step, device) for _ in range(5))
    probed_s = statistics.median(seconds(probed_step, device) for _ in range(5))
    made: dict[str, Any] = {}
    times = {"probe": max(probed_s - plain_s, 1e-6)}
    times["record"] = seconds(lambda: made.update(record=probe.record()), device)
    probe.detach()
    times["measure"] = seconds(
        lambda: made.update(survey=measure(made["record"], kernels=KERNELS[device.type], device=device)), device
    )
    times["plan"] = seconds(lambda: make_plan(made["survey"]), device)
    return times


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of ``call``: on a GPU by the clock; on the CPU those this process was busy, whatever else the machine does."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    begin = clock()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - begin


def slope(sizes: list[int], times: list[float]) -> float:
    """The slope of log(time) over log(size), by least squares."""
    x, y = [math.log(size) for size in sizes], [math.log(time_s) for time_s in times]
    return statistics.linear_regression(x, y).slope


def make_tables(results: GatheredResults) -> str:
    tables = []
    for axis, what in (("sites", f"sites of width {FIXED_WIDTH}"), ("width", f"width of {FIXED_SITES} sites")):
        rows = sorted((row for row in results.rows.values() if row["axis"] == axis), key=lambda row: row["size"])
        sizes = [row["size"] for row in rows]
        if len(sizes) < 2:
            continue
        cells = [[str(row["size"]), *(f"{row['seconds'][stage]:.3g}" for stage in STAGES)] for row in rows]
        slopes = [f"**{slope(sizes, [row['seconds'][stage] for row in rows]):.2f}**" for stage in STAGES]
        tables.append(f"Seconds against the {what}\n\n" + markdown_table([axis, *STAGES], [*cells, ["slope", *slopes]]))
    return "\n".join(tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", nargs="+", type=int, default=[10, 30, 100, 300, 1000])
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128, 256, 512, 1024])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--results", type=Path, help="results file to continue; default: one of today's in benchmarks/results")
    arguments = parser.parse_args()
    device = device_named(arguments.device)
    environment = current_environment(device_of(device))
    results = GatheredResults(FOLDER, "scaling", environment, current_command(), arguments.results)
    cells = [("sites", size, (size, FIXED_WIDTH)) for size in arguments.sites]
    cells += [("width", size, (FIXED_SITES, size)) for size in arguments.widths]
    measure_stages(3, 32, device)  # imports, trials and compilers
    for axis, size, shape in cells:
        key = f"{axis}/{size}"
        if key not in results.rows:
            results.add(key, {"axis": axis, "size": size, "seconds": measure_stages(*shape, device)})
            print(f"{key}: {results.rows[key]['seconds']}", flush=True)
    notes = f"Probe is what a sampled step of {ROWS} rows costs beyond one that is not; measure is the whole call with "
    notes += f"{', '.join(KERNELS[device.type])}. Slope: of log(time) over log(size), 1 is linear."
    tables = make_tables(results)
    print(f"{tables}\n{results.write_markdown(f'{notes}{chr(10)}{chr(10)}{tables}')}\n{results.json_path}")


if __name__ == "__main__":
    main()
