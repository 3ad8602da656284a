"""InterFormer (Zeng et al. 2024, arXiv:2411.09852): feature interaction and sequence modelling that inform each other.

Two streams, the features X (n×d) and the sequence S (t×d), exchange gated summaries in every layer:

    X_sum = Gate(LCE(X))                              LCE: linear over the embedding axis, n → n_summary
    S_sum = Gate([CLS ‖ PMA(S) ‖ recent])             PMA: learned queries attending to S; recent: the newest steps
    X'    = MLP(Interaction([X ‖ S_sum]))             Interaction(Z) = [Z (ZᵀY) ‖ LCE(Z)], inner products and a linear part
    S'    = MHA(PFFN(X_sum, S))                       PFFN: S times a d×d matrix that an MLP makes of X_sum, for each example
    logit = MLP([X_sum ‖ S_sum])

The first X_sum is put in front of the sequence as its CLS tokens. Gate(x) = x ⊙ σ(Wx + b). X', PFFN and MHA carry a residual
and a LayerNorm, as in the ensembles and transformers they come from. Without a sequence in the data S is the CLS tokens alone.

Axes:  B examples,  D dense features,  E width of an embedding,  N features,  L steps of the sequence,  T = CLS tokens + L,
H heads,  C width of a head,  Q queries.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.core.errors import InvalidInput
from loka.data.batch import FeatureSchema
from loka.models.dense_features import DenseEmbeddings
from loka.models.embeddings import Embeddings
from loka.models.mlp import mlp
from loka.models.recommender import Recommender
from loka.models.registry import MODELS, ModelFamily


@dataclass(frozen=True)
class InterFormerConfig:
    dim: int  # d, width of an embedding
    n_layers: int
    n_heads: int
    n_summary: int  # embeddings in X_sum, and so CLS tokens
    n_pma: int  # learned queries of the pooling attention
    n_recent: int  # newest steps that enter S_sum as they are
    rank: int  # columns of Y in the interaction
    interaction_widths: tuple[int, ...]  # hidden layers of the MLP behind the interaction
    pffn_widths: tuple[int, ...]  # hidden layers of the MLP that makes PFFN's matrix
    top_widths: tuple[int, ...]  # hidden layers between the last summaries and the logit
    dense_widths: tuple[int, ...]  # hidden layers between the dense features and their embeddings
    n_dense_embeddings: int = 1
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.dim % (2 * self.n_heads):
            raise InvalidInput(
                f"rotary heads need an even width: dim={self.dim} must be a multiple of 2·n_heads={2 * self.n_heads}"
            )


class Gate(nn.Module):
    """x ⊙ σ(Wx + b): lets through what the other stream should see."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x_BNE: Tensor) -> Tensor:
        return x_BNE * self.linear(x_BNE).sigmoid()


