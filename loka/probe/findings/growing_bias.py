"""A bias that grows on and on: it carries values out of an 8-bit format's range, and rules what stays inside."""

from collections.abc import Mapping

from loka.core.moments import some_outputs
from loka.core.site_record import SiteRecord
from loka.probe.findings.contract import FINDINGS, Found
from loka.probe.findings.products import mean_and_variance

LEAST_SAMPLES = 8
GROWTH = 0.1  # of the norm, in the later half of the samples
STEADY = 0.5  # the later half's growth, at least, in parts of the earlier's; a bias that converges soon has less


@FINDINGS.register("growing_bias")
class GrowingBias:
    """The bias's norm still grows, and is already larger than what the data moves the output by."""

    def find(self, site: SiteRecord, sites: Mapping[str, SiteRecord]) -> Found | None:
        norms = site.bias_norms
        if site.bias_N is None or len(norms) < LEAST_SAMPLES:
            return None
        first, middle, last = norms[0], norms[len(norms) // 2], norms[-1]
        later, earlier = last - middle, middle - first
        if later < GROWTH * last or later < STEADY * earlier:
            return None
        _, variance_J = mean_and_variance(site, some_outputs(site.weight_NK))
        deviation = float(variance_J.mean().sqrt())
        size = float(site.bias_N.square().mean().sqrt())
        if size < deviation or not deviation > 0:
            return None
        message = (
            f"the bias grows without converging (its norm went from {first:.3g} over {middle:.3g} to {last:.3g}) and is "
            f"{size / deviation:.3g} times what x moves the output by"
        )
        return Found(message, {"bias_to_deviation": size / deviation, "growth_in_later_half": later / last}, "no_bias")
