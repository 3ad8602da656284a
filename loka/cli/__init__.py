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
app.command("loka.cli.kernels:kernels")
app.command("loka.cli.train:train")


def main() -> None:
    """Run the command line; a user's mistake prints one message and exits with 1, never a traceback."""
    try:
        app()
    except LokaError as error:
        print(f"loka: {error}", file=sys.stderr)
        sys.exit(1)
