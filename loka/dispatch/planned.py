"""The modules that a plan puts in place of the user's."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loka.core.errors import InvalidInput
from loka.core.gemm import Role
from loka.core.recipe import Transform
from loka.dispatch.rows import RowLimits, row_limits
from loka.kernels.device import device_of
from loka.kernels.executor import SiteKernels
from loka.nn.linear import LokaLinear, has_rows
from loka.nn.weight_casts import has_own_weight, held_tensor, hold
from loka.numerics.formats import format_of, is_format

_COUNTER = "high_precision_calls"


class PlannedLinear(LokaLinear):
    """A LokaLinear that runs in high precision, and counts such calls, where its kernels cannot take a call's rows or the dtype
    of its weight, where an input has no rows (sparse, nested), and where it was parametrized or pruned since."""

    rows: RowLimits

    @property
    def high_precision_calls(self) -> Tensor:
        """How many there were: a tensor, for a Python counter would recompile at every call."""
        return held_tensor(self, _COUNTER)

    def forward(self, input: Tensor) -> Tensor:
        is_taken = has_rows(input) and self.rows.take(input.numel() // self.in_features)
        if is_taken and has_own_weight(self) and is_format(self.weight.dtype):
            return super().forward(input)
        if not isinstance(input, Tensor):  # torch.fx's symbols, which have no number of rows to look at
            raise InvalidInput("a planned layer cannot be traced by symbols: trace before apply_plan, or use torch.export")
        self.high_precision_calls.add_(1)
        return F.linear(input, self.weight, self.bias)

    @torch.inference_mode(False)
    def _bind(self, kernels: SiteKernels, transform: Transform = Transform.NONE, vector: Tensor | None = None) -> None:
        hold(self, _COUNTER, torch.zeros((), dtype=torch.int64, device=self.weight.device))
        super()._bind(kernels, transform, vector)
        self.rows = self.row_limits(*self.executor.kernels)

    def row_limits(self, *roles: Role) -> RowLimits:
        """What the kernels of ``roles`` take."""
        device, out = device_of(self.weight.device), format_of(self.weight.dtype)
        kernels = {role: self.executor.kernels[role] for role in roles}
        limits = row_limits(kernels, self.in_features, self.out_features, out, device)
        if isinstance(limits, str):
            raise InvalidInput(limits)
        return limits


class PassThrough(nn.Identity):
    """Stands where a norm or an activation was that the fused block ``absorbed_by`` runs now, from its own place."""

    def __init__(self, absorbed_by: str) -> None:
        super().__init__()
        self.absorbed_by = absorbed_by

    def forward(self, input: Tensor | None = None, *, x: Tensor | None = None) -> Tensor | None:  # pyrefly: ignore[bad-override]
        """What it is given, by either name that a BlockNorm takes."""
        return input if x is None else x

    def extra_repr(self) -> str:
        return f"absorbed by {self.absorbed_by}"
