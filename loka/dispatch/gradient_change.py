"""What a plan does to the gradients of a model: how far they are from high precision's on the same batches.

A kernel may be right in forward and still spoil what is learned, by its own gradients or by what torch.compile makes of them.
Rounding puts gradients off by a few percent a layer, in no direction; what is off by as much as it is large has lost them.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

Gradients = Mapping[str, Tensor]  # by parameter
NEGLIGIBLE = 1e-6  # of the whole gradient: what has less learns nothing from these batches


class GradientChange(NamedTuple):
    """The module whose gradients are furthest off, and by how much of their size; inf where they are no numbers."""

    error: float
    module: str


def gradient_change(pairs: Iterable[tuple[Gradients, Gradients]]) -> GradientChange:
    """From the gradients of each batch by the plan and in high precision; no change where there are none.

    The parameters of a module are judged together: a bias in front of a norm that takes its mean away has a gradient of 0, and
    what is left of it after rounding is noise in either. A gradient that is no number in high precision is left out.
    """
    errors: dict[str, float] = defaultdict(float)
    sizes: dict[str, float] = defaultdict(float)
    for planned, high in pairs:
        for name, gradient in high.items():
            exact = gradient.double()  # squares of small gradients leave FP32, and so do those of large ones
            size = float(exact.square().sum())
            if not math.isfinite(size):
                continue
            module = name.rpartition(".")[0]
            sizes[module] += size
            errors[module] += float((planned[name].double() - exact).square().sum()) if name in planned else size
    whole = sum(sizes.values())
    # However small a gradient is, one that is no number spoils the weight.
    off = {module: math.inf for module, error in errors.items() if not math.isfinite(error)}
    off |= {m: math.sqrt(errors[m] / size) for m, size in sizes.items() if size > NEGLIGIBLE**2 * whole and m not in off}
    changes = [GradientChange(error, module) for module, error in off.items()]
    return max(changes, default=GradientChange(0.0, ""))
