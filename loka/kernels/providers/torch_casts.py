"""Casts by torch: the oracle's own arithmetic, compiled into one kernel for all forms on a GPU, eager on the CPU."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from loka.core.recipe import Scaling
from loka.kernels.casting import CASTERS, CastProblem
from loka.kernels.operand import Form, Operand, OperandSpec, operand_of, padded_size
from loka.numerics.scaling import Quantized, quantize

# The tensor and its transpose have the same scales, so one quantization serves both orders of axes.
_SYMMETRIC = (Scaling.TENSORWISE, Scaling.STATIC, Scaling.BLOCK_128X128)


@CASTERS.register("torch")
class TorchCaster:
    """Writes any form of any tensor on any device."""

    def why_not(self, form: Form, problem: CastProblem) -> str | None:
        return None

    def cast(self, tensor: Tensor, forms: Sequence[Form]) -> list[Operand]:
        forms = tuple(forms)
        if tensor.is_cuda and not torch.compiler.is_compiling():  # inside a user's graph, torch.compile fuses it there
            parts = _compiled_cast(tensor, forms)
        else:
            parts = quantize_forms(tensor, forms)
        return [operand_of(form, codes, scale, tensor.shape) for form, (codes, scale) in zip(forms, parts, strict=True)]


def quantize_forms(x: Tensor, forms: tuple[Form, ...]) -> list[tuple[Tensor, Tensor]]:
    """Codes (contracted axis contiguous, padded) and scales of each form."""
    symmetric: dict[tuple[object, ...], Quantized] = {}
    out = []
    for form in forms:
        spec = form.spec
        if spec.scaling in _SYMMETRIC:
            key = (spec.format, spec.scaling, spec.static_scale)
            if key not in symmetric:
                same = [other for other in forms if (other.spec.format, other.spec.scaling, other.spec.static_scale) == key]
                symmetric[key] = _quantize(_pad(x, *_multiples(same)), spec)
            codes, scale = _oriented(symmetric[key], form, x.shape)
        else:
            oriented = x.t() if form.transposed else x
            padded = _pad(oriented, spec.outer_multiple, spec.contraction_multiple)
            codes, scale, *_ = _quantize(padded, spec)
        if spec.scaling is Scaling.BLOCK_1X128:
            scale = scale.t().contiguous().t()  # cuBLAS reads these scales column by column
        # Viewed anew: cuBLAS reads the strides, and those of an axis of length 1 may be anything in a contiguous tensor.
        out.append((codes.contiguous().view(-1).view(codes.shape), scale))
    return out


def _quantize(x: Tensor, spec: OperandSpec) -> Quantized:
    return quantize(x, spec.format, spec.scaling, static_scale=spec.static_scale)


def _oriented(q: Quantized, form: Form, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """``q`` as ``form`` wants it: transposed or not, and cut to the padding of this form alone."""
    codes, scale = (q.codes.t(), q.scale.t()) if form.transposed else (q.codes, q.scale)
    outer, contraction = (shape[1], shape[0]) if form.transposed else shape
    outer = padded_size(outer, form.spec.outer_multiple)
    contraction = padded_size(contraction, form.spec.contraction_multiple)
    codes = codes[:outer, :contraction]
    if form.spec.scaling is Scaling.BLOCK_128X128:
        scale = scale[: -(-outer // 128), : -(-contraction // 128)]
    return codes, scale.contiguous()


def _multiples(forms: Sequence[Form]) -> tuple[int, int]:
    """The multiples that the stored tensor's rows and columns are padded to, so that each of ``forms`` can be cut from it."""
    rows = [form.spec.contraction_multiple if form.transposed else form.spec.outer_multiple for form in forms]
    cols = [form.spec.outer_multiple if form.transposed else form.spec.contraction_multiple for form in forms]
    return math.lcm(*rows), math.lcm(*cols)


def _pad(x: Tensor, row_multiple: int, col_multiple: int) -> Tensor:
    rows, cols = x.shape
    missing_rows, missing_cols = padded_size(rows, row_multiple) - rows, padded_size(cols, col_multiple) - cols
    return F.pad(x, (0, missing_cols, 0, missing_rows)) if missing_rows or missing_cols else x


def room_to_compile() -> AbstractContextManager[object]:
    """Lift torch's limit on compilations of one function: a model or a benchmark has more kinds of casts and blocks."""
    return torch._dynamo.config.patch(recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20)


@cache
def _compiler() -> Callable[[Tensor, tuple[Form, ...]], list[tuple[Tensor, Tensor]]]:
    return torch.compile(quantize_forms, fullgraph=True, dynamic=False)


_compiled_for: set[tuple[object, ...]] = set()


def _compiled_cast(x: Tensor, forms: tuple[Form, ...]) -> list[tuple[Tensor, Tensor]]:
    """Compiled once for a number of columns and any number of rows: features are fixed, batches are not."""
    x = x.detach()  # an alias of our own: the mark below must not stick to the caller's tensor
    torch._dynamo.maybe_mark_dynamic(x, 0)
    key = (x.shape, x.stride(), x.dtype, x.device, forms)
    if key in _compiled_for:
        return _compiler()(x, forms)
    with room_to_compile():
        parts = _compiler()(x, forms)
    _compiled_for.add(key)
    return parts
