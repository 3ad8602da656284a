"""What several commands print alike: plain tables, times, and reasons each told once."""

import sys
from collections.abc import Iterable
from typing import NoReturn

from rich import box
from rich.console import Console
from rich.table import Table

from loka.core.gemm import Role
from loka.core.progress import is_terminal

TEXT_COLUMNS = ("site", "block", "notes", "kernel", "role", "roles", "operands (a·b)", *Role)


def plain_table(title: str, columns: list[str]) -> Table:
    """A table without frames. Text is to the left, and folded if the table is too wide; numbers are to the right and whole."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        is_text = column in TEXT_COLUMNS
        table.add_column(column, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    return table


class PipedConsole(Console):
    """Where nobody reads on, the command line ends as other programs do; rich would end with an error."""

    def on_broken_pipe(self) -> NoReturn:
        raise


def console() -> Console:
    """Standard output; if it is no terminal, wide enough for whole tables. Brackets are text, as in a pattern, not markup."""
    return PipedConsole(width=None if is_terminal(sys.stdout) else 200, markup=False)


def microseconds(time_us: float) -> str:
    return f"{time_us:.1f}" if time_us < 1000 else f"{time_us:,.0f}"


def grouped_reasons(refusals: Iterable[tuple[str, Role | None, str]]) -> list[tuple[str, str]]:
    """(kernels, reason) with each reason once. A kernel's roles are named if the reason does not hold for all of them."""
    roles: dict[tuple[str, str], set[Role | None]] = {}
    for kernel, role, reason in refusals:
        roles.setdefault((reason, kernel), set()).add(role)
    kernels: dict[str, list[str]] = {}
    for (reason, kernel), refused in roles.items():
        some = sorted(role for role in refused if role is not None)
        named = f"{kernel} ({', '.join(some)})" if 0 < len(some) < len(Role) else kernel
        kernels.setdefault(reason, []).append(named)
    return [(", ".join(names), reason) for reason, names in kernels.items()]
