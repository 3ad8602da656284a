"""Multi-layer perceptrons as flat chains of modules: so the norm and activation behind a linear layer can be found."""

from collections.abc import Sequence

from torch import nn


def mlp(
    n_in: int, widths: Sequence[int], *, activation: type[nn.Module], norm: bool = False, dropout: float = 0.0
) -> nn.Sequential:
    """For each width: Linear → LayerNorm (if ``norm``) → activation → Dropout (if any). Ends behind the last activation."""
    modules: list[nn.Module] = []
    for width in widths:
        modules.append(nn.Linear(n_in, width))
        if norm:
            modules.append(nn.LayerNorm(width))
        modules.append(activation())
        if dropout:
            modules.append(nn.Dropout(dropout))
        n_in = width
    return nn.Sequential(*modules)
