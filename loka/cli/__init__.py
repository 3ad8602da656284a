"""The command line: every command is a thin call of the library, and imports torch when it runs, not before."""

import io
import os
import signal
import sys
import warnings

from cyclopts import App, Group

from loka import __version__
from loka.cli import bench
from loka.cli.demo import demo
from loka.cli.kernels import kernels
from loka.cli.measure import measure
from loka.cli.plan import plan
from loka.cli.probe import probe
from loka.cli.report import report
from loka.cli.train import train
from loka.core.errors import LokaError

# As --help shows them: in the order they are used.
FLOW = Group.create_ordered("From a model to its plan")
BESIDE = Group.create_ordered("Beside it")
OPTIONS = Group.create_ordered("Options")

app = App(
    name="loka",
    help="Make 8-bit arithmetic practical for large recommendation models. Start with: loka demo",
    version=__version__,
)
app["--help"].group = app["--version"].group = OPTIONS
for order, command in enumerate((demo, probe, measure, plan, train, report)):
    app.command(command, group=FLOW, sort_key=order)
app.command(kernels, group=BESIDE)
bench.app.group = BESIDE
app.command(bench.app)


def main() -> None:
    """Run the command line; a user's mistake or a full disk prints one message and exits with 1, never a traceback. Asked to
    end, by SIGTERM, it stops as by Ctrl-C: what was done so far is kept."""
    signal.signal(signal.SIGTERM, _interrupt)
    warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # twenty lines of C++, for a CPU without products in bf16
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no ×
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has enough, and nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would tell, when it writes what is left
        sys.exit(128 + signal.SIGPIPE)
    except (LokaError, OSError) as error:
        print(f"loka: {error}", file=sys.stderr)
        sys.exit(1)


def _interrupt(signal_number: int, frame: object) -> None:
    raise KeyboardInterrupt
