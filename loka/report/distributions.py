"""Each site's learned values by binade, and where an 8-bit format keeps, coarsens or flushes them."""

import math
from typing import TYPE_CHECKING

from loka.core.gemm import Role
from loka.core.plan import PlanDocument, SitePlan
from loka.core.recipe import Format
from loka.report.page_data import FormatRange, Histogram, SiteDistribution

if TYPE_CHECKING:
    from torch import Tensor

    from loka.core.record import Record, SiteRecord

SAMPLED = 200_000  # values drawn of a tensor: enough to see a share of 1e-4
INT8_COARSE = 8  # an int8 code below it has fewer significant bits than e4m3


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


def draw_distributions(record: "Record", plan: PlanDocument | None) -> tuple[SiteDistribution, ...]:
    """A histogram of x and of dy for every site that was called, drawn from what the Probe learned."""
    formats = {site.site: _planned_format(site) for site in plan.sites} if plan else {}
    default = Format.E4M3 if record.environment.cuda else Format.INT8
    return tuple(
        SiteDistribution(name, str(formats.get(name) or default), *_histograms(site), site.notes)
        for name, site in record.sites.items()
        if site.was_called
    )


def _planned_format(site: SitePlan) -> Format | None:
    """The format in which the plan casts x, where this machine knows the kernel."""
    from loka.kernels.contract import KERNELS

    kernel = site.kernels[Role.FPROP].kernel
    if kernel not in KERNELS.names():
        return None
    format = KERNELS.get(kernel).recipe(Role.FPROP).a_format
    return format if format.is_8bit else None


def _histograms(site: "SiteRecord") -> tuple[Histogram | None, Histogram | None]:
    import torch

    rows = max(16, min(2048, SAMPLED // site.k))
    x_MK, dy_MN = site.sample(rows, torch.Generator().manual_seed(0))
    return histogram_of(x_MK), None if dy_MN is None else histogram_of(dy_MN)


def histogram_of(values: "Tensor") -> Histogram | None:
    """Shares by binade: v is counted at e where 2^e ≤ |v| < 2^(e+1). None where every value is zero or none is there."""
    import torch

    sizes = values.flatten().abs()
    exponents = torch.frexp(sizes[sizes > 0]).exponent - 1
    if not exponents.numel():
        return None
    first = int(exponents.min())
    shares = torch.bincount((exponents - first).long()).double() / values.numel()
    zeros = 1 - exponents.numel() / values.numel()
    return Histogram(first, tuple(round(share, 7) for share in shares.tolist()), zeros, float(sizes.max()))
