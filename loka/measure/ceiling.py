"""The ceiling: how much of a training step lies in the sites at all, before anything is made faster (Amdahl)."""

from loka.core.environment import Environment
from loka.core.record import Record
from loka.core.site_record import SiteRecord
from loka.core.survey import Ceiling
from loka.measure.parts import Option
from loka.measure.site_survey import row_counts
from loka.measure.speed import Speeds, TimedShape


def measure_ceiling(record: Record, speeds: Speeds, baseline: str, environment: Environment) -> Ceiling | None:
    """The baseline's products of all sites in a step; None where no step of this model was timed on this machine."""
    if record.step_us is None or record.environment.device != environment.device:
        return None
    sites_us = sum(_step_us(site, speeds, baseline, record) for site in record.sites.values())
    return Ceiling(record.step_us, sites_us, record.uncovered)


def describe_ceiling(ceiling: Ceiling | None, record: Record) -> str:
    """What LoKA can reach and what it cannot, in a sentence or two."""
    uncovered = f" Not covered: {', '.join(record.uncovered)}." if record.uncovered else ""
    if ceiling is None:
        why = "was not timed" if record.step_us is None else f"was timed on {record.environment.device}, not here"
        return f"{len(record.sites)} sites. A step of the model {why}, so their share in it is not known.{uncovered}"
    covered = ceiling.covered
    best = f"were they free, it would be {1 / (1 - covered):.2f} times as fast" if covered < 1 else "all there is"
    share = f"{ceiling.sites_us / 1e3:.3g} of {ceiling.step_us / 1e3:.3g} ms"
    return f"{len(record.sites)} sites hold {covered:.0%} of a step ({share}): {best}.{uncovered}"


def _step_us(site: SiteRecord, speeds: Speeds, baseline: str, record: Record) -> float:
    if not site.was_called or not site.calls:
        return 0.0
    measured = row_counts(site)
    options = [Option(baseline, role) for role in site.roles]
    by_rows = {m: speeds.products_us(options, TimedShape.of(site, m, record.dtype)) for m in measured}
    total = 0.0
    for m, calls in site.calls.items():
        times = by_rows[min(rows for rows in measured if rows >= m)]  # the largest that was seen is measured
        total += calls * sum(time for time in times.values() if not isinstance(time, str))
    return total
