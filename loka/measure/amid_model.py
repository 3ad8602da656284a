"""A layer's forward as torch.compile makes it amid a model on a CPU.

There the cast of x becomes part of the operation in front of the layer, and scales and bias part of the one behind it. By
themselves, even compiled, they would be passes of their own. So the layer is timed between two ReLUs, by each option and as
torch runs it, and what counts is the difference.

Axes:  M rows of the batch,  K in_features,  N out_features.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from loka.core.errors import InvalidInput
from loka.core.gemm import Role, TensorName
from loka.kernels.casting import cast
from loka.kernels.operand import operand_of
from loka.kernels.transforms import TransformVectors
from loka.measure.failure import reason_of
from loka.measure.parts import Option, SiteParts, executor_of

LEAST_US = 1.0  # of an option, where noise would make its time negative


def require_compiler() -> None:
    """Refuse to measure a compiled model where torch.compile has nothing to compile with."""
    try:
        torch.compile(torch.sin, dynamic=True)(torch.ones(64))
    except Exception as failure:  # of torch's many kinds
        raise InvalidInput(
            f"torch.compile does not work here ({reason_of(failure)}). It needs a C++ compiler (Debian: `apt install g++`). "
            f"Or measure without `compiled`"
        ) from failure


def plain_layer(parts: SiteParts, across: int | None) -> Callable[[int], Tensor]:
    """The layer alone, as torch runs it. ``across`` is that of the site's facts."""
    x = _as_it_lies(parts.tensors.x, across)
    x = x.mT if across else x
    weights, bias_N = _parameters(parts)
    return lambda turn: nn.functional.linear(x, weights[turn % len(weights)], bias_N)


def between_relus(parts: SiteParts, option: Option | None, across: int | None) -> Callable[[int], Tensor]:
    """The layer by ``option``, or as torch runs it, compiled with a ReLU in front and another behind. The weight was cast
    before, as ``freeze`` does it."""
    x, run = _as_it_lies(parts.tensors.x, across), _compiled(option)
    weights, bias_N = _parameters(parts)

    def call(turn: int) -> Tensor:
        weight_NK = weights[turn % len(weights)]
        if option is None:
            return run(x, weight_NK, None, None, bias_N, None)
        _, form = option.forms
        weight = parts.operand(TensorName.W, form, turn)
        return run(x, weight_NK, weight.codes, weight.scale, bias_N, parts.vectors_of(option.transform, turn))

    return call


def _parameters(parts: SiteParts) -> tuple[list[Tensor], Tensor | None]:
    """In the dtype of x: those of a model that serves under autocast are cast once."""
    tensors = parts.tensors
    dtype = tensors.x.dtype
    return [weight_NK.to(dtype) for weight_NK in tensors.weights], None if tensors.bias is None else tensors.bias.to(dtype)


def _as_it_lies(x_MK: Tensor, across: int | None) -> Tensor:
    """In memory as the model has it: where it lies transposed, a batch of matrices of K × ``across``."""
    return x_MK.view(-1, across, x_MK.shape[1]).mT.contiguous() if across else x_MK


@cache
def _compiled(option: Option | None) -> Callable[..., Tensor]:
    """Once for all shapes."""
    executor = None if option is None else executor_of(option.kernel, option.transform)
    forms = None if option is None else option.forms

    def run(
        x: Tensor,
        weight_NK: Tensor,
        codes: Tensor | None,
        scale: Tensor | None,
        bias_N: Tensor | None,
        vectors: TransformVectors | None,
    ) -> Tensor:
        is_transposed = x.ndim == 3
        x = x.relu()
        rows = x.mT if is_transposed else x
        if executor is None or forms is None or codes is None:
            y = nn.functional.linear(rows, weight_NK, bias_N)
        else:
            x_form, w_form = forms
            x_MK = rows.reshape(-1, rows.shape[-1])
            (x_cast,) = cast(TensorName.X, x_MK, (x_form,), vectors)
            w_cast = operand_of(w_form, codes, scale, weight_NK.shape)
            y_MN = executor.multiply(Role.FPROP, {x_form: x_cast}, {w_form: w_cast}, x.dtype, bias_N, vectors)
            y = y_MN.view(*rows.shape[:-1], y_MN.shape[-1])
        return (y.mT if is_transposed else y).relu()

    return torch.compile(run, dynamic=True, fullgraph=True)
