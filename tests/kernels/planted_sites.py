"""Sites planted with what 8 bits cannot bear as it is, and a transform can mend."""

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.core.recipe import Transform

M, K, N = 512, 256, 192


@dataclass(frozen=True)
class PlantedSite:
    x_MK: Tensor
    dy_MN: Tensor
    weight_NK: Tensor
    transform: Transform
    vector_K: Tensor


def cancelling_mean(seed: int = 0, m: int = M) -> PlantedSite:
    """A mean 20 times the deviation that the weight has learned to ignore: outputs far smaller than |x|·|w|.

    dy sums to zero over the batch, so the mean cancels in wgrad too.
    """
    generator = torch.Generator().manual_seed(seed)
    mean_K = 20 * torch.randn(K, generator=generator)
    x_MK = mean_K + torch.randn(m, K, generator=generator)
    weight_NK = torch.randn(N, K, generator=generator) / K**0.5
    weight_NK -= torch.outer(weight_NK @ mean_K, mean_K) / mean_K.square().sum()
    dy_MN = 1e-3 * torch.randn(m, N, generator=generator)
    return PlantedSite(x_MK, dy_MN - dy_MN.mean(0), weight_NK, Transform.CENTER, mean_K)


def compensated_range(seed: int = 0, m: int = M) -> PlantedSite:
    """Features over 24 binades with weights that compensate: every feature has its say, few survive one scale."""
    generator = torch.Generator().manual_seed(seed)
    scale_K = 2.0 ** torch.randint(-12, 13, (K,), generator=generator)
    x_MK = torch.randn(m, K, generator=generator) * scale_K
    weight_NK = torch.randn(N, K, generator=generator) / K**0.5 / scale_K
    return PlantedSite(x_MK, 1e-3 * torch.randn(m, N, generator=generator), weight_NK, Transform.RESCALE, scale_K)
