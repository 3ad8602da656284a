"""The command line: every command is a thin call of the library. Commands are imported when they run, not before."""

import sys

from cyclopts import App

from loka import __version__
from loka.core.errors import LokaError

app = App(
    name="loka",
    help="Make 8-bit arithmetic practical for large recommendation models.",
    version=__version__,
)
app.command("loka.cli.demo:demo", help="Everything in one go, on a model and data of its own; ends with a report.")
app.command("loka.cli.kernels:kernels", help="List kernels, what runs here and why not; measure them at a shape.")
app.command("loka.cli.train:train", help="Train a built-in model and score it on held-out examples.")
app.command("loka.cli.measure:measure", help="Measure every kernel at every site of a run's record: error and time.")
app.command("loka.cli.plan:plan", help="Choose from a run's survey the fastest kernels that are accurate enough.")
app.command("loka.cli.report:report", help="Write a run's report: one page that works offline; --text prints it here.")
app.command("loka.cli.bench:app", name="bench", help="Measure, print a table, and write it with hardware, versions and date.")


def main() -> None:
    """Run the command line; a user's mistake prints one message and exits with 1, never a traceback."""
    try:
        app()
    except LokaError as error:
        print(f"loka: {error}", file=sys.stderr)
        sys.exit(1)
