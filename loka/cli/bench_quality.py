"""``loka bench quality``: what low precision does to log-loss, on paired runs."""

from typing import Annotated

from cyclopts import Parameter

from loka.cli.gathering import Out, Results, gathered_results, refuse_empty
from loka.core.errors import require_count


def quality(
    *,
    settings: Annotated[
        list[str] | None,
        Parameter(help="Data, model and schedule; those whose data is at hand if not given.", consume_multiple=True),
    ] = None,
    arms: Annotated[list[str], Parameter(help="What is compared.", consume_multiple=True)] = [  # noqa: B006 (never changed)
        "fp32",
        "bf16",
        "naive",
        "mods",
        "loka",
    ],
    seeds: Annotated[list[int] | None, Parameter(help="0 to 7 if not given.", consume_multiple=True)] = None,
    movielens: Annotated[str | None, Parameter(help="Folder of MovieLens-1M.")] = None,
    criteo: Annotated[str | None, Parameter(help="TSV of the Criteo Display Advertising set.")] = None,
    model: Annotated[str | None, Parameter(help="Overrides the setting's model (Wukong).")] = None,
    preset: Annotated[str | None, Parameter(help="Overrides the setting's preset (small).")] = None,
    steps: Annotated[int | None, Parameter(help="Overrides the setting's steps (one epoch, or 20 M examples).")] = None,
    batch_size: Annotated[int | None, Parameter(help="Overrides the setting's batch size.")] = None,
    kernels: Annotated[
        list[str] | None, Parameter(help="To plan from, beside blocks; all if not given.", consume_multiple=True)
    ] = None,
    device: Annotated[str, Parameter(help="cpu, cuda, or auto: the GPU where there is one.")] = "auto",
    parallel: Annotated[int, Parameter(help="Runs at once: small models leave a GPU idle between launches.")] = 1,
    budget_s: Annotated[float, Parameter(help="Start no run after this many seconds.")] = float("inf"),
    out: Out = "benchmarks/results",
    results: Results = None,
) -> None:
    """Train arms on the same batches from the same weights and compare their held-out log-loss, seed by seed.

    Runs already in the results file are not repeated: call it again to add seeds, arms and settings.

    Example: loka bench quality --settings criteo-raw criteo-log --criteo train.txt --arms fp32 naive loka --preset tiny
    """
    from loka.kernels.contract import KERNELS
    from loka.kernels.device import device_named
    from loka.train.quality_bench import Campaign, make_table, run_campaign, write_report
    from loka.train.quality_settings import SETTINGS

    refuse_empty(settings=settings, arms=arms, seeds=seeds, kernels=kernels)
    require_count("--parallel", parallel)
    where = device_named(device)
    for kernel in kernels or ():
        KERNELS.get(kernel)  # an unknown one is refused here, before hours of training
    paths = {name: path for name, path in (("movielens", movielens), ("criteo", criteo)) if path}
    at_hand = [name for name, config in SETTINGS.items() if config.data == "synthetic" or config.data in paths]
    given = {"model": model, "preset": preset, "steps": steps, "batch_size": batch_size}
    campaign = Campaign(
        settings=settings or at_hand,
        arms=arms,
        seeds=range(8) if seeds is None else seeds,
        device_type=where.type,
        paths=paths,
        overrides={name: value for name, value in given.items() if value is not None},
        kernels=kernels,
    )
    gathered = gathered_results("quality", where, out, results)
    run_campaign(campaign, gathered, parallel=parallel, budget_s=budget_s, say=lambda line: print(line, flush=True))
    if gathered.rows:
        files = write_report(gathered)
        print(make_table(gathered))
        print("\n".join(f"wrote {path}" for path in files))
