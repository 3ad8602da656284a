"""From a model in training to its plan: Probe, measure, plan, as a user would do it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import msgspec

from loka.core.gemm import SOURCES
from loka.core.plan import Goal
from loka.core.survey import CastTime, SiteSurvey, Survey
from loka.data.batch import Batch
from loka.measure.survey import measure
from loka.planner.plan import make_plan
from loka.probe.probe import Probe
from loka.train.paired import Run, dataset_of, prepare
from loka.train.precision import matmul_precision, resolve_device
from loka.train.trainer import Trainer

PROBE_SEED = 1_000_003  # of the runs that plans are made from: none of those that are compared
PROBED_STEPS, SAMPLES = 200, 10
EMULATED = ("reference.tensorwise", "reference.rowwise")  # what a plan on the CPU chooses from


def survey_model(
    trainer: Trainer, batches: Iterable[Batch], *, every: int, kernels: Sequence[str] | None = None, out: Path | None = None
) -> Survey:
    """Train on ``batches`` under a Probe that looks at one step in ``every``, then measure what it saw; kept in ``out``."""
    probe = Probe(trainer.model.dense_part, every=every)
    try:
        for batch in batches:
            with probe.step():
                trainer.step(batch)
        record = probe.record()
    finally:
        probe.detach()
    return measure(record, kernels=kernels, device=trainer.device, out=out)


def make_plan_for(run: Run, folder: Path) -> None:
    """Write the plan of a planned arm into ``folder``, unless it is there: from a run of its own, for all seeds alike.

    Whatever is accurate enough goes to 8 bits, in all its roles and whether it pays or not: the harder case for quality.
    """
    if (folder / "plan.json").exists():
        return
    config = replace(run.config, seed=PROBE_SEED)
    device = resolve_device(config.device, config.precision)
    data = dataset_of(config, device)
    steps = min(config.steps or PROBED_STEPS, PROBED_STEPS)
    with matmul_precision(config.precision):
        model, _ = prepare(replace(run, config=config, plan=None), data, device)
        batches = islice(data.train(config.batch_size), steps)
        kernels = EMULATED if device.type == "cpu" else None
        survey = survey_model(Trainer(model, config), batches, every=max(1, steps // SAMPLES), kernels=kernels)
    survey.save(folder)
    make_plan(as_if_8_bits_always_paid(survey), goal=Goal.TRAINING).save(folder)


def as_if_8_bits_always_paid(survey: Survey) -> Survey:
    """The survey with high precision a million times as slow, and emulated kernels, which nobody times, as fast as any."""
    sites = tuple(_site_as_if_8_bits_always_paid(site) for site in survey.sites)
    return Survey(msgspec.structs.replace(survey.document, sites=sites), survey.vectors)


def _site_as_if_8_bits_always_paid(site: SiteSurvey) -> SiteSurvey:
    measured = {m for c in site.candidates if c.kernel == site.baseline for m in c.gemm_us}
    candidates, casts = [], {(cast.tensor, cast.forms): cast for cast in site.casts}
    for candidate in site.candidates:
        times = {m: 1e6 * time_us for m, time_us in candidate.gemm_us.items()} if candidate.kernel == site.baseline else {}
        if not candidate.gemm_us and candidate.why_not is None:
            # One scale for all is the cheapest way wherever it is accurate enough.
            times = dict.fromkeys(measured, 1.0 if "tensorwise" in candidate.recipe else 2.0)
            for source, form in zip(SOURCES[candidate.role], candidate.forms, strict=True):
                casts.setdefault((source.tensor, (form,)), CastTime(source.tensor, (form,), dict.fromkeys(measured, 0.0)))
        candidates.append(msgspec.structs.replace(candidate, gemm_us=times or candidate.gemm_us))
    blocks = (
        msgspec.structs.replace(block, baseline_training_us={m: 1e6 * t for m, t in block.baseline_training_us.items()})
        for block in site.blocks
    )
    return msgspec.structs.replace(site, candidates=tuple(candidates), casts=tuple(casts.values()), blocks=tuple(blocks))