class Attention(nn.Module):
    """Multi-head attention of queries to valid tokens. With ``angle_TC``, queries and keys are rotated by position."""

    def __init__(self, config: InterFormerConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.query = nn.Linear(config.dim, config.dim)
        self.key_value = nn.Linear(config.dim, 2 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, query_BQE: Tensor, token_BTE: Tensor, valid_BT: Tensor, angle_TC: Tensor | None = None) -> Tensor:
        q_BHQC, k_BHTC, v_BHTC = (
            x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for x in (self.query(query_BQE), *self.key_value(token_BTE).chunk(2, dim=-1))
        )
        if angle_TC is not None:
            q_BHQC, k_BHTC = rotate(q_BHQC, angle_TC), rotate(k_BHTC, angle_TC)
        y_BHQC = F.scaled_dot_product_attention(q_BHQC, k_BHTC, v_BHTC, attn_mask=valid_BT[:, None, None, :])
        return self.out(y_BHQC.transpose(1, 2).flatten(2))


def rotate(x_BHTC: Tensor, angle_TC: Tensor) -> Tensor:
    """Rotary positions: turn each pair (i, i + C/2) of a head by its position's angle, so that dot products depend on the
    difference of positions."""
    first, second = x_BHTC.chunk(2, dim=-1)
    cos, sin = angle_TC.cos().to(x_BHTC.dtype), angle_TC.sin().to(x_BHTC.dtype)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def rotary_angles(n_cls: int, length: int, head_width: int) -> Tensor:
    """Angles of T positions: CLS tokens at 0, the newest step at −1, the one before at −2. So padding shifts nothing."""
    positions_T = torch.cat([torch.zeros(n_cls), torch.arange(-length, 0)])
    frequencies = 10000.0 ** -(torch.arange(0, head_width, 2) / head_width)
    return torch.outer(positions_T, frequencies)


class SequenceSummary(nn.Module):
    """S_sum = Gate([CLS ‖ PMA(S) ‖ recent])."""

    def __init__(self, config: InterFormerConfig, length: int) -> None:
        super().__init__()
        self.n_cls = config.n_summary
        self.n_recent = min(config.n_recent, length)
        self.n_out = self.n_cls + config.n_pma + self.n_recent
        self.queries_QE = nn.Parameter(torch.randn(config.n_pma, config.dim))
        self.pma = Attention(config)
        self.gate = Gate(config.dim)

    def forward(self, s_BTE: Tensor, valid_BT: Tensor) -> Tensor:
        n_tokens = s_BTE.shape[1]
        pooled_BQE = self.pma(self.queries_QE.expand(s_BTE.shape[0], -1, -1), s_BTE, valid_BT)
        recent_BRE = s_BTE[:, n_tokens - self.n_recent :] * valid_BT[:, n_tokens - self.n_recent :, None]
        return self.gate(torch.cat([s_BTE[:, : self.n_cls], pooled_BQE, recent_BRE], dim=1))


class FeatureSummary(nn.Module):
    """X_sum = Gate(LCE(X))."""

    def __init__(self, config: InterFormerConfig, n: int) -> None:
        super().__init__()
        self.lce = nn.Linear(n, config.n_summary, bias=False)
        self.gate = Gate(config.dim)

    def forward(self, x_BNE: Tensor) -> Tensor:
        return self.gate(self.lce(x_BNE.mT).mT)


class InteractionArch(nn.Module):
    """X' = LN(X + MLP([Z (ZᵀY) ‖ LCE(Z)])) with Z = [X ‖ S_sum]."""

    def __init__(self, config: InterFormerConfig, n: int, n_summary: int) -> None:
        super().__init__()
        n_z = n + n_summary
        self.project = nn.Linear(n_z, config.rank, bias=False)  # Yᵀ
        self.lce = nn.Linear(n_z, config.rank, bias=False)
        n_in = n_z * config.rank + config.rank * config.dim
        self.hidden = mlp(n_in, config.interaction_widths, activation=nn.SiLU, norm=True, dropout=config.dropout)
        self.out = nn.Linear(config.interaction_widths[-1], n * config.dim)
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, x_BNE: Tensor, s_sum_BQE: Tensor) -> Tensor:
        z_BNE = torch.cat([x_BNE, s_sum_BQE], dim=1)
        z_BEN = z_BNE.mT
        interactions = torch.cat([(z_BNE @ self.project(z_BEN)).flatten(1), self.lce(z_BEN).flatten(1)], dim=1)
        return self.norm(x_BNE + self.out(self.hidden(interactions)).view_as(x_BNE))


class SequenceArch(nn.Module):
    """S' = LN(U + MHA(U)) with U = LN(S + PFFN(X_sum, S))."""

    def __init__(self, config: InterFormerConfig) -> None:
        super().__init__()
        n_in = config.n_summary * config.dim
        self.hidden = mlp(n_in, config.pffn_widths, activation=nn.SiLU, norm=True, dropout=config.dropout)
        self.matrix = nn.Linear(config.pffn_widths[-1], config.dim * config.dim)
        self.pffn_norm = nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.attention_norm = nn.LayerNorm(config.dim)
        self.dim = config.dim

    def forward(self, x_sum_BQE: Tensor, s_BTE: Tensor, valid_BT: Tensor, angle_TC: Tensor) -> Tensor:
        matrix_BEE = self.matrix(self.hidden(x_sum_BQE.flatten(1))).unflatten(1, (self.dim, self.dim))
        # The matrix has entries of order one: divided by √d, the product has the scale of S, as behind any linear layer.
        u_BTE = self.pffn_norm(s_BTE + s_BTE @ matrix_BEE * self.dim**-0.5)
        return self.attention_norm(u_BTE + self.attention(u_BTE, u_BTE, valid_BT, angle_TC))


