"""DLRM (Naumov et al. 2019, arXiv:1906.00091): an MLP over the pairwise dot products of embeddings.

    z₀ = MLP(dense)      an embedding made of the dense features
    logit = MLP(concat(z₀, zᵢ·zⱼ for i > j))

Axes:  B examples,  D dense features,  E width of an embedding,  N embeddings, the dense features' first.
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
class DlrmConfig:
    dim: int  # width of an embedding
    dense_widths: tuple[int, ...]  # hidden layers between the dense features and their embedding
    top_widths: tuple[int, ...]  # hidden layers between the dot products and the logit
    dropout: float = 0.0


class DlrmDensePart(nn.Module):
    """The published form, on dense features compressed by ``symlog``: without a norm raw counts would drown all else."""

    pairs: Tensor

    def __init__(self, config: DlrmConfig, n_dense: int, n_features: int) -> None:
        super().__init__()
        n = n_features
        n_top = 0
        if n_dense:
            widths = (*config.dense_widths, config.dim)
            self.dense = mlp(2 * n_dense, widths, activation=nn.ReLU, dropout=config.dropout)
            n += 1
            n_top += config.dim
        row, column = torch.tril_indices(n, n, offset=-1)
        self.register_buffer("pairs", row * n + column, persistent=False)  # into the flattened N×N dot products
        n_top += n * (n - 1) // 2
        self.top = mlp(n_top, config.top_widths, activation=nn.ReLU, dropout=config.dropout)
        self.head = nn.Linear(config.top_widths[-1], 1)

    def forward(self, dense_BD: Tensor, features_BNE: Tensor) -> Tensor:
        z_BNE, top = features_BNE, []
        if dense_BD.shape[1]:
            z0_BE = self.dense(mark_missing(symlog(dense_BD)))
            z_BNE, top = torch.cat([z0_BE.unsqueeze(1), features_BNE], dim=1), [z0_BE]
        dots_BNN = z_BNE @ z_BNE.mT
        top.append(dots_BNN.flatten(1).index_select(1, self.pairs))
        return self.head(self.top(torch.cat(top, dim=1))).squeeze(1)


def build_dlrm(config: DlrmConfig, schema: FeatureSchema) -> Recommender:
    embeddings = Embeddings(schema, config.dim)
    return Recommender(schema, embeddings, DlrmDensePart(config, schema.n_dense, embeddings.n_features))


MODELS.add(
    "dlrm",
    ModelFamily(
        build_dlrm,
        {
            "tiny": DlrmConfig(dim=8, dense_widths=(32, 16), top_widths=(64, 32)),
            "small": DlrmConfig(dim=32, dense_widths=(128, 64), top_widths=(256, 256, 128)),
            "base": DlrmConfig(dim=256, dense_widths=(512, 256), top_widths=(16384, 16384, 8192, 4096)),
            "large": DlrmConfig(dim=256, dense_widths=(512, 256), top_widths=(38912, 38912, 19456, 9728)),
        },
    ),
)
