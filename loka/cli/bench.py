"""``loka bench``: the tables of this project, each made by one command."""

import math
import statistics
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import track

from loka.cli.gathering import Out, Results, finish, gathered_results, refuse_empty
from loka.cli.shapes import BENCHMARK_SHAPES, Shapes, parse_shape
from loka.cli.tables import grouped_reasons
from loka.core.gemm import Role

if TYPE_CHECKING:
    from loka.measure.gemm import GemmMeasurement

app = App(name="bench", help="Measure, print a table, and write it with hardware, versions and date.")
app.command("loka.cli.bench_block:block", help="Linear, norm and activation: our fused block beside what else can run it.")
app.command("loka.cli.bench_block:casts", help="Casts to FP8: ours, FBGEMM's and torch.compile's, beside a copy.")
app.command("loka.cli.bench_model:model", help="Whole models: training step and serving, each way beside compiled bf16.")
app.command("loka.cli.bench_quality:quality", help="What low precision does to log-loss, on paired runs.")


@app.command
def gemm(
    *,
    shapes: Shapes = None,
    kernels: Annotated[
        list[str] | None, Parameter(help="Names; all but reference.* if not given.", consume_multiple=True)
    ] = None,
    device: Annotated[str, Parameter(help="cpu, cuda, or auto: the GPU where there is one.")] = "auto",
    out: Out = "benchmarks/results",
    results: Results = None,
) -> None:
    """Every kernel at every shape and role: casts, GEMM, the whole, and the error.

    A shape whose kernels are all in the results file is not measured again: call it again for the rest.

    Example: loka bench gemm --shapes 2048x1024x1024 --out /tmp/results
    """
    import msgspec

    from loka.kernels.contract import KERNELS, is_oracle
    from loka.kernels.device import device_named, model_dtype
    from loka.measure.gemm import GemmMeasurement, measure_site
    from loka.measure.parts import SiteTensors, baseline_kernel
    from loka.numerics.formats import format_of

    refuse_empty(shapes=shapes, kernels=kernels)
    where = device_named(device)
    dtype = model_dtype(where)
    sites = [parse_shape(text) for text in shapes] if shapes else list(BENCHMARK_SHAPES)
    names = kernels or [name for name in KERNELS.names() if not is_oracle(name)]
    baseline = baseline_kernel(format_of(dtype))
    names = [baseline, *(KERNELS.get(name).name for name in names if name != baseline)]
    gathered = gathered_results("gemm", where, out, results)
    missing = [site for site in sites if any(f"{site}/{name}/{role}" not in gathered.rows for name in names for role in Role)]
    for site in track(missing, description="measuring", console=Console(stderr=True)):
        measured = measure_site(site, SiteTensors.random(site, dtype, where), names)
        gathered.add_all({f"{site}/{row.kernel}/{row.role}": msgspec.to_builtins(row) for row in measured})
    rows = [msgspec.convert(_with_nan(row), GemmMeasurement) for row in gathered.rows.values()]
    summary = _summary(rows, baseline)
    tables = "\n".join([summary, *(_per_shape(rows, baseline, role) for role in Role), _reasons(rows)])
    finish(gathered, tables, shown=summary)


def _with_nan(row: dict[str, Any]) -> dict[str, Any]:
    """The row with NaN for null: JSON has neither NaN nor infinity, which an error, or the SQNR of an exact product, may be."""
    return row | {"error": {name: math.nan if value is None else value for name, value in row.get("error", {}).items()} or None}


def _summary(rows: "list[GemmMeasurement]", baseline: str) -> str:
    """Geometric means over the shapes each kernel takes."""
    from loka.core.results import markdown_table

    table = []
    for kernel in dict.fromkeys(row.kernel for row in rows):
        for role in Role:
            pairs = _paired(rows, baseline, kernel, role)
            if not pairs:
                continue
            errors = [row.error.relative_rms for row, _ in pairs if row.error]
            alone = statistics.geometric_mean(
                base.gemm.median_us / row.gemm.median_us for row, base in pairs if row.gemm and base.gemm
            )
            whole = statistics.geometric_mean(
                base.whole.median_us / row.whole.median_us for row, base in pairs if row.whole and base.whole
            )
            table.append([kernel, role, str(len(pairs)), f"{alone:.2f}", f"{whole:.2f}", f"{statistics.fmean(errors):.4f}"])
    header = ["kernel", "role", "shapes", "GEMM alone ×", "with casts ×", "rms error"]
    return f"Speed-up over {baseline}, geometric mean over shapes\n\n" + markdown_table(header, table)


def _per_shape(rows: "list[GemmMeasurement]", baseline: str, role: Role) -> str:
    """One line a shape, with each kernel's casts, GEMM and whole in µs."""
    from loka.core.results import markdown_table

    kernels = [k for k in dict.fromkeys(row.kernel for row in rows) if _paired(rows, baseline, k, role)]
    found = {(row.kernel, row.site): row for row in rows if row.role is role}
    table = []
    for site in dict.fromkeys(row.site for row in rows):
        table.append([str(site), *(_cell(found.get((kernel, site))) for kernel in kernels)])
    return f"{role}, µs: cast of each operand, GEMM → whole\n\n" + markdown_table(["rows×in×out", *kernels], table)


def _cell(row: "GemmMeasurement | None") -> str:
    if row is None or row.gemm is None or row.whole is None:
        return "–"
    casts = " ".join(f"{name} {time:.1f}" for name, time in row.cast_us.items())
    return f"{casts}, {row.gemm.median_us:.1f} → **{row.whole.median_us:.1f}**"


def _reasons(rows: "Iterable[GemmMeasurement]") -> str:
    refusals = grouped_reasons((row.kernel, row.role, row.why_not) for row in rows if row.why_not)
    return "Not measured, and why\n\n" + ("\n".join(f"- {names}: {reason}" for names, reason in refusals) or "- nothing") + "\n"


def _paired(
    rows: "list[GemmMeasurement]", baseline: str, kernel: str, role: Role
) -> "list[tuple[GemmMeasurement, GemmMeasurement]]":
    """Rows of ``kernel`` with the baseline's, at shapes where both could be timed."""
    base = {row.site: row for row in rows if row.kernel == baseline and row.role is role and row.whole}
    timed = [row for row in rows if row.kernel == kernel and row.role is role and row.whole]
    return [(row, base[row.site]) for row in timed if row.site in base]
