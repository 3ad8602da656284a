"""Mean and variance of a site's products x·wᵀ, from the moments of x and the weight alone.

Axes:  J some of the outputs,  K in_features,  N out_features.
"""

from torch import Tensor
from torch.nn.functional import pad

from loka.core.moments import project
from loka.core.site_record import SiteRecord


def mean_and_variance(site: SiteRecord, weight_JK: Tensor) -> tuple[Tensor, Tensor]:
    """μ·w and w·Σ·wᵀ of every row w."""
    moments = site.statistics["moments"].tensors
    return project(moments, pad(weight_JK, (0, moments["mean_D"].shape[0] - site.k)))


def rms_of_terms(second_moment_K: Tensor, weight_JK: Tensor) -> float:
    """The rms that outputs would have if their terms were independent and of mean zero: errors of 8-bit casts go by that."""
    return float((weight_JK.square() @ second_moment_K).mean().sqrt())
