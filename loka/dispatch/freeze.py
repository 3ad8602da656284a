"""``freeze``: a planned model made ready for serving. Weights are cast once and for all; what only training needs goes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loka.core.errors import InvalidInput
from loka.core.gemm import Role, TensorName
from loka.dispatch.fast_path import passed_by
from loka.dispatch.planned import PlannedLinear
from loka.dispatch.swap import Swap, forget, put_back, put_in, required_applied, unwrapped
from loka.kernels.operand import Operand
from loka.kernels.transforms import TransformVectors
from loka.nn.fused_block import FusedBlock


@dataclass(frozen=True)
class FreezeReport:
    """What was frozen, and the bytes of all parameters and buffers before and behind."""

    sites: tuple[str, ...]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        sizes = f"{self.bytes_before / 2**20:,.1f} → {self.bytes_after / 2**20:,.1f} MiB"
        return f"{len(self.sites)} sites frozen for serving, {sizes} of parameters and buffers"


def freeze(model: nn.Module, *, drop_high_precision: bool = False) -> FreezeReport:
    """Make a model with a plan ready for serving, in place and for good: eval mode, no gradients, fprop's casts alone.

    ``drop_high_precision`` drops the weights that 8-bit copies stand for, and ``state_dict`` loses them: keep the checkpoint.
    Without it batches that a kernel cannot take run in high precision; with it they run on the kernel, padded. Fused blocks
    keep their weights.
    """
    model = unwrapped(model)
    applied = required_applied(model)
    bytes_before = _bytes(model)
    frozen: dict[str, Swap] = {}
    bypassed = passed_by(model)
    for site in applied.sites:
        planned = applied.module(site)
        if not isinstance(planned, PlannedLinear):
            assert isinstance(planned, FusedBlock)
        elif site in bypassed or not planned.executor.operand_forms(Role.FPROP)[1].spec.format.is_8bit:
            put_back(model, applied.swaps[site])  # served by its own weight, or its gradients alone were planned
        else:
            frozen[site] = Swap(planned, FrozenLinear(planned, keep_weight=not drop_high_precision))
    put_in(model, frozen.values())
    forget(model)
    model.eval().requires_grad_(False)
    return FreezeReport(tuple(frozen), bytes_before, _bytes(model))


class FrozenLinear(nn.Module):
    """fprop of a planned site with the cast of its weight. Without gradients."""

    weight: Tensor | None
    bias: Tensor | None
    codes: Tensor
    scale: Tensor
    features: Tensor | None  # of the transform
    shift: Tensor | None

    def __init__(self, planned: PlannedLinear, *, keep_weight: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = planned.in_features, planned.out_features
        self.executor, self.kernel, self.rows = planned.executor, planned.kernels.fprop, planned.rows
        self.register_parameter("weight", planned._parameters.get("weight") if keep_weight else None)
        self.register_parameter("bias", planned._parameters.get("bias"))
        self._form = self.executor.operand_forms(Role.FPROP)[1]
        weight = planned._weight_operands()[self._form]
        features_K, shift_N = planned._vectors() or (None, None)
        for name, buffer in (("codes", weight.codes), ("scale", weight.scale), ("features", features_K), ("shift", shift_N)):
            self.register_buffer(name, buffer, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() and input.requires_grad:
            raise InvalidInput("this model was frozen for serving and has no gradients: run it under torch.no_grad()")
        if input.ndim == 0 or input.shape[-1] != self.in_features:
            raise InvalidInput(f"expected input of shape (..., {self.in_features}), got {tuple(input.shape)}")
        x_MK = input.reshape(-1, self.in_features)
        if self.weight is not None and not self.rows.take(x_MK.shape[0]):
            return F.linear(input, self.weight, self.bias)
        if torch.is_autocast_enabled(input.device.type):
            with torch.autocast(input.device.type, enabled=False):
                y_MN = self._multiply(x_MK, torch.get_autocast_dtype(input.device.type))
        else:
            y_MN = self._multiply(x_MK, input.dtype)
        return y_MN.reshape(*input.shape[:-1], self.out_features)

    def _multiply(self, x_MK: Tensor, out_dtype: torch.dtype) -> Tensor:
        vectors = None if self.features is None else TransformVectors(self.features, self.shift)
        weight = Operand(self.codes, self.scale, self.out_features, self.in_features, self._form.spec)
        x_casts = self.executor.cast(TensorName.X, x_MK, (Role.FPROP,), vectors)
        return self.executor.multiply(Role.FPROP, x_casts, {self._form: weight}, out_dtype, self.bias, vectors)

    def extra_repr(self) -> str:
        dropped = "" if self.weight is not None else ", without its high-precision weight"
        return f"in_features={self.in_features}, out_features={self.out_features}, fprop={self.kernel}{dropped}"

    def _apply(self, fn: Any, recurse: bool = True) -> "FrozenLinear":
        """Casts move with the module, but a change of dtype would take codes for values: they stay what they are."""
        buffers = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in buffers.items():
            moved = self._buffers[name]
            assert moved is not None
            self._buffers[name] = buffer.to(moved.device)
        return self


def _bytes(model: nn.Module) -> int:
    """Of every tensor once, however many names it has."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
