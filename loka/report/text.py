"""The report's essentials for a terminal."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from loka.report.page_data import MissingPart, Page, PlanRow, Rejection, Tile
from loka.report.words import percent, times_faster, with_interval

MOST_ROWS = 40
WIDE = 140  # columns: in fewer, reasons stand below the plan's table and not in it


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
        yield _PlanTable(page.plan, page.goal)
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
    """A table; columns whose title ends in > hold numbers, aligned to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    return table


def _tiles(tiles: tuple[Tile, ...]) -> Table:
    table = Table.grid(padding=(0, 3))
    for tile in tiles:
        table.add_row(f"  {tile.label}", Text(tile.value, style="bold"), Text(tile.note, style="dim"))
    return table


@dataclass(frozen=True)
class _PlanTable:
    """The rows with the largest shares of the time, and their reasons: in a column if there is room, otherwise below."""

    rows: tuple[PlanRow, ...]
    goal: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        is_wide = options.max_width >= WIDE
        columns = ("site", "role", "kernel", "error>", "speed-up>", "of time>", *(("why",) if is_wide else ()))
        table = _table(f"\nThe plan for {self.goal}", *columns)
        shown = sorted(self.rows, key=lambda row: -row.share)[:MOST_ROWS]
        for row in shown:
            style = "" if row.is_low_precision else "dim"
            table.add_row(*_cells(row), *((row.reason,) if is_wide else ()), style=style)
        if len(self.rows) > MOST_ROWS:
            table.caption = f"and {len(self.rows) - MOST_ROWS} more rows with less of the time; --json has all"
        yield table
        if not is_wide:
            named: dict[str, list[str]] = {}
            for row in shown:
                named.setdefault(row.reason, []).append(f"{row.site} {row.role}")
            for reason, names in named.items():
                yield Padding(Text(f"{', '.join(names)}: {reason}"), (0, 0, 0, 2))


def _cells(row: PlanRow) -> tuple[str, ...]:
    error = "–"
    if row.error is not None and row.error_low is not None and row.error_high is not None:
        error = with_interval(row.error, row.error_low, row.error_high)
    kernel = row.kernel + (f" + {row.transform}" if row.transform else "")
    return row.site, row.role, kernel, error, times_faster(row.speedup), percent(row.share)


def _rejected(rejections: tuple[Rejection, ...]) -> Table:
    table = _table("\nRejected", "kernels", "times>", "most frequent reason")
    for rejection in rejections:
        table.add_row(", ".join(rejection.kernels), str(rejection.count), rejection.reasons[0].reason)
    return table


def _missing(parts: tuple[MissingPart, ...]) -> Table:
    table = _table("\nMissing from this run", "part", "why", "command")
    for part in parts:
        table.add_row(part.part, part.why, part.command)
    return table
