"""The laws that the synthetic stream's features follow, and how a batch of them is drawn.

Axes:  B examples,  D dense features,  F one-hot features,  G bags,  S ids in a bag,  L steps of the sequence,  V ids.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.data.batch import PADDING, FeatureSchema

MEAN_GAP_SECONDS = 7_200.0  # between two steps of a typical sequence
MAX_LOG_COUNT = 20.0


@dataclass(frozen=True)
class DrawnFeatures:
    """Features of B examples before they are put in the form a model sees."""

    count_BD: Tensor  # NaN where missing
    onehot_BF: Tensor
    multihot_BGS: Tensor | None
    sequence_BL: Tensor | None
    times_BL: Tensor | None


@dataclass(frozen=True)
class ZipfLaw:
    """Ids of several features. The share of id k of V is ∝ ∫ x^-exponent dx over [k+1, k+2]: Zipf's law, smoothed.

    The integral has an inverse in closed form, so uniform numbers become ids of any vocabulary without a table.
    """

    sizes: tuple[int, ...]
    exponent: float
    size_F: Tensor
    span_F: Tensor

    @classmethod
    def of(cls, sizes: tuple[int, ...], exponent: float, device: torch.device) -> "ZipfLaw":
        if exponent == 1:  # there the integral is a logarithm; so close to it nobody can tell the difference
            exponent = 1 + 1e-4
        span_F = [math.expm1(math.log(size + 1) * (1 - exponent)) for size in sizes]
        return cls(sizes, exponent, torch.tensor(sizes, device=device), torch.tensor(span_F, device=device))

    def ids(self, uniform: Tensor, *, shift_B: Tensor | None = None) -> Tensor:
        """Ids from uniform numbers with axes B, F and any others. With a shift the k-th most popular is (k + shift) mod V."""
        others = [1] * (uniform.dim() - 2)
        size, span = self.size_F.view(-1, *others), self.span_F.view(-1, *others)
        rank = torch.exp(torch.log1p(uniform * span) / (1 - self.exponent)).long() - 1
        rank = torch.minimum(rank, size - 1)
        return rank if shift_B is None else (rank + shift_B.view(-1, 1, *others)) % size

    def popularity(self) -> list[Tensor]:
        """The share of every id of each feature, in float64 on the CPU."""
        shares = []
        for size in self.sizes:
            edge = torch.arange(1, size + 2, dtype=torch.float64) ** (1 - self.exponent)
            shares.append(edge.diff() / (edge[-1] - edge[0]))
        return shares


@dataclass(frozen=True)
class FeatureLaw:
    """Distributions of all features. Counts are log-normal and share a factor, as a user's activity moves all of them."""

    onehot: ZipfLaw
    multihot: ZipfLaw
    sequence: ZipfLaw  # one feature, or none
    bag_length: int
    sequence_length: int
    log_mean_D: Tensor
    log_std_D: Tensor
    activity_D: Tensor  # correlation of a count's logarithm with the shared factor
    missing_D: Tensor

    def draw(self, generator: torch.Generator, n: int, *, shift_B: Tensor | None = None) -> DrawnFeatures:
        """``n`` examples on the generator's device, without a host sync; ``shift_B`` as in ``ZipfLaw.ids``."""
        count_BD = self._counts(generator, n)
        onehot_BF = self.onehot.ids(_uniform(generator, n, len(self.onehot.sizes)), shift_B=shift_B)
        multihot_BGS = sequence_BL = times_BL = None
        if self.multihot.sizes:
            shape = (n, len(self.multihot.sizes), self.bag_length)
            ids_BGS = self.multihot.ids(_uniform(generator, *shape), shift_B=shift_B)
            length_BG1 = _lengths(generator, *shape[:2], 1, longest=self.bag_length)
            position_S = torch.arange(self.bag_length, device=generator.device)
            multihot_BGS = ids_BGS.masked_fill(position_S >= length_BG1, PADDING)
        if self.sequence.sizes:
            ids_BL = self.sequence.ids(_uniform(generator, n, 1, self.sequence_length), shift_B=shift_B)[:, 0]
            length_B1 = _lengths(generator, n, 1, longest=self.sequence_length)
            absent_BL = torch.arange(self.sequence_length, 0, -1, device=generator.device) > length_B1
            sequence_BL = ids_BL.masked_fill(absent_BL, PADDING)
            times_BL = self._times(generator, n).masked_fill(absent_BL, 0)
        return DrawnFeatures(count_BD, onehot_BF, multihot_BGS, sequence_BL, times_BL)

    def _counts(self, generator: torch.Generator, n: int) -> Tensor:
        normal_BD = torch.randn(n, len(self.log_mean_D) + 1, generator=generator, device=generator.device)
        shared_B1, own_BD = normal_BD[:, :1], normal_BD[:, 1:]
        standard_BD = self.activity_D * shared_B1 + (1 - self.activity_D**2).sqrt() * own_BD
        log_BD = (self.log_mean_D + self.log_std_D * standard_BD).clamp_max(MAX_LOG_COUNT)
        missing_BD = _uniform(generator, *own_BD.shape) < self.missing_D
        return log_BD.exp().floor().masked_fill(missing_BD, math.nan)

    def _times(self, generator: torch.Generator, n: int) -> Tensor:
        """Seconds before now, oldest first: gaps are exponential, at a pace that differs widely between examples."""
        pace_B1 = torch.randn(n, 1, generator=generator, device=generator.device).exp() * MEAN_GAP_SECONDS
        gap_BL = -torch.log1p(-_uniform(generator, n, self.sequence_length))
        return (gap_BL.cumsum(1) * pace_B1).flip(1)


def draw_feature_law(seed: int, schema: FeatureSchema, *, zipf: float, missing: float, device: torch.device) -> FeatureLaw:
    """Laws for the features of ``schema``. What is random in them is drawn on the CPU, so it is the same for every device."""
    level_D, spread_D, activity_D, missing_D = torch.rand(4, schema.n_dense, generator=torch.Generator().manual_seed(seed))
    return FeatureLaw(
        onehot=ZipfLaw.of(schema.onehot_sizes, zipf, device),
        multihot=ZipfLaw.of(schema.multihot_sizes, zipf, device),
        sequence=ZipfLaw.of((schema.sequence_size,) if schema.sequence_size else (), zipf, device),
        bag_length=schema.bag_length,
        sequence_length=schema.sequence_length,
        log_mean_D=(4 * level_D).to(device),
        log_std_D=(0.8 + 2 * spread_D).to(device),
        activity_D=(0.8 * activity_D).to(device),
        missing_D=(2 * missing * missing_D).to(device),
    )


def _uniform(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator, device=generator.device)


def _lengths(generator: torch.Generator, *shape: int, longest: int) -> Tensor:
    return (_uniform(generator, *shape) * (longest + 1)).long()
