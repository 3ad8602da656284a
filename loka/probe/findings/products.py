"""Mean and variance of a site's products x·wᵀ, from the moments of x and the weight alone.

Axes:  J some of the outputs,  K in_features,  D = K + N features of x and dy,  B blocks of width W,  L rows of a sketch.
"""

from torch import Tensor
from torch.nn.functional import pad

from loka.core.moments import BLOCK_WIDTH, Covariance, covariance_of, variance_of
from loka.core.record import SiteRecord

OUTPUTS = 256  # that many stand for all: their variances cost J·K² operations


def some_outputs(weight_NK: Tensor) -> Tensor:
    """At most OUTPUTS rows of the weight, evenly spaced."""
    return weight_NK[:: -(-weight_NK.shape[0] // OUTPUTS)]


def mean_and_variance(site: SiteRecord, weight_JK: Tensor) -> tuple[Tensor, Tensor]:
    """μ·w and w·Σ·wᵀ of every row w, in whichever form Σ was kept."""
    moments = site.statistics["moments"].tensors
    degrees = (moments["count"] - 1).clamp(min=1).float()
    form, weight_JD = covariance_of(moments), pad(weight_JK, (0, moments["mean_D"].shape[0] - site.k))
    if form is Covariance.FULL:
        scatter_KK = moments["scatter_DD"][: site.k, : site.k]
        variance_J = ((weight_JK @ scatter_KK) * weight_JK).sum(1) / degrees
    elif form is Covariance.BLOCKS:
        scatter_BWW = moments["scatter_BWW"]
        blocks = scatter_BWW.shape[0]
        weight_BJW = pad(weight_JD, (0, blocks * BLOCK_WIDTH - weight_JD.shape[1])).unflatten(1, (blocks, -1)).transpose(0, 1)
        variance_J = ((weight_BJW @ scatter_BWW) * weight_BJW).sum((0, 2)) / degrees
    else:
        sketch_LD = moments["sketch_LD"]
        rest_D = (variance_of(moments) - sketch_LD.square().sum(0) / degrees).clamp(min=0)
        variance_J = (weight_JD @ sketch_LD.t()).square().sum(1) / degrees + weight_JD.square() @ rest_D
    return weight_JK @ site.mean_K, variance_J.clamp(min=0)


def rms_of_terms(second_moment_K: Tensor, weight_JK: Tensor) -> float:
    """Of the sums of an output's terms, were those independent and of mean zero: what the errors of 8-bit casts go by."""
    return float((weight_JK.square() @ second_moment_K).mean().sqrt())
