"""``loka bench model``: whole models, each arm beside compiled bf16."""

import time
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from loka.cli.gathering import Out, Results, finish, gathered_results, refuse_empty

NOTES = (
    "Speed-ups are ratios of medians over steps taken in turn with the baseline; on a GPU the dense part is "
    "compiled and the whole replayed as a CUDA graph (* launched by the host instead; – could not run). Speed-up at most: "
    "GEMMs at twice the speed, norms and activations for nothing (Amdahl)."
)


def model(
    *,
    models: Annotated[list[str] | None, Parameter(help="All four if not given.", consume_multiple=True)] = None,
    presets: Annotated[list[str] | None, Parameter(help="base and large if not given.", consume_multiple=True)] = None,
    batch_sizes: Annotated[list[int] | None, Parameter(help="2048 6144 12288 if not given.", consume_multiple=True)] = None,
    goals: Annotated[
        list[Literal["training", "serving"]] | None, Parameter(help="Both if not given.", consume_multiple=True)
    ] = None,
    arms: Annotated[list[str] | None, Parameter(help="Ways to run a model; all if not given.", consume_multiple=True)] = None,
    device: Annotated[str, Parameter(help="cpu, cuda, or auto: the GPU where there is one.")] = "auto",
    timed_steps: Annotated[int, Parameter(help="Steps of each arm that are timed.")] = 20,
    budget_s: Annotated[
        float, Parameter(help="Start no new arm (with --workers: no new group) after this many seconds.")
    ] = float("inf"),
    kernels: Annotated[
        list[str] | None, Parameter(help="To plan from, beside blocks; all if not given.", consume_multiple=True)
    ] = None,
    workers: Annotated[
        int,
        Parameter(
            help="Arms made ready in parallel, each using its own memory, beside a baseline for each of their models and batch "
            "sizes; 0 runs them one after another in this process."
        ),
    ] = 0,
    surveys: Annotated[Path | None, Parameter(help="Folder for surveys; surveys already there are reused.")] = None,
    retry_failed: Annotated[bool, Parameter(help="Try again what could not run in an earlier call.")] = False,
    out: Out = "benchmarks/results",
    results: Results = None,
) -> None:
    """Time whole training steps and serving calls: compiled fp32, tf32 and bf16, torchao, FBGEMM, LoKA with and without Mods.

    What is in the results file is not measured again: call it again for the rest.

    Example: loka bench model --models wukong --presets base --batch-sizes 2048 --arms loka torchao.rowwise
    """
    from loka.core.errors import UnknownName, require_count
    from loka.core.plan import Goal
    from loka.kernels.contract import KERNELS
    from loka.kernels.device import device_named
    from loka.models.registry import MODELS
    from loka.train.model_arms import ARMS, ModelArm
    from loka.train.model_bench import Cell, ModelBench
    from loka.train.model_crew import measure_side_by_side
    from loka.train.model_tables import make_tables

    refuse_empty(models=models, presets=presets, batch_sizes=batch_sizes, goals=goals, arms=arms, kernels=kernels)
    require_count("--timed-steps", timed_steps)
    where = device_named(device)
    wanted = arms or list(ARMS)
    if unknown := [name for name in wanted if name not in ARMS]:
        raise UnknownName(f"no arm is called {unknown[0]!r}. Known: {', '.join(ARMS)}")
    for kernel in kernels or ():
        KERNELS.get(kernel)  # an unknown one is refused here, not written down as the failure of an arm
    gathered = gathered_results("model", where, out, results)
    bench = ModelBench(where, timed_steps=timed_steps, surveys=surveys, kernels=kernels)
    begin = time.monotonic()
    cells = [
        Cell(name, preset, batch_size, Goal(goal))
        for preset in presets or ["base", "large"]
        for batch_size in batch_sizes or [2048, 6144, 12288]
        for name in models or MODELS.names()
        for goal in goals or list(Goal)
    ]
    lacking: dict[Cell, list[ModelArm]] = {}
    for cell in cells:
        rows = {arm: gathered.rows.get(f"{cell}/{arm}") for arm in wanted}
        if missing := [arm for arm, row in rows.items() if row is None or (retry_failed and "failed" in row)]:
            lacking[cell] = [ARMS[arm] for arm in missing]

    def is_late() -> bool:
        return time.monotonic() - begin > budget_s

    measured = (
        measure_side_by_side(bench, lacking, workers=workers, budget_s=budget_s)
        if workers
        else ((cell, arm, row) for cell, others in lacking.items() if not is_late() for arm, row in bench.measure(cell, others))
    )
    try:
        for cell, arm, row in measured:
            about = {"model": cell.model, "preset": cell.preset, "batch_size": cell.batch_size, "goal": cell.goal, "arm": arm}
            gathered.add(f"{cell}/{arm}", about | row)
            told = f"failed: {row['failed']}" if "failed" in row else f"{row['speedup']:.2f}× as fast as bf16"
            print(f"{cell}/{arm}: {told}, after {time.monotonic() - begin:.0f} s", flush=True)
            if not workers and is_late():
                break
        if is_late():
            print("the time budget is spent: the same call again measures what is left")
    finally:  # whatever ended it: what was measured is told
        if gathered.rows:
            finish(gathered, f"{NOTES}\n\n{make_tables(gathered)}")