class InterFormerLayer(nn.Module):
    def __init__(self, config: InterFormerConfig, n: int, length: int) -> None:
        super().__init__()
        self.sequence_summary = SequenceSummary(config, length)
        self.interaction = InteractionArch(config, n, self.sequence_summary.n_out)
        self.sequence = SequenceArch(config)
        self.feature_summary = FeatureSummary(config, n)

    def forward(
        self, x_BNE: Tensor, x_sum_BQE: Tensor, s_BTE: Tensor, valid_BT: Tensor, angle_TC: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One exchange; returns X', its summary for the next layer, and S'."""
        x_BNE = self.interaction(x_BNE, self.sequence_summary(s_BTE, valid_BT))
        s_BTE = self.sequence(x_sum_BQE, s_BTE, valid_BT, angle_TC)
        return x_BNE, self.feature_summary(x_BNE), s_BTE


class InterFormerDensePart(nn.Module):
    angle_TC: Tensor

    def __init__(self, config: InterFormerConfig, n_dense: int, n_features: int, length: int) -> None:
        super().__init__()
        n_from_dense = config.n_dense_embeddings if n_dense else 0
        if n_dense:
            self.dense = DenseEmbeddings(n_dense, config.dense_widths, n_from_dense, config.dim, dropout=config.dropout)
        n = n_from_dense + n_features
        self.n_cls = config.n_summary
        angle_TC = rotary_angles(self.n_cls, length, config.dim // config.n_heads)
        self.register_buffer("angle_TC", angle_TC, persistent=False)
        self.feature_summary = FeatureSummary(config, n)
        self.layers = nn.ModuleList(InterFormerLayer(config, n, length) for _ in range(config.n_layers))
        self.sequence_summary = SequenceSummary(config, length)
        n_top = (config.n_summary + self.sequence_summary.n_out) * config.dim
        self.top = mlp(n_top, config.top_widths, activation=nn.SiLU, norm=True, dropout=config.dropout)
        self.head = nn.Linear(config.top_widths[-1], 1)

    def forward(self, dense_BD: Tensor, features_BNE: Tensor, sequence_BLE: Tensor, valid_BL: Tensor) -> Tensor:
        x_BNE = features_BNE
        if dense_BD.shape[1]:
            x_BNE = torch.cat([self.dense(dense_BD), features_BNE], dim=1)
        x_sum_BQE = self.feature_summary(x_BNE)
        s_BTE = torch.cat([x_sum_BQE, sequence_BLE], dim=1)
        valid_BT = F.pad(valid_BL, (self.n_cls, 0), value=True)
        for layer in self.layers:
            x_BNE, x_sum_BQE, s_BTE = layer(x_BNE, x_sum_BQE, s_BTE, valid_BT, self.angle_TC)
        summaries = torch.cat([x_sum_BQE, self.sequence_summary(s_BTE, valid_BT)], dim=1)
        return self.head(self.top(summaries.flatten(1))).squeeze(1)


def build_interformer(config: InterFormerConfig, schema: FeatureSchema) -> Recommender:
    embeddings = Embeddings(schema, config.dim, keep_sequence=True)
    dense_part = InterFormerDensePart(config, schema.n_dense, embeddings.n_features, schema.sequence_length)
    return Recommender(schema, embeddings, dense_part)


MODELS.add(
    "interformer",
    ModelFamily(
        build_interformer,
        {
            "tiny": InterFormerConfig(
                dim=8,
                n_layers=2,
                n_heads=2,
                n_summary=2,
                n_pma=1,
                n_recent=2,
                rank=4,
                interaction_widths=(32,),
                pffn_widths=(16,),
                top_widths=(32,),
                dense_widths=(16,),
            ),
            "small": InterFormerConfig(
                dim=16,
                n_layers=2,
                n_heads=1,
                n_summary=8,
                n_pma=2,
                n_recent=4,
                rank=8,
                interaction_widths=(128,),
                pffn_widths=(32,),
                top_widths=(128, 64),
                dense_widths=(64,),
            ),
            "base": InterFormerConfig(
                dim=128,
                n_layers=6,
                n_heads=4,
                n_summary=8,
                n_pma=4,
                n_recent=8,
                rank=32,
                interaction_widths=(4096, 4096),
                pffn_widths=(1024,),
                top_widths=(4096, 2048),
                dense_widths=(512,),
                n_dense_embeddings=4,
            ),
            "large": InterFormerConfig(
                dim=256,
                n_layers=7,
                n_heads=8,
                n_summary=16,
                n_pma=8,
                n_recent=16,
                rank=64,
                interaction_widths=(8192, 4096),
                pffn_widths=(1024,),
                top_widths=(8192, 4096),
                dense_widths=(1024,),
                n_dense_embeddings=8,
            ),
        },
    ),
)
