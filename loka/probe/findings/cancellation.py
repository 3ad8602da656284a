"""Outputs much smaller than the terms they are summed from: the rounding of the terms is then large beside them."""

from collections.abc import Mapping

from loka.core.moments import some_outputs
from loka.core.recipe import Transform
from loka.core.site_record import SiteRecord
from loka.probe.findings.contract import FINDINGS, Found
from loka.probe.findings.products import mean_and_variance, rms_of_terms

LARGE = 3.0  # times: e4m3's relative RMS error of 0.037 becomes 0.11


@FINDINGS.register("cancellation")
class Cancellation:
    """A mean of x that the weight has learned to ignore, or features that move together against it."""

    def find(self, site: SiteRecord, sites: Mapping[str, SiteRecord]) -> Found | None:
        weight_JK = some_outputs(site.weight_NK)
        mean_J, variance_J = mean_and_variance(site, weight_JK)
        output = float((mean_J.square() + variance_J).mean().sqrt())
        if not output > 0:
            return None
        second_K = site.rms_K.square()
        plain = rms_of_terms(second_K, weight_JK) / output
        if plain < LARGE:
            return None
        centered = rms_of_terms((second_K - site.mean_K.square()).clamp(min=0), weight_JK) / output
        numbers = {"terms_to_output": plain, "centered_terms_to_output": centered}
        if centered > plain / 2:
            return Found(f"terms {plain:.3g} times as large as their sums cancel, and not by their means", numbers, None)
        message = f"the weight has learned to ignore a large mean of x: terms {plain:.3g} times as large as their sums cancel"
        return Found(message, numbers, Transform.CENTER.value)
