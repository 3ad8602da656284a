"""``write_report``: a run's folder as one page."""

from pathlib import Path

from loka.core.files import atomic_write
from loka.report.page import gather_page, render_page
from loka.report.run import read_run


def write_report(run: str | Path) -> Path:
    """Write ``run/report.html`` from what the folder holds, and return its path.

    It is one file that works offline. If the run is not complete, it says what is missing and which command makes that.
    """
    path = Path(run) / "report.html"
    page = gather_page(read_run(run))
    atomic_write(path, render_page(page))
    return path
