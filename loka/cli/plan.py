"""``loka plan``: from a run's Survey its Plan, printed as a table."""

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from loka.cli.tables import console, grouped_reasons, microseconds, plain_table
from loka.core.files import file_in
from loka.core.gemm import Role
from loka.planner.limits import MAX_ERROR, MIN_SPEEDUP

if TYPE_CHECKING:
    from loka.core.plan import Plan, SitePlan


def plan(
    run: Path,
    *,
    goal: Annotated[
        Literal["training", "serving"], Parameter(help="training plans all three GEMMs of a site, serving only fprop.")
    ] = "training",
    max_error: Annotated[
        float, Parameter(help="Largest error allowed (mere_floored), judged by the upper end of its 95 % interval.")
    ] = MAX_ERROR,
    min_speedup: Annotated[
        float, Parameter(help="Smallest speed-up, casts included, for which a site leaves high precision.")
    ] = MIN_SPEEDUP,
    keep: Annotated[
        list[str] | None, Parameter(help="Sites, modules or patterns that stay in high precision.", consume_multiple=True)
    ] = None,
    kernels: Annotated[
        list[str] | None,
        Parameter(help="The only kernels to choose from, or patterns of them; all if not given.", consume_multiple=True),
    ] = None,
    site: Annotated[str | None, Parameter(help="Print each choice and refusal of one site, and write no file.")] = None,
) -> None:
    """Choose the fastest kernels that are accurate enough, from the survey in RUN; writes RUN/plan.json.

    Nothing is measured: plan again with other limits as often as you like.

    Example: loka measure run && loka plan run --goal serving --max-error 0.1
    """
    from loka.core.errors import InvalidInput
    from loka.core.record_file import id_in
    from loka.core.survey import Survey
    from loka.planner.plan import make_plan

    if keep == []:
        raise InvalidInput("--keep takes the names of sites or modules, or patterns of them, as the table shows them")
    if kernels == []:
        raise InvalidInput("--kernels takes the names of kernels, or patterns of them, as `loka kernels` lists them")
    survey = Survey.load(run)
    limits = {"max_error": max_error, "min_speedup": min_speedup}
    made = make_plan(survey, goal=goal, **limits, keep=keep or (), kernels=kernels)
    if site is not None:
        _print_site(_site(made, site), _conditions(made))
        return
    folder = file_in(run, "survey.json").parent
    path = made.save(folder)
    out = console()
    out.print(_table(made))
    for names, reason in grouped_reasons((s.site, None, s.reason) for s in made.sites if not made.document.moves(s)):
        out.print(Text.assemble(("high precision:", "bold"), f" {names}\n    {reason}"))
    out.print(f"{path}   {made.total}", soft_wrap=True)
    if survey.document.compiled:
        out.print("Times are those of a compiled model: serve it under torch.compile. Eager it may gain less, or lose.")
    if (there := id_in(folder)) and there != survey.document.record:
        other = f"The survey in {folder} was measured from a different record than the one there now"
        out.print(f"{other}. To measure the current record: loka measure {quote(str(folder))}", soft_wrap=True)
    in_code = f"loka.apply_plan(model, loka.Plan.load({str(folder)!r}))"
    out.print(f"Next: loka report {quote(str(folder))}, or in your code {in_code}", soft_wrap=True)
    training = f"loka train --model MODEL --plan {quote(str(path))} --steps 500"
    out.print(f"To train a built-in model by this plan: {training}", soft_wrap=True)
    out.print("To see why a site got its kernels: add --site NAME to this command", soft_wrap=True)


def _table(made: "Plan") -> Table:
    """A site a line, a role a column: its kernel and error; the site's time in a step and the speed-up."""
    roles = list(made.sites[0].kernels)
    table = plain_table(_conditions(made), ["site", "in×out", *roles, "µs a step", "was", "×"])
    for one in made.sites:
        times = [microseconds(one.time_us), microseconds(one.baseline_us), f"{one.speedup:.2f}"]
        table.add_row(one.site, f"{one.k}×{one.n}", *(_cell(made, one, role) for role in roles), *times)
    return table


def _cell(made: "Plan", one: "SitePlan", role: Role) -> str:
    choice = one.kernels[role]
    if choice.error is None:
        return "–" if choice.kernel == made.document.high_precision else choice.kernel
    name = choice.kernel if one.transform == "none" else f"{choice.kernel} {one.transform}"
    return f"{name} {choice.error.mean:.3f}"


def _site(made: "Plan", name: str) -> "SitePlan":
    from loka.core.registry import Registry

    sites: Registry[SitePlan] = Registry("site")
    for one in made.sites:
        sites.add(one.site, one)
    return sites.get(name)


def _conditions(made: "Plan") -> str:
    document = made.document
    error = document.max_error[Role.FPROP]  # --max-error is one for all roles
    limits = f"error at most {error:g}, speed-up at least {document.min_speedup:g}×, casts included"
    return f"Plan for {document.goal} on {document.environment.device}. Limits: {limits}"


def _print_site(one: "SitePlan", conditions: str) -> None:
    out = console()
    out.print(Text(conditions, "italic"))
    out.print(Text.assemble((one.site, "bold"), f" {one.k}×{one.n}: {one.reason}"))
    for role, choice in one.kernels.items():
        out.print(f"  {role}: {choice.kernel}: {choice.reason}", highlight=False)
    for names, reason in grouped_reasons((r.kernel, r.role, r.reason) for r in one.refused):
        out.print(f"  rejected {names}: {reason}", highlight=False)
