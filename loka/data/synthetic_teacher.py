"""The hidden function that labels the synthetic stream: first-, second- and third-order effects of latent vectors.

Every feature is a field with a latent vector of width R: an id's own vector, the sum over a bag, the recency-weighted sum
over the sequence (both scaled to vary as one id does), a dense feature's direction times its standardized logarithm. With x the
fields one behind the other, and its halves and thirds multiplied element by element,

    logit = bias + s₁·⟨a, x⟩ + s₂·⟨b, x_half1 ⊙ x_half2⟩ + s₃·⟨c, x_third1 ⊙ x_third2 ⊙ x_third3⟩

so that each field meets one partner in a pair and two in a triple. Latent vectors have mean zero over the stream. So where
fields are independent, effects of one order cannot be expressed by those of lower orders.

Axes:  B examples,  D dense features,  F one-hot features,  G bags,  S ids in a bag,  L steps of the sequence,  V ids,
       R latent width,  X = R times the number of fields.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from loka.data.batch import PADDING
from loka.data.synthetic_features import DrawnFeatures, FeatureLaw

LATENT_WIDTH = 8
RECENCY_SECONDS = 86_400.0  # how fast the past of a sequence fades: by a factor e a day
SEQUENCE_WEIGHT = 2.0  # against 1 of a typical field: histories say more than most features
IMPORTANCE_SPREAD = 0.4  # standard deviation of the logarithm of fields' scales: some features say much, most little


@dataclass(frozen=True)
class Teacher:
    """Parameters of the hidden function; ``logits`` evaluates it."""

    onehot_VR: Tensor  # all one-hot features' tables, one behind the other
    onehot_start_F: Tensor
    multihot_VR: tuple[Tensor, ...]
    sequence_VR: Tensor | None
    dense_DR: Tensor
    missing_DR: Tensor
    present_DR: Tensor  # added for a value that is not missing, to keep the mean at zero
    log_mean_D: Tensor
    log_std_D: Tensor
    first_X: tuple[Tensor, Tensor]  # weights at first, and those they turn to as the teacher drifts
    second_X: tuple[Tensor, Tensor]
    third_X: tuple[Tensor, Tensor]
    order_scale: tuple[float, float, float] = (1.0, 1.0, 1.0)
    bias: float = 0.0

    def logits(self, features: DrawnFeatures, *, turn_B: Tensor | None = None) -> Tensor:
        """Log-odds of a click. ``turn_B`` is the angle by which the teacher has drifted; at π/2 its weights are wholly new."""
        first_B, second_B, third_B = self.orders(features, turn_B=turn_B)
        s1, s2, s3 = self.order_scale
        return self.bias + s1 * first_B + s2 * second_B + s3 * third_B

    def orders(self, features: DrawnFeatures, *, turn_B: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The effects of first, second and third order, before they are scaled."""
        x_BX = self._fields(features)
        half, third = len(self.second_X[0]), len(self.third_X[0])
        pair_BX = x_BX[:, :half] * x_BX[:, half : 2 * half]
        triple_BX = x_BX[:, :third] * x_BX[:, third : 2 * third] * x_BX[:, 2 * third : 3 * third]
        return (
            _weigh(x_BX, self.first_X, turn_B),
            _weigh(pair_BX, self.second_X, turn_B),
            _weigh(triple_BX, self.third_X, turn_B),
        )

    def _fields(self, features: DrawnFeatures) -> Tensor:
        fields = []
        if features.sequence_BL is not None and features.times_BL is not None and self.sequence_VR is not None:
            recency_BL = torch.exp(features.times_BL / -RECENCY_SECONDS) * (features.sequence_BL != PADDING)
            fields.append(SEQUENCE_WEIGHT * _weighted_sum(self.sequence_VR, features.sequence_BL, recency_BL))
        if features.multihot_BGS is not None:
            for ids_BS, table_VR in zip(features.multihot_BGS.unbind(1), self.multihot_VR, strict=True):
                fields.append(_weighted_sum(table_VR, ids_BS, (ids_BS != PADDING).to(table_VR.dtype)))
        fields.append(functional.embedding(features.onehot_BF + self.onehot_start_F, self.onehot_VR).flatten(1))
        standard_BD = (torch.log1p(features.count_BD) - self.log_mean_D) / self.log_std_D
        missing_BD1 = standard_BD.isnan()[..., None]
        dense_BDR = standard_BD.nan_to_num(0.0)[..., None] * self.dense_DR
        fields.append((dense_BDR + self.present_DR + missing_BD1 * (self.missing_DR - self.present_DR)).flatten(1))
        return torch.cat(fields, 1)

    def to(self, device: torch.device) -> "Teacher":
        return replace(self, **{name: _moved(value, device) for name, value in vars(self).items()})


