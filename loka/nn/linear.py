"""LokaLinear: ``nn.Linear`` with a kernel for each of its three GEMMs."""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from loka.core.errors import InvalidInput, require_kind
from loka.core.gemm import Role, TensorName
from loka.core.recipe import Transform
from loka.kernels.casting import Stepper, cast, rewriter_of
from loka.kernels.executor import SiteExecutor, SiteKernels
from loka.kernels.operand import Form, Operand, operand_of
from loka.kernels.stepping import AdamStep
from loka.kernels.transforms import TransformVectors, center_shift, checked_vector
from loka.nn.site import run_site
from loka.nn.stand_in import note_own, take_over, why_not_stood_in_for
from loka.nn.weight_casts import (
    HELD,
    drop_casts,
    held_tensor,
    hold,
    holds_casts_of,
    holds_current_casts,
    keep_current,
    move_held,
    refresh_after_load,
    refuse_replicas,
    rewrite_casts,
    state_without_casts,
    store_casts,
    stored_cast,
    versions_kept_if_unwritten,
)
from loka.numerics.formats import format_of, is_format

_VECTOR = "transform_vector"
VECTOR_LOST = "the vector of a transform would be lost on the meta device"


class LokaLinear(nn.Linear):
    """A linear layer whose fprop, dgrad and wgrad each run on a kernel of their own.

    ``kernels`` names them (``loka.kernels.executor.SiteKernels``). Parameters, buffers and ``state_dict`` are those of
    ``nn.Linear``: the 8-bit copies of the weight, and the vector of a transform, are held beside them.
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
        note_own(self)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        kernels: SiteKernels,
        transform: Transform = Transform.NONE,
        vector: Tensor | None = None,
    ) -> Self:
        """A LokaLinear that shares the very parameters of ``linear``, so that its optimizer goes on as it was.

        ``vector`` is the transform's: the mean of each feature for ``center``, its power-of-two scale for ``rescale``.
        """
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module.in_features, module.out_features = linear.in_features, linear.out_features
        module.weight, module.bias = own_weight(linear), linear.bias
        module.training = linear.training
        module._bind(kernels, transform, vector)
        take_over(linear, module)
        return module

    def forward(self, input: Tensor) -> Tensor:
        require_input(input, self.weight)
        format_of(self.weight.dtype)  # refuses a dtype that is not cast
        operands, vectors = self._held_casts() if holds_current_casts(self) else self._made_casts()
        x_MK = as_read(input).reshape(-1, self.in_features)
        y_MN = run_site(self.executor, x_MK, self.weight, self.bias, operands, vectors)
        return y_MN.reshape(*input.shape[:-1], self.out_features)

    @torch.inference_mode(False)  # a cast made in that mode could not be written again outside of it
    @torch.no_grad()
    def refresh_weight_casts(self) -> None:
        """Cast the weight again, into the buffers that are there. A weight of a dtype that no caster reads has no casts: an
        error here would leave a model that is being converted half converted."""
        if not is_format(self.weight.dtype):
            drop_casts(self)
            return
        weight_NK, casts = self.weight.detach(), self._shift()
        for index, operand in enumerate(self._cast_weight()):
            assert operand.scale is not None
            casts |= {f"codes_{index}": operand.codes, f"scale_{index}": operand.scale}
        self._rewriter = rewriter_of(TensorName.W, weight_NK, self._cached_forms)
        if self._rewriter:
            casts["memory"] = self._rewriter.remember(weight_NK, self._cached_forms)
        store_casts(self, casts)

    @torch.inference_mode(False)
    @torch.no_grad()
    def recast_after_step(self) -> None:
        """The same after an optimizer's step, which moves a weight only a little: in one read, if a caster can."""
        weight_NK = self.weight.detach()
        rewriter = self._rewriter
        if rewriter is None or not holds_casts_of(self, weight_NK):
            self.refresh_weight_casts()
            return
        rewrite_casts(
            self, weight_NK, lambda: rewriter.rewriting(weight_NK, self._weight_operands(), stored_cast(self, "memory"))
        )
        store_casts(self, self._shift())

    def can_step(self) -> bool:
        weight_NK, rewriter = self.weight.detach(), self._rewriter
        if not isinstance(rewriter, Stepper) or self.transform is not Transform.NONE or not holds_casts_of(self, weight_NK):
            return False
        return rewriter.can_step(weight_NK, self._cached_forms)

    @torch.no_grad()
    def step_and_recast(self, adam: AdamStep) -> None:
        weight_NK, rewriter = self.weight.detach(), self._rewriter
        assert isinstance(rewriter, Stepper), "of what can_step"
        prepare = partial(rewriter.rewriting, weight_NK, self._weight_operands(), stored_cast(self, "memory"), adam)
        rewrite_casts(self, weight_NK, prepare, adam)

    @property
    def transform_vector(self) -> Tensor | None:
        """Of each feature of x, for the transform: its mean or its scale."""
        return held_tensor(self, _VECTOR) if self.transform is not Transform.NONE else None

    def _cast_weight(self) -> tuple[Operand, ...]:
        features_K = self.transform_vector
        vectors = None if features_K is None else TransformVectors(features_K)
        return tuple(cast(TensorName.W, self.weight.detach(), self._cached_forms, vectors))

    @torch.no_grad()
    def _made_casts(self) -> tuple[dict[Form, Operand], TransformVectors | None]:
        """Casts of a tensor that stands in the weight's place, for one call."""
        return dict(zip(self._cached_forms, self._cast_weight(), strict=True)), self._vectors(self._shift().get("shift"))

    def _held_casts(self) -> tuple[dict[Form, Operand], TransformVectors | None]:
        shift_N = stored_cast(self, "shift") if self.executor.transform_of(Role.FPROP) is Transform.CENTER else None
        return self._weight_operands(), self._vectors(shift_N)

    def _shift(self) -> dict[str, Tensor]:
        """What a centered site adds to its product, made from the weight as it is."""
        features_K = self.transform_vector
        if features_K is None or self.executor.transform_of(Role.FPROP) is not Transform.CENTER:
            return {}
        return {"shift": center_shift(self.weight.detach(), features_K)}

    def extra_repr(self) -> str:
        kernels = self.kernels
        transform = "" if self.transform is Transform.NONE else f", transform={self.transform}"
        return f"{super().extra_repr()}, fprop={kernels.fprop}, dgrad={kernels.dgrad}, wgrad={kernels.wgrad}{transform}"

    @torch.inference_mode(False)
    def _bind(self, kernels: SiteKernels, transform: Transform = Transform.NONE, vector: Tensor | None = None) -> None:
        format_of(self.weight.dtype)  # refuses a dtype that is not cast
        one_name = "SiteKernels.same(name), of loka.kernels.executor, takes one name for all three roles"
        require_kind(kernels, SiteKernels, "kernels", one_name)
        self.executor = SiteExecutor(kernels, transform)
        self.kernels, self.transform = kernels, self.executor.transform
        if (vector is None) != (self.transform is Transform.NONE):
            raise InvalidInput("center and rescale take a vector each, and only they do: pass transform and vector together")
        if vector is not None and self.weight.is_meta:
            raise InvalidInput(f"{VECTOR_LOST}: fill the model first")
        features_K = None if vector is None else checked_vector(self.transform, vector.to(self.weight.device), self.in_features)
        hold(self, _VECTOR, features_K)
        self._cached_forms: tuple[Form, ...] = tuple(
            form for form in self.executor.forms[TensorName.W] if form.spec.format.is_8bit
        )
        self.refresh_weight_casts()
        self.register_load_state_dict_post_hook(refresh_after_load)
        keep_current(self)

    def _weight_operands(self) -> dict[Form, Operand]:
        operands = {}
        for index, form in enumerate(self._cached_forms):
            codes, scale = stored_cast(self, f"codes_{index}"), stored_cast(self, f"scale_{index}")
            operands[form] = operand_of(form, codes, scale, self.weight.shape)
        return operands

    def _vectors(self, shift_N: Tensor | None) -> TransformVectors | None:
        features_K = self.transform_vector
        return None if features_K is None else TransformVectors(features_K, shift_N)

    def _apply(self, fn: Any, recurse: bool = True) -> "LokaLinear":
        """8-bit codes are made anew, and what else is held moves along, in the dtype that it has."""
        if self.transform_vector is not None:
            refuse_to_lose(self.transform_vector, fn)
        super()._apply(fn, recurse)
        move_held(self, fn)
        with versions_kept_if_unwritten(self):
            self.refresh_weight_casts()
        return self

    def _replicate_for_data_parallel(self) -> NoReturn:
        refuse_replicas()

    def __getstate__(self) -> dict[str, Any]:
        return state_without_casts(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if HELD not in state:
            raise InvalidInput("this was pickled whole by an older LoKA: load its weights, by state_dict, into a new model")
        super().__setstate__(state)
        self.refresh_weight_casts()
        keep_current(self)


def why_not_swapped(linear: nn.Linear) -> str | None:
    """Why no other module can stand in for the layer: a subclass may compute something else, and so may what it holds."""
    if type(linear) is not nn.Linear:
        return f"is a {type(linear).__name__}, and only torch.nn.Linear is swapped"
    if not isinstance(linear._parameters.get("weight"), nn.Parameter):
        return "holds no weight of its own, but makes one in every call: remove its weight norm or the like first"
    return why_not_stood_in_for(linear)


def refuse_to_lose(vector_K: Tensor, fn: Callable[[Tensor], Tensor]) -> None:
    """Call it before ``fn`` moves a layer that holds the vector of a transform: no checkpoint could bring it back."""
    if fn(vector_K.new_ones(1)).is_meta and not vector_K.is_meta:
        raise InvalidInput(f"{VECTOR_LOST}: loka.restore(model) before you move it there")


def own_weight(linear: nn.Linear) -> nn.Parameter:
    """The weight that an optimizer moves. A layer that holds more is refused, and so is a parametrized one, which makes its
    weight in every call."""
    weight = linear._parameters.get("weight")
    if not isinstance(weight, nn.Parameter):
        raise InvalidInput("the linear layer holds no weight of its own: remove its parametrization before it is replaced")
    if reason := why_not_stood_in_for(linear):
        raise InvalidInput(f"the linear layer {reason}")
    return weight


def output_dtype(x: Tensor) -> torch.dtype:
    """What a linear layer gives for ``x``: autocast's dtype inside it."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def as_read(x: Tensor) -> Tensor:
    """``x`` in the dtype in which a linear layer reads it: autocast's inside it, but for what autocast does not touch.

    Behind a norm, which autocast leaves in fp32, casts then read, and dgrad writes, half the bytes; torch.compile has the norm
    write them so.
    """
    return x.to(output_dtype(x)) if x.is_floating_point() and x.dtype is not torch.float64 else x


def input_of(args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Tensor:
    """What a linear layer was called with, from what its hooks are given."""
    return args[0] if args else kwargs["input"]


def has_rows(x: Tensor) -> bool:
    """Whether its rows are to be had: those of nested and of sparse tensors are not."""
    return x.layout is torch.strided and not x.is_nested


def require_rows(x: Tensor) -> None:
    if not has_rows(x):
        raise InvalidInput(
            "8-bit layers take no nested tensors, and no sparse ones: run them on x.values() or x.to_dense(), or leave this "
            "layer in high precision"
        )


def require_input(x: Tensor, weight_NK: Tensor) -> None:
    """Refuse what ``nn.Linear`` would refuse too, with what is expected instead."""
    in_features = weight_NK.shape[1]
    require_rows(x)
    if x.ndim == 0 or x.shape[-1] != in_features:
        raise InvalidInput(f"expected input of shape (..., {in_features}), got {tuple(x.shape)}")
    require_alike(x, weight_NK)


def require_alike(x: Tensor, weight_NK: Tensor) -> None:
    """Refuse an input that lies elsewhere than the weight, or, unless there is an autocast, is of another dtype."""
    if x.device != weight_NK.device:
        raise InvalidInput(f"input is on {x.device}, the weight on {weight_NK.device}: move one of them")
    if x.dtype != weight_NK.dtype and not torch.is_autocast_enabled(x.device.type):
        raise InvalidInput(f"input is {x.dtype}, the weight {weight_NK.dtype}: cast one of them, or run under torch.autocast")
