"""The ceiling: how much of a training step lies in the sites at all, before anything is made faster (Amdahl)."""

from collections.abc import Iterable, Mapping

import msgspec

from loka.core.environment import Environment
from loka.core.gemm import stand_in
from loka.core.record import Record
from loka.core.site_record import SiteRecord
from loka.core.survey import BlockCandidate, Ceiling, SiteSurvey
from loka.measure.parts import Option
from loka.measure.site_survey import row_counts
from loka.measure.speed import Speeds, TimedShape


def measure_ceiling(record: Record, speeds: Speeds, baseline: str, environment: Environment) -> Ceiling | None:
    """The baseline's products of all sites in a step; None where no step of this model was timed on this machine."""
    if record.step_us is None or record.environment.device != environment.device:
        return None
    sites_us = sum(_step_us(site, speeds, baseline, record) for site in record.sites.values())
    return Ceiling(record.step_us, sites_us, record.uncovered)


def with_blocks(ceiling: Ceiling | None, sites: Iterable[SiteSurvey]) -> Ceiling | None:
    """The ceiling once blocks are measured: they take over norms and activations too, which then are in reach as well."""
    if ceiling is None:
        return None
    return msgspec.structs.replace(ceiling, sites_us=ceiling.sites_us + sum(map(_absorbed_us, sites)))


def describe_ceiling(ceiling: Ceiling | None, record: Record) -> str:
    """What LoKA can reach and what it cannot, in a sentence or two."""
    uncovered = f" Not covered: {', '.join(record.uncovered)}." if record.uncovered else ""
    if ceiling is None:
        why = "was not timed" if record.step_us is None else f"was timed on {record.environment.device}, not here"
        return f"{len(record.sites)} sites. A step of the model {why}, so their share in it is not known.{uncovered}"
    covered = ceiling.covered
    sites_ms, step_ms = f"{ceiling.sites_us / 1e3:.3g}", f"{ceiling.step_us / 1e3:.3g} ms"
    if covered >= 1:
        alone = f"the GEMMs of {len(record.sites)} sites, each timed by itself, take {sites_ms} ms together"
        return f"{alone}, and a whole step took {step_ms}: their share in it is not known.{uncovered}"
    best = f"were they free, it would be {1 / (1 - covered):.2f} times as fast"
    return f"the GEMMs of {len(record.sites)} sites take {covered:.0%} of a step ({sites_ms} of {step_ms}): {best}.{uncovered}"


def _absorbed_us(site: SiteSurvey) -> float:
    """The norms and activations that the site's largest able block runs in a training step."""
    able = [block for block in site.blocks if block.why_not is None]
    return max((_epilogues_us(block, site.calls) for block in able), default=0.0)


def _epilogues_us(block: BlockCandidate, calls: Mapping[int, float]) -> float:
    parts = (block.epilogue_training_us, block.entry_baseline_training_us)
    return sum(count * times[stand_in(m, times)] for times in parts if times for m, count in calls.items())


def _step_us(site: SiteRecord, speeds: Speeds, baseline: str, record: Record) -> float:
    if not site.was_called or not site.calls:
        return 0.0
    measured = row_counts(site)
    options = [Option(baseline, role) for role in site.roles]
    by_rows = {m: speeds.products_us(options, TimedShape.of(site, m, record.dtype, compiled=speeds.compiled)) for m in measured}
    total = 0.0
    for m, calls in site.calls.items():
        times = by_rows[stand_in(m, measured)]
        total += calls * sum(time for time in times.values() if not isinstance(time, str))
    return total
