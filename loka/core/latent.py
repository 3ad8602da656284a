"""Correlated normal numbers, one for each feature of x, u and e, in whichever form the covariance was kept.

Axes:  M rows,  D features,  B blocks of width W,  L rows of a sketch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loka.core.marginals import latent_correlation
from loka.core.moments import Covariance, State, covariance_of, variance_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CONSTANT = 1e-5  # deviation to mean: what rounding in FP32 makes of a feature that never changes
MOST_EXACT = 1536  # features: past it, eigenvectors take minutes, and the values' own correlation serves as that of z


@dataclass(frozen=True)
class Latent:
    """Factors of a correlation: rows of independent normal numbers times them have it."""

    n_features: int
    factors: State

    def draw(self, rows: int, generator: "torch.Generator") -> "Tensor":
        """z_MD, each of mean 0 and variance 1, on the generator's device."""
        import torch

        device = generator.device

        def normal(*shape: int) -> "Tensor":
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

        factors = {name: factor.to(device) for name, factor in self.factors.items()}
        if "factor_DD" in factors:
            return normal(rows, self.n_features) @ factors["factor_DD"]
        if "factor_BWW" in factors:
            blocks, width, _ = factors["factor_BWW"].shape
            return (normal(blocks, rows, width) @ factors["factor_BWW"]).transpose(0, 1).flatten(1)[:, : self.n_features]
        shared_MD = normal(rows, factors["factor_LD"].shape[0]) @ factors["factor_LD"]
        return shared_MD + normal(rows, self.n_features) * factors["rest_D"]


def latent_of(moments: State, values_LD: "Tensor") -> Latent:
    """z for values of these quantiles."""
    import torch

    n_features, form = moments["mean_D"].shape[0], covariance_of(moments)
    degrees = (moments["count"] - 1).clamp(min=1)
    deviation_D = variance_of(moments).sqrt()
    deviation_D = torch.where(deviation_D > CONSTANT * moments["mean_D"].abs(), deviation_D, 0.0)
    if form is Covariance.LOW_RANK:
        factor_LD = _divided(moments["sketch_LD"] / degrees.sqrt().float(), deviation_D)
        rest_D = (1 - factor_LD.square().sum(0)).clamp(min=0).sqrt()
        return Latent(n_features, {"factor_LD": factor_LD, "rest_D": rest_D})
    if form is Covariance.BLOCKS:
        width = moments["scatter_BWW"].shape[1]
        padded_D = torch.nn.functional.pad(deviation_D, (0, -n_features % width)).view(-1, 1, width)
        correlation_BWW = _correlation(moments["scatter_BWW"].double() / degrees, padded_D.double())
        return Latent(n_features, {"factor_BWW": _factor(correlation_BWW)})
    correlation_DD = _correlation(moments["scatter_DD"].double() / degrees, deviation_D.double()[None])
    if n_features > MOST_EXACT:
        return Latent(n_features, {"factor_DD": _quick_factor(correlation_DD)})
    return Latent(n_features, {"factor_DD": _factor(latent_correlation(values_LD, correlation_DD))})


def _correlation(covariance: "Tensor", deviation: "Tensor") -> "Tensor":
    """A feature that never changes is correlated with itself alone, and so is one whose variance FP32 does not hold."""
    correlation = _divided(_divided(covariance, deviation), deviation.mT).nan_to_num(0.0).clamp(-1, 1)
    correlation.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    return correlation


def _divided(values: "Tensor", deviation: "Tensor") -> "Tensor":
    import torch

    return torch.where(deviation > 0, values / deviation, 0.0)


def _factor(correlation: "Tensor") -> "Tensor":
    """By eigenvectors, without directions of negative variance: estimates of correlations need not fit together."""
    import torch

    values, vectors = torch.linalg.eigh(correlation)
    factor = (vectors * values.clamp(min=0).sqrt()[..., None, :]).mT
    return (factor / torch.linalg.vector_norm(factor, dim=-2, keepdim=True).clamp(min=1e-12)).float()


def _quick_factor(correlation_DD: "Tensor") -> "Tensor":
    """By Cholesky, with as much added to the diagonal as it takes."""
    import torch

    for added in (1e-8, 1e-6, 1e-4, 1e-2):
        eye_DD = torch.eye(correlation_DD.shape[0], dtype=correlation_DD.dtype, device=correlation_DD.device)
        factor_DD, failed = torch.linalg.cholesky_ex((correlation_DD + added * eye_DD) / (1 + added))
        if not failed:
            return factor_DD.t().float()
    return eye_DD.float()
