"""DCNv2 (Wang et al. 2021, arXiv:2008.13535): explicit crosses of the whole input with itself, low-rank, then an MLP.

    x₀ = concat(dense, embeddings)
    x' = x₀ ⊙ (W(Vx) + b) + x          V: width → r,  W: r → width;  layer i makes polynomials of degree up to i + 1
    logit = MLP(x)                     stacked form: the MLP reads the last cross

Axes:  B examples,  D dense features,  E width of an embedding,  N embeddings,  X width of x₀.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.data.batch import FeatureSchema
from loka.models.dense_features import mark_missing, symlog
from loka.models.embeddings import Embeddings
from loka.models.mlp import mlp
from loka.models.recommender import Recommender
from loka.models.registry import MODELS, ModelFamily


@dataclass(frozen=True)
class DcnV2Config:
    dim: int  # width of an embedding
    n_layers: int  # crosses
    rank: int  # r
    top_widths: tuple[int, ...]  # hidden layers between the last cross and the logit
    dropout: float = 0.0


class CrossLayer(nn.Module):
    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.v = nn.Linear(width, rank, bias=False)
        self.w = nn.Linear(rank, width)

    def forward(self, x0_BX: Tensor, x_BX: Tensor) -> Tensor:
        return x0_BX * self.w(self.v(x_BX)) + x_BX


class DcnV2DensePart(nn.Module):
    """The published form, on dense features compressed by ``symlog``: crosses would raise raw counts to the fourth power."""

    def __init__(self, config: DcnV2Config, n_dense: int, n_features: int) -> None:
        super().__init__()
        width = 2 * n_dense + n_features * config.dim
        self.crosses = nn.ModuleList(CrossLayer(width, config.rank) for _ in range(config.n_layers))
        self.top = mlp(width, config.top_widths, activation=nn.ReLU, dropout=config.dropout)
        self.head = nn.Linear(config.top_widths[-1], 1)

    def forward(self, dense_BD: Tensor, features_BNE: Tensor) -> Tensor:
        x0_BX = torch.cat([mark_missing(symlog(dense_BD)), features_BNE.flatten(1)], dim=1)
        x_BX = x0_BX
        for cross in self.crosses:
            x_BX = cross(x0_BX, x_BX)
        return self.head(self.top(x_BX)).squeeze(1)


def build_dcnv2(config: DcnV2Config, schema: FeatureSchema) -> Recommender:
    embeddings = Embeddings(schema, config.dim)
    return Recommender(schema, embeddings, DcnV2DensePart(config, schema.n_dense, embeddings.n_features))


MODELS.add(
    "dcnv2",
    ModelFamily(
        build_dcnv2,
        {
            "tiny": DcnV2Config(dim=8, n_layers=2, rank=16, top_widths=(64, 32)),
            "small": DcnV2Config(dim=16, n_layers=3, rank=64, top_widths=(256, 128)),
            "base": DcnV2Config(dim=256, n_layers=3, rank=512, top_widths=(14336, 14336, 14336)),
            "large": DcnV2Config(dim=256, n_layers=3, rank=512, top_widths=(32768, 32768, 32768)),
        },
    ),
)
