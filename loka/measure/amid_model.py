"""A layer's forward as torch.compile makes it amid a model on a CPU.

There the cast of x becomes part of the operation in front of the layer, and scales and bias part of the one behind it. By
themselves, even compiled, they would be passes of their own. So the layer is timed between two ReLUs, by each option and as
torch runs it, and what counts is the difference. A model enters its compiled graph once for all of its layers; entering costs
as much as a small layer, and not the same by each option. So graphs of one such layer and of several are timed.

Axes:  M rows of the batch,  K in_features,  N out_features.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from loka.core.errors import InvalidInput
from loka.core.gemm import Role, TensorName
from loka.kernels.casting import cast
from loka.kernels.operand import operand_of
from loka.kernels.providers.torch_left import LEFT, from_the_left
from loka.kernels.transforms import TransformVectors
from loka.measure.failure import reason_of
from loka.measure.parts import Option, SiteParts, executor_of

SEVERAL = 3  # layers in a graph: as many as weights that are rotated
# What is more is noise. 8-bit instructions multiply four values where those of FP32 multiply one. From the left a layer is
# spared turning its operands (it and two ReLUs ran 1.3 to 1.5 times as fast, a Xeon without VNNI, 2026-11-19).
MOST_GAIN, MOST_EXACT_GAIN = 4.0, 2.0


def require_compiler() -> None:
    """Refuse to measure a compiled model where torch.compile is switched off, or has nothing to compile with."""
    try:
        _, is_compiled = torch.compile(_compiles)(torch.ones(64))
    except Exception as failure:  # of torch's many kinds
        raise InvalidInput(
            f"torch.compile does not work here ({reason_of(failure)}). It needs a C++ compiler (Debian: `apt install g++`). "
            f"Or measure without `compiled`"
        ) from failure
    if not is_compiled:
        raise InvalidInput(
            "torch.compile is switched off here, by TORCHDYNAMO_DISABLE or torch.compiler.set_stance: switch it on, or measure "
            "without `compiled`"
        )


def _compiles(x: Tensor) -> tuple[Tensor, bool]:
    return x.sin(), torch.compiler.is_compiling()


def plain_layer(parts: SiteParts, across: int | None) -> Callable[[int], Tensor]:
    """The layer alone, as torch runs it. ``across`` is that of the site's facts."""
    x = _as_it_lies(parts.tensors.x, across)
    x = x.mT if across else x
    weights, bias_N = _parameters(parts)
    return lambda turn: nn.functional.linear(x, weights[turn % len(weights)], bias_N)


def inputs_of(parts: SiteParts, across: int | None) -> list[Tensor]:
    """An x for each of several layers: all graphs read the same, for those of a wide layer take gigabytes."""
    x = _as_it_lies(parts.tensors.x, across)
    return [x, *(x.clone() for _ in range(1, SEVERAL))]


def between_relus(
    parts: SiteParts, option: Option | None, inputs: Sequence[Tensor], *, feeds_product: bool = False
) -> Callable[[int], list[Tensor]]:
    """One graph of a layer for each of ``inputs``, by ``option`` or as torch runs it, each between two ReLUs and with a weight
    that no other has. The weights were cast before, as ``freeze`` does it. ``feeds_product`` is that of the site's facts."""
    turns, lies = range(len(inputs)), Lies(inputs[0].ndim == 3, feeds_product)
    if option is None:
        run, (weights, bias_N) = _compiled_by_torch(lies), _parameters(parts)
        return lambda _: run(inputs, weights[: len(inputs)], bias_N)
    run, (_, form) = _compiled(option, lies), option.forms
    casts = [parts.operand(TensorName.W, form, turn) for turn in turns]
    codes, scales = [cast.codes for cast in casts], [cast.scale for cast in casts]
    vectors = [parts.vectors_of(option.transform, turn) for turn in turns]
    shape = tuple(parts.tensors.weights[0].shape)
    return lambda _: run(inputs, codes, scales, shape, parts.tensors.bias, vectors)


def _parameters(parts: SiteParts) -> tuple[list[Tensor], Tensor | None]:
    """In the dtype of x: those of a model that serves under autocast are cast once."""
    tensors = parts.tensors
    dtype = tensors.x.dtype
    return [weight_NK.to(dtype) for weight_NK in tensors.weights], None if tensors.bias is None else tensors.bias.to(dtype)


def _as_it_lies(x_MK: Tensor, across: int | None) -> Tensor:
    """In memory as the model has it: where it lies transposed, a batch of matrices of K × ``across``."""
    return x_MK.view(-1, across, x_MK.shape[1]).mT.contiguous() if across else x_MK


class Lies(NamedTuple):
    """How a layer's x and output lie in the model."""

    across: bool  # x, and then the output too where it is read,
    feeds_product: bool  # unless a product reads that: it takes it row by row


@cache
def _compiled_by_torch(lies: Lies) -> Callable[..., list[Tensor]]:
    def run(inputs: Sequence[Tensor], weights: Sequence[Tensor], bias_N: Tensor | None) -> list[Tensor]:
        return _one_by_one(inputs, lambda x, turn: nn.functional.linear(x, weights[turn], bias_N), lies)

    return _compile(run, lies)


@cache
def _compiled(option: Option, lies: Lies) -> Callable[..., list[Tensor]]:
    executor, (x_form, w_form) = executor_of(option.kernel, option.transform), option.forms

    def run(
        inputs: Sequence[Tensor],
        codes: Sequence[Tensor],
        scales: Sequence[Tensor | None],
        shape: Sequence[int],
        bias_N: Tensor | None,
        vectors: Sequence[TransformVectors | None],
    ) -> list[Tensor]:
        def layer(x: Tensor, turn: int) -> Tensor:
            if option.kernel == LEFT:
                return from_the_left(x, codes[turn], bias_N, in_memory=lies.feeds_product)
            x_MK = x.reshape(-1, x.shape[-1])
            (x_cast,) = cast(TensorName.X, x_MK, (x_form,), vectors[turn])
            w_cast = operand_of(w_form, codes[turn], scales[turn], shape)
            y_MN = executor.multiply(Role.FPROP, {x_form: x_cast}, {w_form: w_cast}, x.dtype, bias_N, vectors[turn])
            return y_MN.view(*x.shape[:-1], y_MN.shape[-1])

        return _one_by_one(inputs, layer, lies)

    return _compile(run, lies)


def _one_by_one(inputs: Sequence[Tensor], layer: Callable[[Tensor, int], Tensor], lies: Lies) -> list[Tensor]:
    """ReLU, layer, ReLU for every x. Each waits for the one before it, as in a model: otherwise casts of all would be made
    first, and be out of the cache when they are read."""
    outputs: list[Tensor] = []
    for turn, x in enumerate(inputs):
        x = (x + 0 * outputs[-1][(0,) * x.ndim] if outputs else x).relu()
        y = layer(x.mT if lies.across else x, turn)
        outputs.append((y.mT if lies.across and not lies.feeds_product else y).relu())
    return outputs


def _compile(run: Callable[..., list[Tensor]], lies: Lies) -> Callable[..., list[Tensor]]:
    """Once for all shapes; but across, code for unknown sizes takes five to twelve times as long as that for known ones."""
    return torch.compile(run, dynamic=not lies.across, fullgraph=True)
