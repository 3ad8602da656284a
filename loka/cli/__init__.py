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
from loka.cli.tables import PipedConsole
from loka.cli.train import train
from loka.core.errors import LokaError
from loka.core.progress import is_read

# As --help shows them: in the order they are used.
WORKFLOW = Group.create_ordered("Workflow")
OTHERS = Group.create_ordered("Other commands")
OPTIONS = Group.create_ordered("Options")

app = App(
    name="loka",
    help="Make 8-bit arithmetic practical for large recommendation models. Start with: loka demo",
    version=__version__,
    suppress_keyboard_interrupt=False,
    console=PipedConsole(),
)
app["--help"].group = app["--version"].group = OPTIONS
for order, command in enumerate((demo, probe, measure, plan, train, report)):
    app.command(command, group=WORKFLOW, sort_key=order)
app.command(kernels, group=OTHERS)
bench.app.group = OTHERS
app.command(bench.app)


def main() -> None:
    """Run the command line. A user's mistake or a full disk prints one message and exits with 1, never a traceback. SIGTERM
    stops it as Ctrl-C does: what was done so far is kept."""
    signal.signal(signal.SIGTERM, _interrupt)
    warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # twenty lines of C++, for a CPU without products in bf16
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no ×
    try:
        app()
    except SystemExit as done:
        if done.code:  # otherwise all went well, if the output was read
            raise
    except KeyboardInterrupt:  # in a command that does not say itself how to continue
        print("\nstopped: run the same command again to continue with the rest", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except (LokaError, OSError) as error:
        if not isinstance(error, BrokenPipeError) or is_read(sys.stdout):  # otherwise nobody reads the message
            print(f"loka: {error}", file=sys.stderr)
            sys.exit(1)
    finally:
        was_read = _flush()
    if not was_read:
        sys.exit(128 + signal.SIGPIPE)


def _flush() -> bool:
    """Write what is left of the output, and return whether somebody reads it. If nobody does, keep Python from trying again."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return is_read(sys.stdout)


def _interrupt(signal_number: int, frame: object) -> None:
    raise KeyboardInterrupt
