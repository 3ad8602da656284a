"""The report's essentials for a terminal."""

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from loka.report.page_data import MissingPart, Page, PlanRow, Rejection, Tile
from loka.report.words import percent, times_faster, with_interval

MOST_ROWS = 40


def page_as_text(page: Page) -> RenderableType:
    """Headline, numbers, plan, refusals, findings and what is missing, as rich prints them."""
    return Group(*_parts(page))


def _parts(page: Page) -> Iterator[RenderableType]:
    yield Text(f"\n{page.headline}", style="bold")
    for sentence in page.summary:
        yield Text(sentence, style="dim")
    if page.tiles:
        yield _tiles(page.tiles)
    if page.plan:
        yield _plan(page.plan, page.goal)
    if page.rejected:
        yield _rejected(page.rejected)
    if page.findings:
        yield Text("Findings", style="bold")
        for finding in page.findings:
            where = f"{finding.site}: " if finding.site else ""
            yield Padding(Text(f"{where}{finding.message}. {finding.remedy}"), (0, 0, 0, 2))
    if page.missing:
        yield _missing(page.missing)


def _table(title: str, *columns: str) -> Table:
    """Columns that end in > are numbers, to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    return table


def _tiles(tiles: tuple[Tile, ...]) -> Table:
    table = Table.grid(padding=(0, 3))
    for tile in tiles:
        table.add_row(f"  {tile.label}", Text(tile.value, style="bold"), Text(tile.note, style="dim"))
    return table


def _plan(rows: tuple[PlanRow, ...], goal: str) -> Table:
    table = _table(f"\nThe plan for {goal}", "site", "role", "kernel", "error>", "speed-up>", "share of time>", "why")
    for row in sorted(rows, key=lambda row: -row.share)[:MOST_ROWS]:
        error = "–"
        if row.error is not None and row.error_low is not None and row.error_high is not None:
            error = with_interval(row.error, row.error_low, row.error_high)
        style = "" if row.is_low_precision else "dim"
        kernel = row.kernel + (f" + {row.transform}" if row.transform else "")
        table.add_row(row.site, row.role, kernel, error, times_faster(row.speedup), percent(row.share), row.reason, style=style)
    if len(rows) > MOST_ROWS:
        table.caption = f"and {len(rows) - MOST_ROWS} more rows with less of the time; --json has all"
    return table


def _rejected(rejections: tuple[Rejection, ...]) -> Table:
    table = _table("\nRejected", "kernels", "times>", "most often because")
    for rejection in rejections:
        table.add_row(", ".join(rejection.kernels), str(rejection.count), rejection.reasons[0].reason)
    return table


def _missing(parts: tuple[MissingPart, ...]) -> Table:
    table = _table("\nNot here yet", "part", "why", "made by")
    for part in parts:
        table.add_row(part.part, part.why, part.command)
    return table
