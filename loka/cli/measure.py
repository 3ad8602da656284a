"""``loka measure``: from a run's Record its Survey."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.table import Table

from loka.cli.tables import console, plain_table
from loka.core.files import file_in
from loka.core.gemm import Role, by_frequency
from loka.core.survey import GATE
from loka.planner.limits import MAX_ERROR

if TYPE_CHECKING:
    from loka.core.survey import Candidate, SiteSurvey, Survey


def measure(
    run: Path,
    *,
    kernels: Annotated[
        list[str] | None,
        Parameter(help="Names or patterns; all that make sense on the device if not given.", consume_multiple=True),
    ] = None,
    device: Annotated[str, Parameter(help="cpu, cuda, or auto: the GPU where there is one.")] = "auto",
    compiled: Annotated[bool, Parameter(help="On a CPU: for a model that serves under torch.compile.")] = False,
) -> None:
    """Measure error and time of every kernel at every site that the record in RUN knows; writes RUN/survey.json.

    If interrupted, run the same command again to continue where it stopped.

    Example: loka probe wukong-small@synthetic -o run && loka measure run
    """
    from loka.core.progress import for_this_output
    from loka.core.record import Record
    from loka.measure.survey import measure as measure_record

    record, folder = Record.load(run), file_in(run, "record.safetensors").parent
    try:
        survey = measure_record(
            record, kernels=kernels, device=device, compiled=compiled, out=folder, progress=for_this_output()
        )
    except KeyboardInterrupt:
        again = ["loka", "measure", str(run), *(["--kernels", *kernels] if kernels else [])]
        again += ["--device", device] if device != "auto" else []
        again += ["--compiled"] if compiled else []
        print(f"\nstopped: run `{shlex.join(again)}` to continue where it stopped", file=sys.stderr)
        sys.exit(130)
    _print(survey)
    goal = " --goal serving" if compiled else ""
    console().print(f"{folder}/survey.json   Next: loka plan {shlex.quote(str(folder))}{goal}", soft_wrap=True)


def _print(survey: "Survey") -> None:
    out = console()
    out.print(_table(survey))
    for site in survey.sites:
        for candidate in site.candidates:
            if candidate.fault:
                out.print(f"left out: {candidate.kernel} at {site.site} {candidate.role}: {candidate.why_not}", highlight=False)


def _table(survey: "Survey") -> Table:
    """A site a line, a role a column, holding the fastest GEMM among the timed kernels within the usual error."""
    environment = survey.document.environment
    header = ["site", "rows×in×out", *Role]
    title = f"Per role: the fastest GEMM with {GATE} up to {MAX_ERROR}, its speed-up without casts, and its error"
    compiled = ", fprop compiled and with the cast of x" if survey.document.compiled else ""
    table = plain_table(f"{title}, on {environment.device}{compiled}", header)
    for site in survey.sites:
        rows = by_frequency(site.calls)[0] if site.calls else 0
        table.add_row(site.site, f"{rows}×{site.k}×{site.n}", *(_cell(site, role, rows) for role in Role))
    return table


def _cell(site: "SiteSurvey", role: Role, rows: int) -> str:
    """The kernel, its GEMM's speed-up over the baseline's, and its error; without times, the most accurate recipe."""
    able = [c for c in site.candidates if c.role is role and c.error and c.kernel != site.baseline]
    if not able:
        return "–"
    baseline_us = next((c.gemm_us.get(rows) for c in site.candidates if c.role is role and c.kernel == site.baseline), None)
    timed = [c for c in able if rows in c.gemm_us and c.error[GATE].high <= MAX_ERROR]
    if baseline_us and timed:
        best = min(timed, key=lambda candidate: candidate.gemm_us[rows])
        return f"{_name(best)} {baseline_us / best.gemm_us[rows]:.2f}× {best.error[GATE].mean:.3f}"
    best = min(able, key=lambda candidate: candidate.error[GATE].mean)
    return f"{_name(best)} {best.error[GATE].mean:.3f}"


def _name(candidate: "Candidate") -> str:
    return candidate.kernel if candidate.transform == "none" else f"{candidate.kernel} {candidate.transform}"
