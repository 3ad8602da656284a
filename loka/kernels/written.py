"""What torch.compile would make where it is read, made once and written to memory."""

import torch
from torch import Tensor


def written(x: Tensor) -> Tensor:
    """``x``, which is contiguous, in memory of its own, lying as it says. Otherwise code that torch compiles may make it anew
    for each value that reads it, or let it lie another way. Eager, it is there already."""
    return x.as_strided(x.shape, x.stride()) if torch.compiler.is_compiling() else x
