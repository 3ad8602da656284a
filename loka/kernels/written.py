"""What torch.compile would make where it is read, made once and written to memory."""

import torch
from torch import Tensor


def written(x: Tensor) -> Tensor:
    """``x``, just made, in memory of its own and lying there as it says. Otherwise code that torch compiles may make it anew
    for each value that reads it, or let it lie another way. Nothing changes for eager code, nor where gradients are needed."""
    needs_gradients = torch.is_grad_enabled() and x.requires_grad  # which would take longer than the rest
    return x.as_strided(x.shape, x.stride()) if torch.compiler.is_compiling() and not needs_gradients else x
