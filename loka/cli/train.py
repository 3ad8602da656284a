"""``loka train``: train one of the built-in models on generated or real clicks."""

import math
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

from loka.train.config import Option, TrainConfig

if TYPE_CHECKING:
    from loka.train.loop import TrainResult


def train(
    config: Annotated[TrainConfig, Parameter(name="*", consume_multiple=1)],
    *,
    resume: bool = False,
    skip_bad_rows: bool = False,
) -> None:
    """Train a model and score it on held-out examples.

    Example: loka train --model wukong --steps 500 --out run

    Parameters
    ----------
    resume
        Continue the run in --out from its newest checkpoint.
    skip_bad_rows
        Count malformed rows of the data instead of stopping at the first.
    """
    from loka.train.loop import train as run
    from loka.train.progress import for_this_output

    config = replace(config, model_options={name: _value(text) for name, text in config.model_options.items()})
    if skip_bad_rows:
        config = replace(config, data_options={**config.data_options, "skip_bad_rows": True})
    try:
        result = run(config, resume=resume, progress=for_this_output())
    except KeyboardInterrupt:
        print(f"\nstopped: {_how_to_go_on(config)}", file=sys.stderr)
        sys.exit(130)
    _print_summary(config, result)


def _how_to_go_on(config: TrainConfig) -> str:
    from loka.train.checkpoint import list_checkpoints
    from loka.train.run_folder import RunFolder

    if list_checkpoints(RunFolder(config.out or "run").checkpoints):
        return f"continue from the newest checkpoint in {config.out} with --resume"
    return f"no checkpoint in {config.out} yet (--checkpoint-every {config.checkpoint_every}): --resume starts over"


def _applied(result: "TrainResult") -> str:
    from loka.dispatch.swap import applied_to

    applied = applied_to(result.model.dense_part) or applied_to(result.model)
    assert applied is not None
    calls = applied.high_precision_calls()
    if not calls:
        return str(applied)
    why = "because their kernels could not take that number of rows"
    return f"{applied}; {sum(calls.values()):,} calls ran in high precision, {why}"


def _value(text: Option) -> Option:
    """A model's option, parsed: a number, a tuple written as ``[64,32]``, or text."""
    try:
        return msgspec.json.decode(str(text), type=int | float | tuple[int, ...])
    except msgspec.DecodeError:
        return text


def _print_summary(config: TrainConfig, result: "TrainResult") -> None:
    test = result.test
    best = "" if math.isnan(test.best_ne) else f" (best possible {test.best_ne:.4f})"
    print(f"\n{config.model} {config.preset}, {result.steps:,} steps, on {test.examples:,} held-out examples of {config.data}:")
    print(f"  log-loss {test.log_loss:.4f}  NE {test.ne:.4f}{best}  AUC {test.auc:.4f}  calibration {test.calibration:.3f}")
    if result.bad_rows:
        print(f"  {result.bad_rows:,} malformed rows were left out")
    if config.plan:
        print(f"  by {config.plan}: {_applied(result)}")
    print(f"  {config.out}/metrics.jsonl  {config.out}/summary.json  {config.out}/checkpoints/")
    if not config.decay_steps:  # with it, a longer run would begin the decay elsewhere
        print(f"To continue training: the same command with --resume and --steps above {result.steps}")
