"""Features that say nothing: always zero, or always the same; and outputs that nothing is learned from."""

from collections.abc import Mapping

from loka.core.moments import variance_of
from loka.core.recipe import Transform
from loka.core.site_record import SiteRecord
from loka.probe.findings.contract import FINDINGS, Found

SHARE = 0.05
LEAST_ROWS = 100
CONSTANT = 1e-4  # deviation to mean: less than bf16 would show


@FINDINGS.register("idle_features")
class IdleFeatures:
    """Dead (zero in every row) and saturated (stuck at a value) features of x; outputs whose gradient is always zero."""

    def find(self, site: SiteRecord, sites: Mapping[str, SiteRecord]) -> Found | None:
        moments = site.statistics["moments"].tensors
        if moments["count"] < LEAST_ROWS:
            return None
        deviation_D, mean_D = variance_of(moments).sqrt(), moments["mean_D"].abs()
        zero_D = (deviation_D == 0) & (mean_D == 0)
        stuck_D = ~zero_D & (deviation_D <= CONSTANT * mean_D)
        dead, saturated, deaf = (int(flags.sum()) for flags in (zero_D[: site.k], stuck_D[: site.k], zero_D[site.k : -1]))
        parts = [
            f"{count} of {size} {what}"
            for count, size, what in (
                (dead, site.k, "features of x are always zero"),
                (saturated, site.k, "features of x never change"),
                (deaf, site.n, "outputs get no gradient"),
            )
            if count >= SHARE * size
        ]
        if not parts:
            return None
        numbers = {"dead_features": dead, "saturated_features": saturated, "outputs_without_gradient": deaf}
        # A value that never changes is a mean, which ``center`` takes out of the cast.
        remedy = Transform.CENTER.value if saturated >= SHARE * site.k else None
        return Found("; ".join(parts), {name: float(count) for name, count in numbers.items()}, remedy)
