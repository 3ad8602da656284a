"""Features of x, or the weights that read them, over more binades than an 8-bit format has under one scale."""

from collections.abc import Mapping

import torch
from torch import Tensor

from loka.core.recipe import Transform
from loka.core.site_record import SiteRecord
from loka.probe.findings.contract import FINDINGS, Found

BINADES = 12  # e4m3 has 15 of full precision, of which a row's crest takes some
OF_OUTPUT = 0.01  # if all of it is lost, that is a relative RMS error of 0.1
OF_FEATURES = 0.1


@FINDINGS.register("feature_scales")
class FeatureScales:
    """Small features that the weight has learned to listen to, or so many of them that a tenth of x goes unheard."""

    def find(self, site: SiteRecord, sites: Mapping[str, SiteRecord]) -> Found | None:
        x_K, w_K = site.rms_K, site.weight_NK.square().mean(0).sqrt()
        small_K = _is_small(x_K)
        energy_K = (x_K * w_K).square()
        lost = float(energy_K[small_K | _is_small(w_K)].sum() / energy_K.sum().clamp(min=torch.finfo(energy_K.dtype).tiny))
        unheard = float(small_K.sum() / (x_K > 0).sum().clamp(min=1))
        if lost < OF_OUTPUT and unheard < OF_FEATURES:
            return None
        nonzero_K = x_K[x_K > 0].log2()
        binades = float(nonzero_K.max() - nonzero_K.min())
        message = (
            f"features of x lie over {binades:.0f} binades: {unheard:.0%} of them are more than {BINADES} under the largest, "
            f"and {lost:.0%} of the output comes from features or weights that small"
        )
        return Found(message, {"binades": binades, "of_output": lost, "of_features": unheard}, Transform.RESCALE.value)


def _is_small(rms_K: Tensor) -> Tensor:
    """Zeros are not: nothing is lost of them."""
    return (rms_K > 0) & (rms_K < rms_K.max() * 2.0**-BINADES)
