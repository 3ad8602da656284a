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
from loka.nn.weight_casts import keep_current


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
        self._check(input)
        device = input.device.type
        out_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        x_MK = input.reshape(-1, self.in_features)
        y_MN = run_site(self.executor, x_MK, self.weight, self.bias, self._weight_operands(), out_dtype)
        return y_MN.reshape(*input.shape[:-1], self.out_features)

    @torch.no_grad()
    def refresh_weight_casts(self) -> None:
        """Cast the weight again, into the buffers that are there: captured graphs see the new values."""
        for index, operand in enumerate(self._cast_weight()):
            codes, scale = self._buffer_pair(index)
            assert operand.scale is not None
            codes.copy_(operand.codes)
            scale.copy_(operand.scale)

    def extra_repr(self) -> str:
        kernels = self.kernels
        return f"{super().extra_repr()}, fprop={kernels.fprop}, dgrad={kernels.dgrad}, wgrad={kernels.wgrad}"

    def _bind(self, kernels: SiteKernels) -> None:
        self.kernels = kernels
        self.executor = SiteExecutor(kernels)
        self._cached_forms: tuple[Form, ...] = tuple(
            form for form in self.executor.forms[TensorName.W] if form.spec.format.is_8bit
        )
        self._make_weight_casts()
        self.register_load_state_dict_post_hook(_refresh_after_load)
        keep_current(self)

    def _check(self, x: Tensor) -> None:
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise InvalidInput(f"expected input of shape (..., {self.in_features}), got {tuple(x.shape)}")
        if x.device != self.weight.device:
            raise InvalidInput(f"input is on {x.device}, the weight on {self.weight.device}: move one of them")
        if x.dtype != self.weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise InvalidInput(
                f"input is {x.dtype}, the weight {self.weight.dtype}: cast one of them, or run under torch.autocast"
            )

    def _cast_weight(self) -> tuple[Operand, ...]:
        return cast(TensorName.W, self.weight.detach(), self._cached_forms)

    @torch.no_grad()
    def _make_weight_casts(self) -> None:
        for index, operand in enumerate(self._cast_weight()):
            self.register_buffer(f"_weight_codes_{index}", operand.codes, persistent=False)
            self.register_buffer(f"_weight_scale_{index}", operand.scale, persistent=False)

    def _buffer_pair(self, index: int) -> tuple[Tensor, Tensor]:
        return self.get_buffer(f"_weight_codes_{index}"), self.get_buffer(f"_weight_scale_{index}")

    def _weight_operands(self) -> dict[Form, Operand]:
        operands = {}
        for index, form in enumerate(self._cached_forms):
            outer, contraction = self.weight.t().shape if form.transposed else self.weight.shape
            operands[form] = Operand(*self._buffer_pair(index), outer, contraction, form.spec)
        return operands

    def _apply(self, fn: Any, recurse: bool = True) -> "LokaLinear":
        """Moving or converting the module would convert 8-bit codes as if they were values: they are made anew instead."""
        super()._apply(fn, recurse)
        self._make_weight_casts()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry the weight; the casts are made again from it."""
        state = self.__dict__.copy()
        state["_buffers"] = {name: buffer for name, buffer in self._buffers.items() if not name.startswith("_weight_")}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._make_weight_casts()
        keep_current(self)


def _refresh_after_load(module: nn.Module, incompatible_keys: Any) -> None:
    assert isinstance(module, LokaLinear)
    module.refresh_weight_casts()
