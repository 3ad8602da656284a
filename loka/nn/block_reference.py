"""A block in high precision: the mathematics that the fused kernels follow, and what runs where they cannot.

y = activation(norm(x·wᵀ + b))
"""

from torch import Tensor, nn
from torch.nn import functional as F


def block_reference(
    x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, norm: nn.Module | None, activation: nn.Module | None
) -> Tensor:
    """The block by torch's own operations, in the dtype of its tensors (or autocast's); differentiable, any device."""
    return block_epilogue(F.linear(x, weight_NK, bias_N), norm, activation)


def block_epilogue(z: Tensor, norm: nn.Module | None, activation: nn.Module | None) -> Tensor:
    """What a block does behind its product."""
    y = z if norm is None else norm(z)
    return y if activation is None else activation(y)