def draw_teacher(seed: int, law: FeatureLaw) -> Teacher:
    """A random teacher on the CPU, not yet calibrated. Latent vectors of a feature are centred by the popularity of its ids."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def importance(*shape: int) -> Tensor:
        return torch.exp(IMPORTANCE_SPREAD * normal(*shape))

    def centred(popularity_V: Tensor) -> Tensor:
        latent_VR = normal(len(popularity_V), LATENT_WIDTH) * importance(1)
        return latent_VR - popularity_V.float() @ latent_VR

    onehot = [centred(popularity_V) for popularity_V in law.onehot.popularity()]
    multihot = [centred(popularity_V) for popularity_V in law.multihot.popularity()]
    sequence = [centred(popularity_V) for popularity_V in law.sequence.popularity()]
    n_dense = len(law.log_mean_D)
    n_fields = len(onehot) + len(multihot) + len(sequence) + n_dense

    def weights(n: int) -> tuple[Tensor, Tensor]:
        return normal(n * LATENT_WIDTH), normal(n * LATENT_WIDTH)

    return Teacher(
        onehot_VR=torch.cat(onehot),
        onehot_start_F=torch.tensor([0, *law.onehot.sizes[:-1]]).cumsum(0),
        multihot_VR=tuple(multihot),
        sequence_VR=sequence[0] if sequence else None,
        dense_DR=normal(n_dense, LATENT_WIDTH) * importance(n_dense, 1),
        missing_DR=normal(n_dense, LATENT_WIDTH) * importance(n_dense, 1),
        present_DR=torch.zeros(n_dense, LATENT_WIDTH),
        log_mean_D=torch.zeros(n_dense),
        log_std_D=torch.ones(n_dense),
        first_X=weights(n_fields),
        second_X=weights(n_fields // 2),
        third_X=weights(n_fields // 3),
    )


def calibrate(teacher: Teacher, sample: DrawnFeatures, strengths: tuple[float, float, float], base_rate: float) -> Teacher:
    """Standardize dense features on ``sample``, give each order its standard deviation in the logit, and set the base rate."""
    log_BD = torch.log1p(sample.count_BD.double())
    given_D = (~log_BD.isnan()).double().mean(0)
    log_mean_D = log_BD.nanmean(0)
    log_std_D = (log_BD - log_mean_D).square().nanmean(0).sqrt().clamp_min(1e-3)
    present_DR = teacher.missing_DR * ((given_D - 1) / given_D)[:, None]
    teacher = replace(teacher, log_mean_D=log_mean_D.float(), log_std_D=log_std_D.float(), present_DR=present_DR.float())

    def scale(strength: float, effect_B: Tensor) -> float:
        deviation = float(effect_B.double().std())
        return strength / deviation if deviation else 0.0

    first_B, second_B, third_B = teacher.orders(sample)
    order_scale = (scale(strengths[0], first_B), scale(strengths[1], second_B), scale(strengths[2], third_B))
    teacher = replace(teacher, order_scale=order_scale)
    return replace(teacher, bias=_bias_for(teacher.logits(sample).double(), base_rate))


def _bias_for(logit_B: Tensor, base_rate: float) -> float:
    """The constant that makes the mean click probability ``base_rate``, by bisection."""
    low, high = -100.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        if float(torch.sigmoid(logit_B + middle).mean()) < base_rate:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _weighted_sum(table_VR: Tensor, ids_BS: Tensor, weight_BS: Tensor) -> Tensor:
    """The sum of the ids' vectors, with weights scaled so that their squares add to one: it varies as one id's vector does.
    Zero if empty."""
    norm_B1 = weight_BS.square().sum(1, keepdim=True).sqrt()
    share_BS = weight_BS / norm_B1.clamp_min(1e-30)
    return functional.embedding_bag(ids_BS.clamp_min(0), table_VR, per_sample_weights=share_BS, mode="sum")


def _weigh(x_BX: Tensor, weights: tuple[Tensor, Tensor], turn_B: Tensor | None) -> Tensor:
    """x·w, with w turned from the first weights towards the second: turning keeps the variance."""
    at_first_X, later_X = weights
    if turn_B is None:
        return x_BX @ at_first_X
    return torch.cos(turn_B) * (x_BX @ at_first_X) + torch.sin(turn_B) * (x_BX @ later_X)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return tuple(_moved(item, device) for item in value) if isinstance(value, tuple) else value
