"""Wukong (Zhang et al. 2024, arXiv:2403.02545): stacked factorization machines.

Each layer maps n embeddings X (n×d) to n_fmb + n_lcb of them; a layer i sees interactions of up to 2ⁱ features:

    X' = LN(concat(FMB(X), LCB(X)) + X)                     X projected over the embedding axis where the counts differ
    FMB(X) = reshape(MLP(LN(flatten(X (XᵀY)))))             Y learned, n×k; XᵀY first, so the cost is linear in n
    LCB(X) = W_L X                                          no bias

Axes:  B examples,  D dense features,  E width of an embedding (d),  N embeddings into a layer (n),  K rank (k).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.data.batch import FeatureSchema
from loka.models.dense_features import DenseEmbeddings
from loka.models.embeddings import Embeddings
from loka.models.mlp import mlp
from loka.models.recommender import Recommender
from loka.models.registry import MODELS, ModelFamily


@dataclass(frozen=True)
class WukongConfig:
    dim: int  # d, width of an embedding
    n_layers: int
    n_fmb: int  # embeddings a layer makes by factorization machines
    n_lcb: int  # embeddings a layer makes by linear compression
    rank: int  # k
    fmb_widths: tuple[int, ...]  # hidden layers of the MLP in each factorization machine block
    top_widths: tuple[int, ...]  # hidden layers between the last layer and the logit
    dense_widths: tuple[int, ...]  # hidden layers between the dense features and their embeddings
    n_dense_embeddings: int = 1
    dropout: float = 0.0


class FactorizationMachineBlock(nn.Module):
    def __init__(self, config: WukongConfig, n: int) -> None:
        super().__init__()
        self.project = nn.Linear(n, config.rank, bias=False)  # Yᵀ
        self.norm = nn.LayerNorm(n * config.rank)
        self.hidden = mlp(n * config.rank, config.fmb_widths, activation=nn.SiLU, norm=True, dropout=config.dropout)
        self.out = nn.Linear(config.fmb_widths[-1], config.n_fmb * config.dim)
        self.shape = (config.n_fmb, config.dim)

    def forward(self, x_BNE: Tensor) -> Tensor:
        interactions_BNK = x_BNE @ self.project(x_BNE.mT)
        return self.out(self.hidden(self.norm(interactions_BNK.flatten(1)))).unflatten(1, self.shape)


class WukongLayer(nn.Module):
    def __init__(self, config: WukongConfig, n: int) -> None:
        super().__init__()
        n_out = config.n_fmb + config.n_lcb
        self.fmb = FactorizationMachineBlock(config, n)
        self.lcb = nn.Linear(n, config.n_lcb, bias=False)
        self.residual = nn.Identity() if n == n_out else nn.Linear(n, n_out, bias=False)
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, x_BNE: Tensor) -> Tensor:
        x_BEN = x_BNE.mT  # linear layers over the embedding axis
        made_BNE = torch.cat([self.fmb(x_BNE), self.lcb(x_BEN).mT], dim=1)
        return self.norm(made_BNE + self.residual(x_BEN).mT)


class WukongDensePart(nn.Module):
    """The dense features as ``n_dense_embeddings`` embeddings in front of the others, the layers, then an MLP to the logit."""

    def __init__(self, config: WukongConfig, n_dense: int, n_features: int) -> None:
        super().__init__()
        n_from_dense = config.n_dense_embeddings if n_dense else 0
        if n_dense:
            self.dense = DenseEmbeddings(n_dense, config.dense_widths, n_from_dense, config.dim, dropout=config.dropout)
        n_out = config.n_fmb + config.n_lcb
        counts = (n_from_dense + n_features, *(n_out for _ in range(config.n_layers)))
        self.layers = nn.Sequential(*(WukongLayer(config, n) for n in counts[:-1]))
        self.top = mlp(counts[-1] * config.dim, config.top_widths, activation=nn.SiLU, norm=True, dropout=config.dropout)
        self.head = nn.Linear(config.top_widths[-1], 1)

    def forward(self, dense_BD: Tensor, features_BNE: Tensor) -> Tensor:
        x_BNE = features_BNE
        if dense_BD.shape[1]:
            x_BNE = torch.cat([self.dense(dense_BD), features_BNE], dim=1)
        return self.head(self.top(self.layers(x_BNE).flatten(1))).squeeze(1)


def build_wukong(config: WukongConfig, schema: FeatureSchema) -> Recommender:
    embeddings = Embeddings(schema, config.dim)
    return Recommender(schema, embeddings, WukongDensePart(config, schema.n_dense, embeddings.n_features))


MODELS.add(
    "wukong",
    ModelFamily(
        build_wukong,
        {
            "tiny": WukongConfig(
                dim=8, n_layers=2, n_fmb=4, n_lcb=4, rank=4, fmb_widths=(32,), top_widths=(32,), dense_widths=(16,)
            ),
            "small": WukongConfig(
                dim=32, n_layers=3, n_fmb=8, n_lcb=8, rank=8, fmb_widths=(128,), top_widths=(128, 64), dense_widths=(64,)
            ),
            "base": WukongConfig(
                dim=128,
                n_layers=4,
                n_fmb=64,
                n_lcb=64,
                rank=64,
                fmb_widths=(4096, 4096, 4096),
                top_widths=(4096, 2048),
                dense_widths=(512,),
                n_dense_embeddings=4,
            ),
            "large": WukongConfig(
                dim=128,
                n_layers=6,
                n_fmb=96,
                n_lcb=96,
                rank=96,
                fmb_widths=(8192, 8192, 8192),
                top_widths=(8192, 4096),
                dense_widths=(1024,),
                n_dense_embeddings=8,
            ),
        },
    ),
)
