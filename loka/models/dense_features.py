"""What every model does first with its dense features.

Axes:  B examples,  D dense features,  N embeddings made of them,  E width of an embedding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from loka.models.mlp import mlp


def mark_missing(dense_BD: Tensor) -> Tensor:
    """Each feature with 0 where it is missing (NaN), then for each an indicator, 1 where it is missing: B×2D.

    An indicator's scale does not depend on the feature's, so its weight is learned as fast for a raw count as for a ratio.
    """
    missing_BD = dense_BD.isnan()
    return torch.cat([dense_BD.masked_fill(missing_BD, 0), missing_BD.to(dense_BD.dtype)], dim=1)


def symlog(x: Tensor) -> Tensor:
    """sign(x)·log(1+|x|): raw counts over many binades become numbers of order one to ten.

    For models without a norm behind their first layer; ``DenseEmbeddings`` has one and takes raw counts as they are.
    """
    return x.sign() * x.abs().log1p()


class DenseEmbeddings(nn.Module):
    """All dense features, raw, to ``n_out`` embeddings by an MLP whose LayerNorms bound what large counts can do."""

    def __init__(self, n_dense: int, widths: Sequence[int], n_out: int, dim: int, *, dropout: float) -> None:
        super().__init__()
        self.hidden = mlp(2 * n_dense, widths, activation=nn.SiLU, norm=True, dropout=dropout)
        self.out = nn.Linear(widths[-1], n_out * dim)
        self.shape = (n_out, dim)

    def forward(self, dense_BD: Tensor) -> Tensor:
        return self.out(self.hidden(mark_missing(dense_BD))).unflatten(1, self.shape)
