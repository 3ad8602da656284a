"""``loka bench block`` and ``loka bench casts``: our kernels where the speed comes from, beside what else there is."""

import os
import time
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from loka.cli.gathering import Out, Results, finish, gathered_results, refuse_empty, typed_rows
from loka.cli.shapes import BENCHMARK_LAYERS, BENCHMARK_ROWS, BENCHMARK_SHAPES, Shapes, parse_shape
from loka.core.errors import KernelUnavailable

if TYPE_CHECKING:
    import torch


def block(
    *,
    shapes: Shapes = None,
    ways: Annotated[list[str] | None, Parameter(help="Ways to run a block; all if not given.", consume_multiple=True)] = None,
    workers: Annotated[int, Parameter(help="Processes that compile side by side; 0 for this one alone.")] = 8,
    device: Annotated[str, Parameter(help="cuda or cuda:N.")] = "auto",
    out: Out = "benchmarks/results",
    results: Results = None,
) -> None:
    """Linear, norm and activation: our fused block against compiled bf16, torchao, FBGEMM, bare GEMMs and the machine's limit.

    What is in the results file is not measured again: call it again for the rest.

    Example: loka bench block --shapes 2048x256x768 12288x4096x4096
    """
    import msgspec

    from loka.core.errors import UnknownName
    from loka.measure.block_bench import BlockMeasurement, measure_blocks
    from loka.measure.block_tables import block_tables
    from loka.measure.block_ways import BASELINE, FUSED, WAYS

    refuse_empty(shapes=shapes, ways=ways)
    where = _required_gpu(device)
    if unknown := [name for name in ways or () if name not in WAYS]:
        raise UnknownName(f"no way to run a block is called {unknown[0]!r}. Known: {', '.join(WAYS)}")
    chosen = list(WAYS) if ways is None else list(dict.fromkeys([BASELINE, *ways]))
    gathered = gathered_results("block", where, out, results)
    sites = [parse_shape(text) for text in shapes] if shapes else list(BENCHMARK_SHAPES)
    missing = [site for site in sites if str(site) not in gathered.rows]
    begin = time.monotonic()
    for measured in measure_blocks(missing, where, chosen, workers=max(0, min(workers, len(missing) - 1, os.cpu_count() or 1))):
        site = measured.site
        if not measured.training_us:  # not written down: the next call tries it again
            print(f"{site}: nothing could be measured, {next(iter(measured.why_not.values()))}", flush=True)
            continue
        gathered.add(str(site), msgspec.to_builtins(measured))
        told = ", ".join(
            f"{use} {times[BASELINE]:.1f} µs, {FUSED} {times[BASELINE] / times[FUSED]:.2f} times as fast"
            for use, times in (("serving", measured.serving_us), ("training", measured.training_us))
            if BASELINE in times and FUSED in times
        )
        print(f"{site}: {told or 'see why not'}, after {time.monotonic() - begin:.0f} s", flush=True)
    finish(gathered, block_tables(typed_rows(gathered, BlockMeasurement)))


def casts(
    *,
    device: Annotated[str, Parameter(help="cuda or cuda:N.")] = "auto",
    out: Out = "benchmarks/results",
    results: Results = None,
) -> None:
    """Casts to FP8 of the benchmark's activations, one layout and both: ours, FBGEMM's and torch.compile's, beside a copy.

    What is in the results file is not measured again: call it again for the rest.
    """
    import msgspec

    from loka.measure.block_tables import cast_tables
    from loka.measure.cast_bench import CastMeasurement, measure_casts

    where = _required_gpu(device)
    gathered = gathered_results("casts", where, out, results)
    widths = sorted({k for k, _ in BENCHMARK_LAYERS})
    for rows, cols in ((rows, cols) for rows in BENCHMARK_ROWS for cols in widths):
        if f"{rows}x{cols}" not in gathered.rows:
            measured = measure_casts(rows, cols, where)
            gathered.add(f"{rows}x{cols}", msgspec.to_builtins(measured))
            print(f"{rows}x{cols}: {len(measured.warm_us)} casts", flush=True)
    finish(gathered, cast_tables(typed_rows(gathered, CastMeasurement)))


def _required_gpu(device: str) -> "torch.device":
    import torch

    from loka.kernels.device import device_named
    from loka.nn.fused_spec import why_not_here

    where = device_named(device)
    if reason := why_not_here(where, torch.bfloat16):
        raise KernelUnavailable(f"this measures our Triton kernels, and on {where} they cannot run: {reason}")
    return where
