"""``loka demo``: everything LoKA does, on a model and data of its own."""

import os
import sys
import time
from shlex import quote
from typing import Annotated

from cyclopts import Parameter


def demo(
    *,
    out: Annotated[str, Parameter(name=["--out", "-o"], help="Folder of the run.")] = "run",
    device: Annotated[str, Parameter(help="cpu, cuda, or auto: the GPU where there is one.")] = "auto",
) -> None:
    """Train a model under the Probe, measure, plan, train on, serve, and compare with its high-precision twin.

    A few minutes on two CPU cores (INT8) or one GPU (FP8); ends with OUT/report.html. If interrupted, run the same command
    again to continue from the last checkpoint.

    Example: loka demo -o run
    """
    from dataclasses import replace

    from loka.core import progress as pieces
    from loka.kernels.device import device_named
    from loka.report.headline import headline
    from loka.report.run import read_run
    from loka.report.write import write_report
    from loka.train import progress as steps
    from loka.train.demo import Stage, has_begun, run_demo
    from loka.train.demo_settings import settings_for

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch's profiler would print when it starts and stops
    where = device_named(device)
    begin = time.monotonic()
    stage = Stage(lambda line: print(line, flush=True), steps.for_this_output, pieces.for_this_output)
    try:
        run_demo(replace(settings_for(where), device=str(where)), out, stage)
    except KeyboardInterrupt:
        again = f"`loka demo -o {quote(out)}{'' if device == 'auto' else f' --device {quote(device)}'}`"
        starts_over = f"{again} starts over, because there is no checkpoint yet"
        print(f"\nstopped: {f'run {again} to continue where it stopped' if has_begun(out) else starts_over}", file=sys.stderr)
        sys.exit(130)
    path = write_report(out)
    print(f"\n{headline(read_run(out))}  ({time.monotonic() - begin:.0f} s)")
    print(f"{path}: open it in a browser")
    print(f"Next: loka report {quote(str(out))} --text, or your own model: docs/bring-your-own-model.md")
