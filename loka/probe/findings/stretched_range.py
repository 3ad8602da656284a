"""Activations with an exponential tail, which make tiny outputs of moderate inputs: they stretch the next operand's range."""

from collections.abc import Mapping

from loka.core.site_record import SiteRecord
from loka.probe.findings.contract import FINDINGS, Found
from loka.probe.statistics.binades import share_below

BINADES = 12
SHARE = 0.05  # a SiLU behind a norm has a thousandth that far below
# Activation → the Mod that replaces it; None where there is none.
EXPONENTIAL = {
    "SiLU": "hard_swish",
    "silu": "hard_swish",
    **dict.fromkeys(("Sigmoid", "sigmoid", "GELU", "gelu", "Mish", "mish", "Softplus", "softplus")),
}


@FINDINGS.register("stretched_range")
class StretchedRange:
    """Found at the site in front of the activation, in what the site behind it reads."""

    def find(self, site: SiteRecord, sites: Mapping[str, SiteRecord]) -> Found | None:
        if site.activation_kind not in EXPONENTIAL:
            return None
        reader = next((other for other in sites.values() if other.producer == site.name and other.was_called), None)
        if reader is None:
            return None
        share = share_below(reader.statistics["binades"].tensors["x_B"], BINADES)
        if share < SHARE:
            return None
        message = (
            f"the {site.activation_kind} behind it stretches the range: {share:.0%} of what {reader.name} reads is more than "
            f"{BINADES} binades under the largest"
        )
        return Found(message, {"far_below_the_largest": share}, EXPONENTIAL[site.activation_kind])
