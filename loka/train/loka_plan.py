"""From a model in training to its plan, as a user would do it: Probe, measure, plan, check."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import msgspec
import torch.nn.functional as F
from torch import Tensor, nn

from loka.core.gemm import SOURCES, Role
from loka.core.plan import Goal, Plan
from loka.core.record import Record
from loka.core.survey import CastTime, SiteSurvey, Survey
from loka.data.batch import Batch
from loka.dispatch.check import check_plan
from loka.measure.survey import measure
from loka.models.recommender import Recommender
from loka.planner.plan import make_plan
from loka.probe.probe import Probe
from loka.train.config import Precision
from loka.train.paired import Run, dataset_of, example_of, prepare
from loka.train.precision import autocast, matmul_precision, resolve_device
from loka.train.trainer import Trainer

PROBE_SEED = 1_000_003  # of the runs that plans are made from, which are none of those compared
PROBED_STEPS, SAMPLES = 200, 10
LEAST_CHECKED, CHECKED_EXAMPLES = 4, 16_384  # batches at least, and examples, of the joint check
EMULATED = ("reference.tensorwise", "reference.rowwise", "reference.int8_rowwise")  # what a plan on the CPU chooses from


def record_run(trainer: Trainer, batches: Iterable[Batch], *, every: int) -> Record:
    """Train on ``batches`` under a Probe that looks at one step in ``every``."""
    probe = Probe(trainer.model.dense_part, every=every)
    try:
        for batch in batches:
            with probe.step():
                trainer.step(batch)
        return probe.record()
    finally:
        probe.detach()


def make_plan_for(run: Run, folder: Path, *, kernels: Sequence[str] | None = None) -> str:
    """Write the plan of a planned arm into ``folder``, and return a line about it. It is made from a run of its own, for all
    seeds alike, and chooses from ``kernels`` and blocks; by default from all kernels, on the CPU from those that emulate 8
    bits.

    Whatever is accurate enough goes to 8 bits, in all its roles and whether it pays or not: the harder case for quality. If the
    arm has a joint check, it is made at the end of the run, on batches kept for it, since what rounding costs grows as a model
    learns.
    """
    config = replace(run.config, seed=PROBE_SEED)
    device = resolve_device(config.device, config.precision)
    data = dataset_of(config, device)
    total = config.steps or data.batches_per_epoch(config.batch_size) or PROBED_STEPS
    steps = min(total, PROBED_STEPS)
    with matmul_precision(config.precision):
        model, _ = prepare(replace(run, config=config, plan=None), data, device)
        batches = data.train(config.batch_size)
        kernels = kernels or (EMULATED if device.type == "cpu" else None)
        trainer = Trainer(model, config)
        record = record_run(trainer, islice(batches, steps), every=max(1, steps // SAMPLES))
        survey = measure(record, kernels=kernels, device=device)
        survey.save(folder)
        if run.arm.roles:
            survey = only_in_roles(survey, run.arm.roles)
        plan = make_plan(as_if_8_bits_always_paid(survey), goal=Goal.TRAINING)
        words = f"{sum(site.is_low_precision for site in plan.sites)} sites in low precision, unchecked"
        if run.arm.is_checked:
            n_kept = max(LEAST_CHECKED, CHECKED_EXAMPLES // config.batch_size)
            for batch in islice(batches, max(0, total - steps - n_kept)):
                trainer.step(batch)
            kept, loss = list(islice(batches, n_kept)), log_loss_of(model, config.precision)
            example = example_of(model, data, config.batch_size)
            checked = check_plan(model.dense_part, plan, kept, loss=loss, min_speedup=0.0, repeats=1, example=example)
            plan, words = checked.plan, str(checked)
    plan.save(folder)
    return f"{words}; {_rounded(plan)}"


def _rounded(plan: Plan) -> str:
    """How much of the plan is in 8 bits: products for which no kernel was accurate enough, or given, are not."""
    roles = [site.block is not None or choice.error is not None for site in plan.sites for choice in site.kernels.values()]
    return f"{sum(roles)} of {len(roles)} products in 8 bits"


def log_loss_of(model: Recommender, precision: Precision) -> Callable[[nn.Module, Batch], Tensor]:
    """The loss for ``check_plan`` of a model's dense part: that of the whole model."""

    def loss(dense_part: nn.Module, batch: Batch) -> Tensor:
        with autocast(precision, batch.label_B.device):
            logits_B = model(batch)
        return F.binary_cross_entropy_with_logits(logits_B.double(), batch.label_B.double())

    return loss


def only_in_roles(survey: Survey, roles: Collection[str]) -> Survey:
    """The survey without the 8-bit kernels of other roles, and without blocks, which would run all roles."""
    sites = tuple(
        msgspec.structs.replace(
            site, candidates=tuple(c for c in site.candidates if c.role in roles or c.kernel == site.baseline), blocks=()
        )
        for site in survey.sites
    )
    return Survey(msgspec.structs.replace(survey.document, sites=sites), survey.vectors)


def as_if_8_bits_always_paid(survey: Survey) -> Survey:
    """The survey with high precision a million times as slow, and with times of 1 or 2 µs for emulated kernels, which nobody
    times."""
    sites = tuple(_site_as_if_8_bits_always_paid(site) for site in survey.sites)
    return Survey(msgspec.structs.replace(survey.document, sites=sites), survey.vectors)


def _site_as_if_8_bits_always_paid(site: SiteSurvey) -> SiteSurvey:
    measured = {m for c in site.candidates if c.kernel == site.baseline for m in c.gemm_us}
    candidates, casts = [], {(cast.tensor, cast.forms): cast for cast in site.casts}
    for candidate in site.candidates:
        if candidate.kernel == "reference.int8_rowwise" and candidate.role is not Role.FPROP:
            continue  # as on a GPU: gradients span too many binades
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
