"""LeftLinear: ``nn.Linear`` that multiplies from the left where x lies across."""

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loka.kernels.providers.torch_left import LEFT, from_the_left, matrices_across
from loka.nn.linear import own_weight, require_input
from loka.nn.stand_in import take_over


class LeftLinear(nn.Linear):
    """The same layer in the same precision, and the same parameters. Calls that need gradients, those under autocast, on
    another device, or whose x lies row by row, are torch's own."""

    feeds_product: bool = False

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, feeds_product: bool = False) -> Self:
        """One that shares the very parameters of ``linear``. ``feeds_product``: a product reads its output, for which it lies
        row by row in compiled code too."""
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module.in_features, module.out_features = linear.in_features, linear.out_features
        module.weight, module.bias = own_weight(linear), linear.bias
        module.training = linear.training
        module.feeds_product = feeds_product
        take_over(linear, module)
        return module

    def forward(self, input: Tensor) -> Tensor:
        tensors = (input, self.weight) if self.bias is None else (input, self.weight, self.bias)
        needs_gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        is_torchs = needs_gradients or input.device.type != "cpu" or torch.is_autocast_enabled("cpu")
        matrices = None if is_torchs else matrices_across(input)
        if matrices is None:
            return F.linear(input, self.weight, self.bias)
        require_input(input, self.weight)
        x_BRK = input.reshape(*matrices, self.in_features)
        y_BRN = from_the_left(x_BRK, self.weight, self.bias, in_memory=self.feeds_product)
        return y_BRN.view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fprop={LEFT}"
