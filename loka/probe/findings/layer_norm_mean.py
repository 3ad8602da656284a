"""Outputs with a large mean over the features, which the LayerNorm behind subtracts: what is left is small beside the error."""

from collections.abc import Mapping

import torch
from torch import Tensor

from loka.core.moments import some_outputs
from loka.core.site_record import SiteRecord
from loka.probe.findings.contract import FINDINGS, Found
from loka.probe.findings.products import mean_and_variance

LARGE = 3.0  # as for a cancellation inside the site
SUBTRACTS = ("LayerNorm", "layer_norm")


@FINDINGS.register("layer_norm_mean")
class LayerNormMean:
    def find(self, site: SiteRecord, sites: Mapping[str, SiteRecord]) -> Found | None:
        if site.norm_kind not in SUBTRACTS or site.n == 1:
            return None
        bias_N = torch.zeros(site.n) if site.bias_N is None else site.bias_N
        whole = _rms(site, site.weight_NK, bias_N)
        left = _rms(site, site.weight_NK - site.weight_NK.mean(0), bias_N - bias_N.mean())
        if not left > 0 or whole < LARGE * left:
            return None
        ratio = whole / left
        message = f"a row's outputs share a mean that the LayerNorm behind subtracts: they are {ratio:.3g} times what is left"
        return Found(message, {"output_to_what_is_left": ratio}, "block_norm")


def _rms(site: SiteRecord, weight_NK: Tensor, bias_N: Tensor) -> float:
    mean_J, variance_J = mean_and_variance(site, some_outputs(weight_NK))
    bias_J = some_outputs(bias_N[:, None])[:, 0]
    return float(((mean_J + bias_J).square() + variance_J).mean().sqrt())
