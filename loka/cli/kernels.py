"""``loka kernels``: what can multiply here, and what cannot and why."""

from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loka.cli.shapes import parse_shape
from loka.cli.tables import console, grouped_reasons, microseconds, plain_table
from loka.core.errors import InvalidInput
from loka.core.gemm import GemmProblem, Role, SiteShape, TensorName

if TYPE_CHECKING:
    import torch

    from loka.core.gemm import Device
    from loka.measure.gemm import GemmMeasurement


COPIES = 3  # of each tensor, in float64: a weight's rotated copies, operands beside it, and the reference take about so much


def kernels(
    *,
    shape: Annotated[str | None, Parameter(help="Also measure error and time at ROWSxINxOUT, e.g. 2048x1024x1024.")] = None,
    device: Annotated[str, Parameter(help="cpu, cuda, or auto: the GPU where there is one.")] = "auto",
    json: Annotated[bool, Parameter(help="Print JSON instead of a table.")] = False,
) -> None:
    """List every kernel, whether it runs on this machine, and why not.

    Example: loka kernels --shape 2048x1024x1024
    """
    from loka.kernels.device import device_named

    where = device_named(device)
    if shape is None:
        _list(where, as_json=json)
    else:
        _measure(parse_shape(shape), where, as_json=json)


class KernelRow(msgspec.Struct):
    kernel: str
    recipe: str
    roles: list[Role]
    why_not: str | None


def _rows(device: "Device") -> list[KernelRow]:
    from loka.core.recipe import Format
    from loka.kernels.contract import KERNELS, why_not

    probe = SiteShape(2048, 1024, 1024)  # a shape that every library takes, so that only the machine is asked about
    rows = []
    for name, kernel in KERNELS.items():
        refusals = {role: why_not(kernel, GemmProblem.of(role, probe, Format.BF16, device, across=True)) for role in Role}
        able = [role for role, reason in refusals.items() if reason is None]
        rows.append(KernelRow(name, str(kernel.recipe(Role.WGRAD)), able, None if able else refusals[Role.FPROP]))
    return rows


def _list(where: "torch.device", *, as_json: bool) -> None:
    from loka.kernels.device import device_of

    device = device_of(where)
    rows = _rows(device)
    if as_json:
        print(msgspec.json.encode({"device": str(device), "kernels": rows}).decode())
        return
    table = plain_table(f"Kernels on {device}", ["kernel", "operands (a·b)", "roles"])
    for row in rows:
        if row.why_not is None:
            table.add_row(row.kernel, row.recipe, "all" if len(row.roles) == len(Role) else ", ".join(row.roles))
    out = console()
    out.print(table)
    _print_reasons(out, [(row.kernel, None, row.why_not) for row in rows if row.why_not])
    out.print("Next: loka kernels --shape 2048x1024x1024  (error and time of each, here)")


def _measure(site: SiteShape, where: "torch.device", *, as_json: bool) -> None:
    from loka.kernels.contract import KERNELS, is_oracle
    from loka.kernels.device import device_of, model_dtype
    from loka.measure.gemm import measure_site
    from loka.measure.parts import SiteTensors, baseline_kernel
    from loka.numerics.formats import format_of

    dtype = model_dtype(where)
    _require_memory(site, where)
    names = [name for name in KERNELS.names() if not is_oracle(name)]
    with Console(stderr=True).status(f"measuring {len(names)} kernels at {site} …"):
        rows = measure_site(site, SiteTensors.random(site, dtype, where), names)
    if as_json:
        print(msgspec.json.encode(rows).decode())
        return
    out = console()
    out.print(_measured_table(rows, baseline_kernel(format_of(dtype)), f"{site} on {device_of(where)}, a {dtype} model"))
    _print_reasons(out, [(row.kernel, row.role, row.why_not) for row in rows if row.why_not])
    whole = "whole = casts of activations and gradients + GEMM"
    out.print(f"{whole}. The cast of w is not included: it is paid once per training step, and never in serving")


def _require_memory(site: SiteShape, where: "torch.device") -> None:
    """Refuse a shape that needs too much memory: a machine may grant memory that it does not have, then kill the process that
    uses it, and others."""
    from loka.kernels.device import free_bytes

    free, needed = free_bytes(where), 8 * COPIES * (site.m * site.k + site.n * site.k + site.m * site.n)
    if free is not None and needed > free:
        told = f"measuring {site} needs about {needed / 2**30:,.0f} GiB, but only {free / 2**30:,.0f} GiB are free on {where}"
        raise InvalidInput(f"{told}: use a smaller shape")


def _measured_table(rows: "list[GemmMeasurement]", baseline: str, title: str) -> Table:
    base = {row.role: row.whole.median_us for row in rows if row.kernel == baseline and row.whole}
    columns = ["kernel", "role", "rms error", "mere_floored", "casts µs", "GEMM µs", "whole µs", f"× {baseline}"]
    table = plain_table(title, columns)
    for row in rows:
        if row.error is None or row.gemm is None or row.whole is None:
            continue
        casts_us = sum(time for tensor, time in row.cast_us.items() if tensor is not TensorName.W)
        times = [microseconds(time) for time in (casts_us, row.gemm.median_us, row.whole.median_us)]
        errors = [f"{row.error.relative_rms:.4f}", f"{row.error.mere_floored:.4f}"]
        faster = f"{base[row.role] / row.whole.median_us:.2f}" if row.role in base else "–"
        table.add_row(row.kernel, row.role, *errors, *times, faster)
    return table


def _print_reasons(out: Console, refusals: list[tuple[str, Role | None, str]]) -> None:
    for names, reason in grouped_reasons(refusals):
        out.print(Text.assemble(("cannot run here:", "bold"), f" {names}\n    {reason}"))
