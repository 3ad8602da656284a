"""``loka report``: what a run came to, as a page, as text or as JSON."""

from shlex import quote
from typing import Annotated

import msgspec
from cyclopts import Parameter

from loka.cli.tables import console


def report(
    run: Annotated[str, Parameter(help="The folder of a run.")] = "run",
    *,
    text: Annotated[bool, Parameter(help="Print the essentials here and write no file.")] = False,
    json: Annotated[bool, Parameter(help="Print everything the page would show, as JSON, and write no file.")] = False,
) -> None:
    """Write RUN/report.html: one page that works offline, and says what is missing in a run that is not complete.

    Example: loka report run --text
    """
    from loka.report.page import gather_page
    from loka.report.run import read_run
    from loka.report.text import page_as_text
    from loka.report.write import write_report

    if json:
        print(msgspec.json.encode(gather_page(read_run(run))).decode())
    elif text:
        console().print(page_as_text(gather_page(read_run(run))))
    else:
        path = write_report(run)
        print(f"wrote {path}: open it in a browser  (here: loka report {quote(str(run))} --text)")
