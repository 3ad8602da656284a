"""Planned sites and fused blocks for serving: what their forward reads, and nothing that only training needs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loka.core.errors import InvalidInput
from loka.core.gemm import Role, TensorName
from loka.core.recipe import Transform
from loka.dispatch.planned import PlannedLinear
from loka.kernels.casting import cast
from loka.kernels.operand import Operand
from loka.kernels.transforms import TransformVectors, center_shift
from loka.nn.block_reference import block_reference
from loka.nn.fused_block import FusedBlock, rows_read
from loka.nn.fused_function import ServedTensors, serve_chain
from loka.nn.fused_spec import why_not_here
from loka.nn.fused_steps import cast_weight
from loka.nn.linear import as_read, has_rows, output_dtype, refuse_to_lose, require_alike, require_rows
from loka.nn.site import no_autocast, refuse_unseen_derivatives
from loka.numerics.formats import is_format


class Frozen(nn.Module):
    """A linear layer without gradients that runs on the codes of its weight; the weight itself may be kept beside them.

    Where it is not, ``state_dict`` has the codes in its place, and ``weight`` still has its shape, dtype and device, which
    forwards ask for, with NaN for every value.
    """

    weight: Tensor
    bias: Tensor | None
    codes: Tensor
    scale: Tensor
    _is_stale = False  # the weight was given a dtype that is no format of ours: it is cast again once it has one
    _lost: frozenset[str] = frozenset()  # buffers that came back from the meta device without values

    def __init__(self, module: PlannedLinear | FusedBlock, *, keep_weight: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = module.in_features, module.out_features
        if keep_weight:
            self.register_parameter("weight", module._parameters.get("weight"))
        else:
            self._stand_in_for(module.weight.shape, module.weight)
        self.register_parameter("bias", module._parameters.get("bias"))
        self.register_load_state_dict_post_hook(Frozen._recast_after_load)

    @property
    def has_weight(self) -> bool:
        return "weight" in self._parameters

    @torch.inference_mode(False)
    def _stand_in_for(self, shape: torch.Size, like: Tensor) -> None:
        self.__dict__["weight"] = torch.full((), torch.nan, dtype=like.dtype, device=like.device).expand(shape)

    def extra_repr(self) -> str:
        dropped = "" if self.has_weight else ", without its high-precision weight"
        return f"in_features={self.in_features}, out_features={self.out_features}{dropped}"

    def _require_servable(self, input: Tensor) -> None:
        learns = (input, *self._parameters.values())
        if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in learns):
            raise InvalidInput("this model was frozen for serving and has no gradients: run it under torch.no_grad()")
        refuse_unseen_derivatives(*learns)
        if input.ndim == 0 or input.shape[-1] != self.in_features:
            raise InvalidInput(f"expected input of shape (..., {self.in_features}), got {tuple(input.shape)}")
        require_alike(input, self.weight)

    def _casts(self, weight_NK: Tensor) -> dict[str, Tensor | None]:
        """What serving reads of a weight, by the names of the buffers that hold it. Codes come last, so that they are written
        last, from a ``state_dict`` too: a kernel packs codes and scales again when the codes have changed."""
        raise NotImplementedError

    @torch.inference_mode(False)  # codes made in that mode could not be written again outside of it
    @torch.no_grad()
    def _hold(self, weight_NK: Tensor) -> None:
        for name, buffer in self._casts(weight_NK.detach()).items():
            self.register_buffer(name, buffer, persistent=not self.has_weight)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: Any,
        unexpected_keys: Any,
        error_msgs: list[str],
    ) -> None:
        if not self.has_weight and f"{prefix}codes" not in state_dict and f"{prefix}weight" in state_dict:
            state_dict = self._with_codes(state_dict, prefix, error_msgs)
        self._lost = frozenset(name for name in self._lost if f"{prefix}{name}" not in state_dict)
        codes = state_dict.get(f"{prefix}codes")
        if codes is not None and codes.dtype != self.codes.dtype:  # they would be taken for values
            error_msgs.append(f"{prefix}codes are {codes.dtype}, and by this model's plan {self.codes.dtype}")
            return
        if codes is not None and torch.__future__.get_swap_module_params_on_conversion():
            with torch.inference_mode(False):  # swapping takes no tensor that a kernel knows by weakref
                self._buffers["codes"] = self.codes.clone()
        others = local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(state_dict, prefix, *others)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _with_codes(self, state_dict: Mapping[str, Tensor], prefix: str, error_msgs: list[str]) -> dict[str, Tensor]:
        """What a model in high precision has saved, with this layer's codes in its weight's place. What it cannot know, such as
        the vector of a transform, is kept."""
        entries = dict(state_dict)
        held = {name: buffer for name, buffer in self._buffers.items() if name not in self._lost}
        weight_NK = entries.pop(f"{prefix}weight")
        if weight_NK.shape == self.weight.shape:
            dtype = next(dtype for dtype in (self.weight.dtype, weight_NK.dtype, torch.float32) if is_format(dtype))
            held |= self._casts(weight_NK.detach().to(self.weight.device, dtype))
        else:
            error_msgs.append(f"{prefix}weight is {tuple(weight_NK.shape)}, and this model's {tuple(self.weight.shape)}")
        return entries | {f"{prefix}{name}": tensor for name, tensor in held.items() if tensor is not None}

    def _recast_after_load(self, incompatible_keys: Any) -> None:
        """A checkpoint was loaded, into the weight if that was kept beside its codes."""
        if self.has_weight:
            self.refresh_weight_casts()

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh_weight_casts(self) -> None:
        """Cast the weight again, if it was kept: in place where codes lie on its device. If it was not, the codes may have been
        written, and whoever has packed them shall see that."""
        if not self.has_weight:
            if not self.codes.is_inference():
                torch.autograd.graph.increment_version(self.codes)
            return
        self._is_stale = not is_format(self.weight.dtype)
        if not self._is_stale:
            for name, made in self._casts(self.weight.detach()).items():
                if made is None:
                    continue
                if self.get_buffer(name).device == made.device:
                    self.get_buffer(name).copy_(made)
                else:
                    self._buffers[name] = made

    def _apply(self, fn: Any, recurse: bool = True) -> "Frozen":
        """Casts move with the module, but a change of dtype would take codes for values: they stay what they are."""
        buffers = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        if self.has_weight and "features" in buffers:
            refuse_to_lose(buffers["features"], fn)
        super()._apply(fn, recurse)
        for name, buffer in buffers.items():
            moved = self._buffers[name]
            assert moved is not None
            self._lost |= {name} if buffer.is_meta and not moved.is_meta else set()
            self._buffers[name] = torch.empty_like(buffer, device=moved.device) if buffer.is_meta else buffer.to(moved.device)
        if not self.has_weight:
            self._stand_in_for(self.weight.shape, fn(self.weight[:0]))
        elif self._is_stale:
            self.refresh_weight_casts()
        return self

    @torch.inference_mode(False)
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Buffers that were loaded or copied under inference_mode could not be written outside of it, and have no versions, by
        which a kernel knows that what it packed is still good."""
        super().__setstate__(state)
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.is_inference():
                self._buffers[name] = buffer.clone()


