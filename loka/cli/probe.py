"""``loka probe``: train a workload under the Probe, and write its Record."""

import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from loka.cli.tables import console, plain_table
from loka.core.gemm import by_frequency

if TYPE_CHECKING:
    from loka.core.record import Record
    from loka.core.site_record import SiteRecord


def probe(
    workload: str,
    *,
    out: Annotated[Path, Parameter(name=["--out", "-o"], help="Folder of the run.")] = Path("run"),
    steps: Annotated[int, Parameter(help="Training steps; batches start over when they run out.")] = 200,
    every: Annotated[int, Parameter(help="Sample one step in this many.")] = 10,
    mods: Annotated[
        list[str] | None,
        Parameter(
            help="Mods to make before training: no_bias, block_norm, hard_swish, insert_norm. Your code needs the same ones.",
            consume_multiple=True,
        ),
    ] = None,
    data_path: Annotated[Path | None, Parameter(help="Built-in workloads only: path of the data.")] = None,
    batch_size: Annotated[
        int | None, Parameter(help="Built-in workloads only: examples in a batch; 2048 if not given.")
    ] = None,
    precision: Annotated[
        Literal["fp32", "bf16"] | None, Parameter(help="Built-in workloads only: bf16 on a GPU and fp32 on a CPU if not given.")
    ] = None,
    device: Annotated[str | None, Parameter(help="Built-in workloads only: cpu, cuda, or auto.")] = None,
    seed: Annotated[int | None, Parameter(help="Built-in workloads only: decides weights and batches.")] = None,
) -> None:
    """Train WORKLOAD with Adam under the Probe; writes OUT/record.safetensors.

    WORKLOAD is either MODEL-SIZE@DATA (a built-in model and data set) or package.module:function (your function that returns
    loka.Workload(model, batches, loss)). If interrupted, or at an error, it writes what it learned so far.

    Example: loka probe wukong-small@synthetic -o run
    """
    from loka.core.errors import InvalidInput
    from loka.core.files import require_folder
    from loka.core.progress import for_this_output, is_read
    from loka.mods.contract import MODS
    from loka.train.probing import probe_workload
    from loka.train.workloads import BuiltInOptions, open_workload

    require_folder(out)
    if mods == []:
        raise InvalidInput(f"--mods takes the names of Mods, any of {', '.join(MODS.names())}")
    opened = open_workload(workload, BuiltInOptions(data_path, batch_size, precision, device, seed))
    with _interrupted_once():
        try:
            record, ended_by = probe_workload(opened, steps=steps, every=every, mods=mods or (), progress=for_this_output())
        except KeyboardInterrupt:
            print("\nstopped before anything was learned", file=sys.stderr)
            sys.exit(130)
        path = record.save(out)
    _print(record)
    console().print(f"{path}   Next: loka measure {quote(str(out))}", soft_wrap=True)
    if isinstance(ended_by, KeyboardInterrupt) or (isinstance(ended_by, BrokenPipeError) and not is_read(sys.stdout)):
        sys.exit(130)
    if ended_by is not None:
        raise ended_by


@contextmanager
def _interrupted_once() -> Iterator[None]:
    """A second Ctrl-C, or one from a shell that sends two, must not keep what was learned from being written."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # somebody else's, or ignored: it stays
        yield
        return

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _print(record: "Record") -> None:
    out = console()
    out.print(_table(record))
    for finding in record.findings:
        remedy = (" Fix: ", (finding.remedy, "bold"), ".") if finding.remedy else ()
        out.print(Text.assemble((f"finding at {finding.site}:", "bold"), f" {finding.message}.", *remedy))
    for function, count in Counter(record.uncovered).items():
        out.print(f"not covered: {function}{f' ({count} times)' if count > 1 else ''}", highlight=False)


def _table(record: "Record") -> Table:
    title = f"{len(record.sites)} sites in {record.dtype}, after {record.steps_seen} steps on {record.environment.device}"
    table = plain_table(title, ["site", "rows×in×out", "block", "rms x", "notes"])
    for site in record.sites.values():
        rows = by_frequency(site.calls)[0] if site.calls else 0
        block = " → ".join(kind for kind in (site.norm_kind, site.activation_kind) if kind)
        table.add_row(site.name, f"{rows}×{site.k}×{site.n}", block or "–", _rms(site), "; ".join(site.notes))
    return table


def _rms(site: "SiteRecord") -> str:
    return f"{site.rms_K.square().mean().sqrt():.3g}" if site.was_called else "–"
