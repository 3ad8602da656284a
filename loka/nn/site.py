"""One site under autograd: the executor's casts and GEMMs, with what backward needs saved in its cast form.

Axes:  M rows of the batch,  K in_features,  N out_features.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from loka.core.errors import InvalidInput
from loka.core.gemm import Role, TensorName
from loka.kernels.executor import SiteExecutor
from loka.kernels.operand import Form, Operand, operand_of
from loka.kernels.transforms import TransformVectors

Casts = Mapping[Form, Operand]


def run_site(
    executor: SiteExecutor,
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    weight_casts: Casts,
    vectors: TransformVectors | None = None,
) -> Tensor:
    """y = x·wᵀ + b by the executor's kernels, in the dtype of x, differentiable. ``weight_casts`` holds every 8-bit form of the
    weight."""
    learned = (x_MK, weight_NK, *(() if bias_N is None else (bias_N,)))
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in learned):
        # Not by way of autograd: it casts for a backward that never comes, and torch.compile loses its context here.
        refuse_unseen_derivatives(*learned)
        weight_casts = _with_high_precision(executor, weight_NK, weight_casts, Role.FPROP, vectors)
        x_casts = _cast(executor, TensorName.X, x_MK, (Role.FPROP,), vectors)
        with no_autocast(x_MK):
            return executor.multiply(Role.FPROP, x_casts, weight_casts, x_MK.dtype, bias_N, vectors)
    refuse_transforms()
    forms = tuple(weight_casts)
    tensors = [tensor for form in forms for tensor in (weight_casts[form].codes, weight_casts[form].scale)]
    features_K, shift_N = vectors or (None, None)
    return _Site.apply(x_MK, weight_NK, bias_N, features_K, shift_N, executor, forms, *tensors)


def refuse_transforms() -> None:
    """To be called before a Function of ours. Inside a transform torch would only say how to write the Function differently,
    or, compiled, take it for one without gradients."""
    if torch._C._are_functorch_transforms_active():
        raise InvalidInput(
            "8-bit layers have no derivatives by transforms of torch.func (grad, jacrev and the like): differentiate by "
            "autograd (backward, torch.autograd.grad), or in high precision, behind loka.restore(model)"
        )


def refuse_unseen_derivatives(*tensors: Tensor | None) -> None:
    """Codes have no derivative: what forward-mode AD, and autograd through a vmap, make of casts is wrong, and nobody would be
    told."""
    if torch.is_grad_enabled() and any(tensor is not None and _learns_outside_of_vmap(tensor) for tensor in tensors):
        raise InvalidInput(
            "8-bit layers have no gradients inside torch.vmap: run them under torch.no_grad(), or in high precision, behind "
            "loka.restore(model)"
        )
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise InvalidInput(
            "8-bit layers have no derivatives by forward-mode AD (torch.func.jvp and the like): run them in high precision, "
            "behind loka.restore(model)"
        )


def _learns_outside_of_vmap(tensor: Tensor) -> bool:
    """Inside a vmap a tensor says that it needs no gradient, whatever it is a batch of."""
    if torch.compiler.is_compiling():
        return torch._C._functorch.is_batchedtensor(tensor)  # the error then raised leads back to an eager call, which knows
    is_batched = False
    while torch._C._functorch.is_batchedtensor(tensor):
        tensor, is_batched = torch._C._functorch.get_unwrapped(tensor), True
    return is_batched and tensor.requires_grad


class _Site(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        features_K: Tensor | None,
        shift_N: Tensor | None,
        executor: SiteExecutor,
        cached_forms: tuple[Form, ...],
        *cached: Tensor,
    ) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        vectors = _vectors(features_K, shift_N)
        casts = _unflatten(weight_NK, cached_forms, cached)
        weight_casts = _with_high_precision(executor, weight_NK, casts, Role.FPROP, vectors)
        # x is cast once into what fprop reads and, where the weight is trained, into what wgrad will read.
        roles = (Role.FPROP, Role.WGRAD) if needs_weight else (Role.FPROP,)
        x_casts = _cast(executor, TensorName.X, x_MK, roles, vectors)
        with no_autocast(x_MK):
            y_MN = executor.multiply(Role.FPROP, x_casts, weight_casts, x_MK.dtype, bias_N, vectors)

        ctx.executor, ctx.x_dtype, ctx.bias_dtype = executor, x_MK.dtype, None if bias_N is None else bias_N.dtype
        ctx.shape, ctx.cached_forms, ctx.weight_dtype = x_MK.shape, cached_forms, weight_NK.dtype
        ctx.x_form = executor.operand_forms(Role.WGRAD)[1]
        saved_x = (x_casts[ctx.x_form].codes, x_casts[ctx.x_form].scale) if needs_weight else (None, None)
        # Where nothing in front learns, backward does not read the weight: it may be written before.
        ctx.save_for_backward(weight_NK if needs_x else None, features_K, *saved_x, *(cached if needs_x else ()))
        return as_output(y_MN)

    @staticmethod
    @once_differentiable  # codes have no derivative: a second backward would be wrong, so it is refused
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (dy_MN,) = grads
        executor: SiteExecutor = ctx.executor
        weight_NK, features_K, x_codes, x_scale, *cached = ctx.saved_tensors
        vectors = _vectors(features_K, None)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dx_MK = dw_NK = None
        roles = tuple(role for role, needed in ((Role.DGRAD, needs_x), (Role.WGRAD, needs_weight)) if needed)
        needs_sum = needs_bias or (needs_weight and executor.needs_dy_sum)
        with no_autocast(dy_MN):
            if needs_sum:
                dy_casts, dy_sum_N = executor.cast_and_sum(dy_MN, roles)
            else:
                dy_casts, dy_sum_N = executor.cast(TensorName.DY, dy_MN, roles), None
            if needs_x:
                casts = _unflatten(weight_NK, ctx.cached_forms, cached)
                casts = _with_high_precision(executor, weight_NK, casts, Role.DGRAD, vectors)
                dx_MK = executor.multiply(Role.DGRAD, dy_casts, casts, ctx.x_dtype, vectors=vectors)
            if needs_weight:
                x_casts = {ctx.x_form: operand_of(ctx.x_form, x_codes, x_scale, ctx.shape)}
                dw_NK = executor.multiply(Role.WGRAD, dy_casts, x_casts, ctx.weight_dtype, vectors=vectors, dy_sum_N=dy_sum_N)
        db_N = dy_sum_N.to(ctx.bias_dtype) if dy_sum_N is not None and needs_bias else None
        return (dx_MK, dw_NK, db_N, *(None for _ in ctx.needs_input_grad[3:]))


def as_output(y: Tensor) -> Tensor:
    """``y`` as a forward may return it, whatever op it comes from.

    Autograd forbids changing a view in place; and where an op returned what it was given, as ``.to`` does for a tensor's own
    dtype, a compiled graph of torch 2.11 hands zeros back for a gradient.
    """
    return y.detach()


def no_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Casts and products say their dtypes themselves. Where there is no autocast, leaving it would cost an eager call 15 µs."""
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _vectors(features_K: Tensor | None, shift_N: Tensor | None) -> TransformVectors | None:
    return None if features_K is None else TransformVectors(features_K, shift_N)


def _cast(
    executor: SiteExecutor,
    name: TensorName,
    tensor: Tensor,
    roles: tuple[Role, ...],
    vectors: TransformVectors | None = None,
) -> Casts:
    with no_autocast(tensor):
        return executor.cast(name, tensor, roles, vectors)


def _with_high_precision(
    executor: SiteExecutor, weight_NK: Tensor, casts: Casts, role: Role, vectors: TransformVectors | None
) -> Casts:
    """A high-precision form of the weight is a view or a change of dtype: made on the spot, never kept."""
    _, form = executor.operand_forms(role)
    return casts if form.spec.format.is_8bit else _cast(executor, TensorName.W, weight_NK, (role,), vectors)


def _unflatten(weight_NK: Tensor, forms: tuple[Form, ...], tensors: Sequence[Tensor]) -> dict[Form, Operand]:
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    return {form: operand_of(form, codes, scale, weight_NK.shape) for form, (codes, scale) in zip(forms, pairs, strict=True)}