class FrozenLinear(Frozen):
    """fprop of a planned site."""

    features: Tensor | None  # of the transform
    shift: Tensor | None

    def __init__(self, planned: PlannedLinear, *, keep_weight: bool) -> None:
        super().__init__(planned, keep_weight=keep_weight)
        self.executor, self.kernel = planned.executor, planned.kernels.fprop
        self.rows = planned.row_limits(Role.FPROP)
        self._form = self.executor.operand_forms(Role.FPROP)[1]
        self.register_buffer("features", planned.transform_vector, persistent=not keep_weight)
        self._hold(planned.weight)

    def _casts(self, weight_NK: Tensor) -> dict[str, Tensor | None]:
        vectors = None if self.features is None else TransformVectors(self.features)
        (operand,) = cast(TensorName.W, weight_NK, (self._form,), vectors)
        shift_N = None
        if self.features is not None and self.executor.transform is Transform.CENTER:
            shift_N = center_shift(weight_NK, self.features)
        return {"scale": operand.scale, "shift": shift_N, "codes": operand.codes}

    def forward(self, input: Tensor) -> Tensor:
        self._require_servable(input)
        if self.has_weight and not self._takes(input):
            return F.linear(input, self.weight, self.bias)
        require_rows(input)
        x_MK = as_read(input).reshape(-1, self.in_features)
        with no_autocast(input):
            y_MN = self._multiply(x_MK)
        return y_MN.reshape(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fprop={self.kernel}"

    def _takes(self, input: Tensor) -> bool:
        """Whether the kernel takes the call. An exported program cannot choose by the number of rows: it pads them, as where
        the weight was dropped."""
        if not has_rows(input) or not is_format(self.weight.dtype):
            return False
        return torch.compiler.is_exporting() or self.rows.take(input.numel() // self.in_features)

    def _multiply(self, x_MK: Tensor) -> Tensor:
        vectors = None if self.features is None else TransformVectors(self.features, self.shift)
        weight = Operand(self.codes, self.scale, self.out_features, self.in_features, self._form.spec)
        x_casts = self.executor.cast(TensorName.X, x_MK, (Role.FPROP,), vectors)
        return self.executor.multiply(Role.FPROP, x_casts, {self._form: weight}, x_MK.dtype, self.bias, vectors)


class FrozenBlock(Frozen):
    """A fused block. As in training the first of a chain runs it whole, and those behind it pass on what they are given."""

    def __init__(self, block: FusedBlock, *, keep_weight: bool) -> None:
        super().__init__(block, keep_weight=keep_weight)
        assert block.chain is not None
        self.norm, self.activation, self.entry = block.norm, block.activation, block.entry
        self.chain, self.follows = block.chain, block.follows
        self.followers: tuple[FrozenBlock, ...] = ()
        self.why_reference = block.why_reference
        self._hold(block.weight)

    def _casts(self, weight_NK: Tensor) -> dict[str, Tensor | None]:
        held = cast_weight(weight_NK, transposed=False)
        return {"scale": held.scale_N, "codes": held.codes_NK}

    def forward(self, input: Tensor) -> Tensor:
        if self.follows:
            return input
        self._require_servable(input)
        blocks = (self, *self.followers)
        if input.numel() > 0 and all(block.why_reference is None for block in blocks):
            served = [ServedTensors(block.bias, block.codes, block.scale) for block in blocks]
            (y_MN,) = serve_chain(self.chain, rows_read(self.chain, input), served, output_dtype(input))
            return y_MN.reshape(*input.shape[:-1], y_MN.shape[-1])
        input = input if self.entry is None else self.entry(input)
        for block in blocks:
            input = block._reference(input)
        return input

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fused"

    def _reference(self, x: Tensor) -> Tensor:
        """What the kernels cannot run: empty batches, and any on another device."""
        if self.has_weight:
            return block_reference(x, self.weight, self.bias, self.norm, self.activation)
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self.out_features)
        raise InvalidInput(
            f"this block's weight was dropped when the model was frozen, and its kernels do not run here "
            f"({self.why_reference}): freeze it without drop_high_precision"
        )

    def refresh_weight_casts(self) -> None:
        super().refresh_weight_casts()
        self.why_reference = why_not_here(self.codes.device, self.weight.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> "FrozenBlock":
        super()._apply(fn, recurse)
        self.why_reference = why_not_here(self.codes.device, self.weight.dtype)
        return self
