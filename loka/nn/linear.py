"""LokaLinear: ``nn.Linear`` with a kernel for each of its three GEMMs."""

from typing import Any

import torch
from torch import Tensor, nn

from loka.core.errors import InvalidInput
from loka.core.gemm import TensorName
from loka.kernels.casting import cast
from loka.kernels.executor import SiteExecutor, SiteKernels
from loka.kernels.operand import Form, Operand
from loka.nn.site import run_site
from loka.nn.weight_casts import keep_current, refresh_after_load, state_without_casts, store_casts, stored_cast


class LokaLinear(nn.Linear):
    """A linear layer whose fprop, dgrad and wgrad each run on a kernel of their own.

    Parameters and ``state_dict`` are those of ``nn.Linear``; the 8-bit copies of the weight are non-persistent buffers.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        kernels: SiteKernels,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._bind(kernels)

    @classmethod
    def from_linear(cls, linear: nn.Linear, kernels: SiteKernels) -> "LokaLinear":
        """A LokaLinear that shares the very parameters of ``linear``, so that its optimizer goes on as it was."""
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module.in_features, module.out_features = linear.in_features, linear.out_features
        module.weight, module.bias = linear.weight, linear.bias
        module.training = linear.training
        module._bind(kernels)
        return module

    def forward(self, input: Tensor) -> Tensor:
        require_input(input, self.weight)
        device = input.device.type
        out_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        x_MK = input.reshape(-1, self.in_features)
        y_MN = run_site(self.executor, x_MK, self.weight, self.bias, self._weight_operands(), out_dtype)
        return y_MN.reshape(*input.shape[:-1], self.out_features)

    def refresh_weight_casts(self) -> None:
        """Cast the weight again, into the buffers that are there."""
        casts = {}
        for index, operand in enumerate(cast(TensorName.W, self.weight.detach(), self._cached_forms)):
            assert operand.scale is not None
            casts |= {f"codes_{index}": operand.codes, f"scale_{index}": operand.scale}
        store_casts(self, casts)

    def extra_repr(self) -> str:
        kernels = self.kernels
        return f"{super().extra_repr()}, fprop={kernels.fprop}, dgrad={kernels.dgrad}, wgrad={kernels.wgrad}"

    def _bind(self, kernels: SiteKernels) -> None:
        self.kernels = kernels
        self.executor = SiteExecutor(kernels)
        self._cached_forms: tuple[Form, ...] = tuple(
            form for form in self.executor.forms[TensorName.W] if form.spec.format.is_8bit
        )
        self.refresh_weight_casts()
        self.register_load_state_dict_post_hook(refresh_after_load)
        keep_current(self)

    def _weight_operands(self) -> dict[Form, Operand]:
        operands = {}
        for index, form in enumerate(self._cached_forms):
            outer, contraction = self.weight.t().shape if form.transposed else self.weight.shape
            codes, scale = stored_cast(self, f"codes_{index}"), stored_cast(self, f"scale_{index}")
            operands[form] = Operand(codes, scale, outer, contraction, form.spec)
        return operands

    def _apply(self, fn: Any, recurse: bool = True) -> "LokaLinear":
        """Moving or converting the module would convert 8-bit codes as if they were values: they are made anew instead."""
        super()._apply(fn, recurse)
        self.refresh_weight_casts()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return state_without_casts(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.refresh_weight_casts()
        keep_current(self)


def require_input(x: Tensor, weight_NK: Tensor) -> None:
    """Refuse what ``nn.Linear`` would refuse too, with what is expected instead."""
    in_features = weight_NK.shape[1]
    if x.ndim == 0 or x.shape[-1] != in_features:
        raise InvalidInput(f"expected input of shape (..., {in_features}), got {tuple(x.shape)}")
    if x.device != weight_NK.device:
        raise InvalidInput(f"input is on {x.device}, the weight on {weight_NK.device}: move one of them")
    if x.dtype != weight_NK.dtype and not torch.is_autocast_enabled(x.device.type):
        raise InvalidInput(f"input is {x.dtype}, the weight {weight_NK.dtype}: cast one of them, or run under torch.autocast")
