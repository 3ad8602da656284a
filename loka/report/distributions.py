"""Each site's learned values by binade, and where an 8-bit format keeps, coarsens or flushes them."""

import math
from typing import TYPE_CHECKING

from loka.core.gemm import Role
from loka.core.plan import PlanDocument, SitePlan
from loka.core.recipe import Format
from loka.core.record import Record
from loka.report.page_data import FormatRange, Histogram, SiteDistribution

if TYPE_CHECKING:
    from torch import Tensor

INT8_COARSE = 8  # smaller int8 codes have fewer significant bits than e4m3


def format_ranges() -> tuple[FormatRange, ...]:
    """The 8-bit formats in binades below their largest value."""
    from loka.numerics.formats import info

    ranges = []
    for format in (Format.E4M3, Format.E5M2, Format.INT8):
        grid = info(format)
        normal = INT8_COARSE if format is Format.INT8 else grid.smallest_normal
        flush = grid.smallest_subnormal / 2  # what is smaller rounds to zero
        ranges.append(FormatRange(str(format), math.log2(grid.max / normal), math.log2(grid.max / flush)))
    return tuple(ranges)


def draw_distributions(record: Record, plan: PlanDocument | None) -> tuple[SiteDistribution, ...]:
    """A histogram of x and of dy for every site that was called, as the Probe counted them."""
    formats = {site.site: _planned_format(site) for site in plan.sites} if plan else {}
    default = Format.E4M3 if record.environment.cuda else Format.INT8
    return tuple(
        SiteDistribution(
            name,
            str(formats.get(name) or default),
            histogram_of(site.statistics["binades"].tensors["x_B"]),
            histogram_of(site.statistics["binades"].tensors.get("dy_B")),
            site.notes,
        )
        for name, site in record.sites.items()
        if "binades" in site.statistics and "x_B" in site.statistics["binades"].tensors
    )


def _planned_format(site: SitePlan) -> Format | None:
    """The 8-bit format in which the plan casts x; None for high precision, or a kernel that this machine does not know."""
    from loka.kernels.contract import KERNELS

    kernel = site.kernels[Role.FPROP].kernel
    if kernel not in KERNELS.names():
        return None
    format = KERNELS.get(kernel).recipe(Role.FPROP).a_format
    return format if format.is_8bit else None


def histogram_of(counts_B: "Tensor | None") -> Histogram | None:
    """Counts by binade (zeros last) as shares, from the first binade with a value to the last; None without a nonzero value."""
    from loka.probe.statistics.binades import BINADES, LOWEST

    if counts_B is None or not counts_B.isfinite().all() or not counts_B[:BINADES].any():
        return None
    shares = (counts_B / counts_B.sum()).tolist()
    seen = [index for index, share in enumerate(shares[:BINADES]) if share > 0]
    first, last = seen[0], seen[-1]
    return Histogram(
        first=LOWEST + first,
        shares=tuple(round(share, 7) for share in shares[first : last + 1]),
        zeros=shares[BINADES],
        below=2.0 ** (LOWEST + last + 1),
    )
