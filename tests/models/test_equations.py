"""Each model's dense part against its published formula, written out in float64 with loops and einsum."""

import math

import pytest
import torch
from torch import Tensor, nn

from loka.models.dcnv2 import DcnV2Config, DcnV2DensePart
from loka.models.dlrm import DlrmConfig, DlrmDensePart
from loka.models.interformer import InterFormerConfig, InterFormerDensePart
from loka.models.wukong import WukongConfig, WukongDensePart


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    y = torch.einsum("...k,nk->...n", x, layer.weight)
    return y if layer.bias is None else y + layer.bias


def layer_norm(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt() * layer.weight + layer.bias


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def normed_mlp(chain: nn.Sequential, x: Tensor) -> Tensor:
    """(Linear → LayerNorm → SiLU) as often as the chain has it."""
    kinds = [type(module) for module in chain]
    assert kinds == [nn.Linear, nn.LayerNorm, nn.SiLU] * (len(kinds) // 3)
    for i in range(0, len(chain), 3):
        x = silu(layer_norm(chain[i + 1], linear(chain[i], x)))
    return x


def relu_mlp(chain: nn.Sequential, x: Tensor) -> Tensor:
    kinds = [type(module) for module in chain]
    assert kinds == [nn.Linear, nn.ReLU] * (len(kinds) // 2)
    for i in range(0, len(chain), 2):
        x = linear(chain[i], x).clamp(min=0)
    return x


def with_indicators(dense: list[float]) -> Tensor:
    columns = [0.0 if math.isnan(x) else x for x in dense] + [float(math.isnan(x)) for x in dense]
    return torch.tensor(columns, dtype=torch.float64)


def compressed(dense: list[float]) -> list[float]:
    return [math.copysign(math.log(1 + abs(x)), x) for x in dense]


def randomized(part: nn.Module) -> nn.Module:
    """In float64, with no parameter at its initial value (a LayerNorm's are 1 and 0 and would hide an error)."""
    torch.manual_seed(1)
    for parameter in part.parameters():
        nn.init.normal_(parameter, 0.1, 0.5)
    return part.double()


@pytest.fixture
def dense_BD() -> Tensor:
    return torch.tensor([[0.5, -1.0, 3.0], [torch.nan, 20.0, 0.0]], dtype=torch.float64)


@pytest.fixture
def features_BNE() -> Tensor:
    return torch.randn(2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("n_fmb", [3, 4])  # 4 + 3 embeddings out is as many as go in: no projection of the residual
def test_wukong(dense_BD: Tensor, features_BNE: Tensor, n_fmb: int) -> None:
    config = WukongConfig(
        dim=4,
        n_layers=2,
        n_fmb=n_fmb,
        n_lcb=3,
        rank=2,
        fmb_widths=(6, 5),
        top_widths=(8,),
        dense_widths=(7,),
        n_dense_embeddings=2,
    )
    part = randomized(WukongDensePart(config, n_dense=3, n_features=5))
    expected = []
    for b in range(2):
        from_dense = linear(part.dense.out, normed_mlp(part.dense.hidden, with_indicators(dense_BD[b].tolist())))
        x = torch.cat([from_dense.reshape(2, 4), features_BNE[b]])
        for layer in part.layers:
            y = layer.fmb.project.weight.T  # n×k
            all_dots = torch.einsum("id,jd->ij", x, x)  # FM = (X Xᵀ) Y, the order that the model avoids
            fm = layer_norm(layer.fmb.norm, (all_dots @ y).reshape(-1))
            fmb = linear(layer.fmb.out, normed_mlp(layer.fmb.hidden, fm)).reshape(n_fmb, 4)
            lcb = layer.lcb.weight @ x
            residual = x if len(x) == n_fmb + 3 else layer.residual.weight @ x
            x = layer_norm(layer.norm, torch.cat([fmb, lcb]) + residual)
        expected.append(linear(part.head, normed_mlp(part.top, x.reshape(-1))))
    torch.testing.assert_close(part(dense_BD, features_BNE), torch.cat(expected), rtol=1e-10, atol=1e-10)
    assert isinstance(part.layers[0].residual, nn.Identity) == (n_fmb == 4)


def test_dlrm(dense_BD: Tensor, features_BNE: Tensor) -> None:
    part = randomized(DlrmDensePart(DlrmConfig(dim=4, dense_widths=(6, 5), top_widths=(8, 7)), n_dense=3, n_features=5))
    expected = []
    for b in range(2):
        z0 = relu_mlp(part.dense, with_indicators(compressed(dense_BD[b].tolist())))
        z = [z0, *features_BNE[b]]
        dots = [sum(z[i][e] * z[j][e] for e in range(4)) for i in range(6) for j in range(i)]
        expected.append(linear(part.head, relu_mlp(part.top, torch.cat([z0, torch.stack(dots)]))))
    torch.testing.assert_close(part(dense_BD, features_BNE), torch.cat(expected), rtol=1e-10, atol=1e-10)


def test_dcnv2(dense_BD: Tensor, features_BNE: Tensor) -> None:
    part = randomized(DcnV2DensePart(DcnV2Config(dim=4, n_layers=3, rank=2, top_widths=(8, 7)), n_dense=3, n_features=5))
    expected = []
    for b in range(2):
        x0 = torch.cat([with_indicators(compressed(dense_BD[b].tolist())), features_BNE[b].reshape(-1)])
        x = x0
        for cross in part.crosses:
            full_rank = cross.w.weight @ cross.v.weight
            x = x0 * (full_rank @ x + cross.w.bias) + x
        expected.append(linear(part.head, relu_mlp(part.top, x)))
    torch.testing.assert_close(part(dense_BD, features_BNE), torch.cat(expected), rtol=1e-10, atol=1e-10)


def gate(module: nn.Module, x: Tensor) -> Tensor:
    return x / (1 + (-linear(module.linear, x)).exp())


def attention(module: nn.Module, queries: Tensor, tokens: Tensor, positions: list[int] | None = None) -> Tensor:
    """Two heads of width 4, one query and one key at a time; positions rotate the pairs (i, i+2) of a head."""

    def at(position: int, vector: Tensor) -> Tensor:
        turned = vector.clone()
        for i in range(2):
            angle = position * 10000 ** -(2 * i / 4)
            turned[i] = vector[i] * math.cos(angle) - vector[i + 2] * math.sin(angle)
            turned[i + 2] = vector[i] * math.sin(angle) + vector[i + 2] * math.cos(angle)
        return turned

    q, kv = linear(module.query, queries), linear(module.key_value, tokens)
    k, v = kv[:, :8], kv[:, 8:]
    rows = []
    for i in range(len(queries)):
        heads = []
        for h in (slice(0, 4), slice(4, 8)):
            scores = torch.stack(
                [
                    (q[i, h] @ k[j, h] if positions is None else at(positions[i], q[i, h]) @ at(positions[j], k[j, h])) / 2
                    for j in range(len(tokens))
                ]
            )
            weights = scores.exp() / scores.exp().sum()
            heads.append(sum(weights[j] * v[j, h] for j in range(len(tokens))))
        rows.append(torch.cat(heads))
    return linear(module.out, torch.stack(rows))


def test_interformer(dense_BD: Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    config = InterFormerConfig(
        dim=8,
        n_layers=2,
        n_heads=2,
        n_summary=2,
        n_pma=3,
        n_recent=2,
        rank=3,
        interaction_widths=(6,),
        pffn_widths=(5,),
        top_widths=(8,),
        dense_widths=(7,),
    )
    part = randomized(InterFormerDensePart(config, n_dense=3, n_features=4, length=5))
    features_BNE = torch.randn(2, 4, 8, dtype=torch.float64, generator=generator)
    sequence_BLE = torch.randn(2, 5, 8, dtype=torch.float64, generator=generator)
    n_steps = (5, 1)  # of the second example only the newest step is valid
    valid_BL = torch.tensor([[5 - i <= n for i in range(5)] for n in n_steps])

    def x_summary(module: nn.Module, x: Tensor) -> Tensor:
        return gate(module.gate, module.lce.weight @ x)

    def s_summary(module: nn.Module, s: Tensor) -> Tensor:
        steps = s[2:]
        recent = torch.cat([torch.zeros(max(0, 2 - len(steps)), 8), steps[-2:]])
        return gate(module.gate, torch.cat([s[:2], attention(module.pma, module.queries_QE, s), recent]))

    expected = []
    for b, n in enumerate(n_steps):  # with padding cut off instead of masked
        from_dense = linear(part.dense.out, normed_mlp(part.dense.hidden, with_indicators(dense_BD[b].tolist())))
        x = torch.cat([from_dense.reshape(1, 8), features_BNE[b]])
        x_sum = x_summary(part.feature_summary, x)
        s = torch.cat([x_sum, sequence_BLE[b, 5 - n :]])
        positions = [0, 0, *range(-n, 0)]
        for layer in part.layers:
            z = torch.cat([x, s_summary(layer.sequence_summary, s)])
            inner = torch.einsum("id,jd,kj->ik", z, z, layer.interaction.project.weight)
            interaction = torch.cat([inner.reshape(-1), (layer.interaction.lce.weight @ z).T.reshape(-1)])
            made = linear(layer.interaction.out, normed_mlp(layer.interaction.hidden, interaction)).reshape(5, 8)
            matrix = linear(layer.sequence.matrix, normed_mlp(layer.sequence.hidden, x_sum.reshape(-1))).reshape(8, 8)
            u = layer_norm(layer.sequence.pffn_norm, s + s @ matrix / math.sqrt(8))
            s = layer_norm(layer.sequence.attention_norm, u + attention(layer.sequence.attention, u, u, positions))
            x = layer_norm(layer.interaction.norm, x + made)
            x_sum = x_summary(layer.feature_summary, x)
        summaries = torch.cat([x_sum, s_summary(part.sequence_summary, s)])
        expected.append(linear(part.head, normed_mlp(part.top, summaries.reshape(-1))))
    logits_B = part(dense_BD, features_BNE, sequence_BLE, valid_BL)
    # The rotary angles are made in float32 and only then widened.
    torch.testing.assert_close(logits_B, torch.cat(expected), rtol=1e-5, atol=1e-5)
