"""A site with the norm and activation behind it as one fused kernel: its error and its time against the compiled block.

A layer with nothing behind it may be the end of a chain: it takes what the block in front hands on in FP8.

The Record knows the gradient of the linear layer's output, not of the block's. Taken for the latter it has the right zeros and
row scales, which are what backward's casts feel.

Each role's error is that of its own casts, as it is of kernels without a block: gradients are compared with exact ones at the
point that forward's casts led to. Against gradients at the exact point every activation with a kink would look unsafe: casts
move 1 % of relu's inputs across 0, which is an error of 0.3 in dgrad whichever way x and w were cast.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from loka.core.gemm import Role, SiteShape
from loka.core.recipe import Format, Scaling
from loka.core.site_record import SiteRecord
from loka.core.survey import BLOCK_KERNEL, BlockCandidate, Times
from loka.kernels.providers.torch_casts import room_to_compile
from loka.kernels.triton.share import has_powers
from loka.measure.block_parts import BlockShape, autocast_for, block_calls, build_block
from loka.measure.error import LOST_SAMPLES, OptionError, draw_tensors, is_zero, require_device, until_known, usual_rows
from loka.measure.failure import is_of_memory, told
from loka.measure.timing import BUDGET_S, copies_past_cache, time_together, whole_rotations
from loka.nn.block_reference import block_epilogue
from loka.nn.fused_block import FusedBlock
from loka.numerics.formats import torch_dtype
from loka.numerics.metrics import flushed_share, measure_error, misread_share, saturated_share, silenced_share
from loka.numerics.reference import gemm
from loka.numerics.scaling import Quantized, quantize


class Blocks:
    """Surveys blocks on one device; blocks of equal shape are timed once."""

    def __init__(
        self, dtype: Format, device: torch.device, left_out: str | None = None, failed: Mapping[BlockShape, str] | None = None
    ) -> None:
        """``left_out``: why the fused kernel is not to be run at all; ``failed``: the shapes whose trial failed, and why."""
        self._dtype, self._device, self._left_out, self._failed = dtype, device, left_out, failed or {}
        self._times: dict[BlockShape, dict[str, float]] = {}

    def survey(self, site: SiteRecord, rows: list[int], budget_s: float = math.inf) -> tuple[BlockCandidate, ...]:
        """The site as a block, or why it is none; nothing where it cannot be one."""
        if not _may_be_block(site):
            return ()
        shapes = {m: block_shape(site, m, self._dtype) for m in rows}
        try:
            block = build_block(shapes[rows[0]], site.weight_NK, site.bias_N, self._device)
            if reason := block if isinstance(block, str) else self._why_not(block, shapes):
                return (BlockCandidate(BLOCK_KERNEL, site.norm, site.activation, why_not=reason),)
            assert isinstance(block, FusedBlock)
            error, misread = self._error(site, block, budget_s)
            times = {m: self._time(shape, block) for m, shape in shapes.items()}
        except Exception as failure:  # any library's any error: the reason is the result
            require_device(BLOCK_KERNEL, self._device, told(failure))
            return (BlockCandidate(BLOCK_KERNEL, site.norm, site.activation, why_not=told(failure)),)
        return (_candidate(site, error, misread, times),)

    def _why_not(self, block: FusedBlock, shapes: Mapping[int, BlockShape]) -> str | None:
        failures = (self._failed[shape] for shape in shapes.values() if shape in self._failed)
        return next(failures, None) or self._left_out or block.why_reference

    def _error(self, site: SiteRecord, block: FusedBlock, budget_s: float) -> tuple[dict[Role, OptionError], float]:
        """Of every role, and the largest share of features that backward's casts misread."""
        errors = {role: OptionError() for role in site.roles}
        exact, misread = _Exact(block), 0.0
        samples = draw_tensors(site, 1, self._dtype, self._device)
        for index, tensors in enumerate(until_known(samples, errors.values(), budget_s)):
            if index < LOST_SAMPLES:
                errors[Role.FPROP].add_lost(*_lost(tensors.x, block.weight.detach()))
                if tensors.dy is not None:
                    misread = max(misread, exact.misread_backward(tensors.x, tensors.dy, site.roles))
            with autocast_for(block, torch_dtype(self._dtype)):
                got = _outputs(block, block.weight, tensors.x, tensors.dy)
            expected = exact.outputs(tensors.x, tensors.dy)
            for role, error in errors.items():
                if is_zero(role, tensors):
                    error.zeros += 1
                    continue
                error.samples.add(measure_error(got[role], expected[role], role))
            del got, expected  # a wide layer's gradients: the next sample needs the room
        return errors, misread

    def _time(self, shape: BlockShape, block: FusedBlock) -> dict[str, float]:
        if shape not in self._times:
            times = self._timed(shape, block)
            self._times[shape] = self._time(replace(shape, cast_in_step=False), block) if times is None else times
        return self._times[shape]

    def _timed(self, shape: BlockShape, block: FusedBlock) -> dict[str, float] | None:
        """None where memory is short but may do for a cast after a step: a step that casts takes many times the weight."""
        copies = copies_past_cache(block.weight.nbytes, self._device)
        try:
            calls = block_calls(shape, block, copies=copies)
            with room_to_compile():
                turns, budget_s = whole_rotations(copies), BUDGET_S[self._device.type]
                times = time_together(calls, self._device, turns=turns, budget_s=budget_s)
        except Exception as failure:
            if shape.cast_in_step and is_of_memory(failure):
                return None
            raise
        return {name: timing.median_us for name, timing in times.items()}


class _Exact:
    """The block at float64."""

    def __init__(self, block: FusedBlock) -> None:
        self._block = block
        self._weight_NK = block.weight.detach().double().requires_grad_()
        self._bias_N = None if block.bias is None else block.bias.detach().double()
        self._cast_weight = _by_rows(block.weight.detach())  # its codes: in float64 a wide layer takes gigabytes

    def outputs(self, x_MK: Tensor, dy_MN: Tensor | None) -> dict[Role, Tensor]:
        """The exact y, and the exact gradients at the product of x and w as they are cast."""
        with torch.no_grad():
            product_MN = self._product(x_MK.double())
            moved_MN = self._cast_product(x_MK) - product_MN
            y_MN = self._behind(product_MN)
        outputs = _outputs(lambda x: self._behind(self._product(x) + moved_MN), self._weight_NK, x_MK.double(), dy_MN)
        return outputs | {Role.FPROP: y_MN}

    def misread_backward(self, x_MK: Tensor, dy_MN: Tensor, roles: Collection[Role]) -> float:
        """The share of features that a cast with one scale for all values distorts: of x or dz, if wgrad reads them, or of w,
        in either order, if dgrad does."""
        with torch.no_grad():
            z_MN = self._product(x_MK.double())
        z_MN.requires_grad_()
        (dz_MN,) = torch.autograd.grad(self._behind(z_MN), z_MN, dy_MN.double())
        weight_NK = self._weight_NK.detach()
        powers = has_powers(self._block.in_features)
        read = {
            Role.WGRAD: [(x_MK, _by_one(x_MK, powers)), (dz_MN, _by_one(dz_MN, powers=True))],
            Role.DGRAD: [(w, _by_one(w, powers)) for w in (weight_NK, weight_NK.t())],
        }
        return max((misread_share(*pair).item() for role in roles for pair in read.get(role, ())), default=0.0)

    def _product(self, x_MK: Tensor) -> Tensor:
        return F.linear(x_MK, self._weight_NK)

    def _cast_product(self, x_MK: Tensor) -> Tensor:
        """Of both as forward casts them."""
        return gemm(_by_rows(x_MK), self._cast_weight)

    def _behind(self, product_MN: Tensor) -> Tensor:
        z_MN = product_MN if self._bias_N is None else product_MN + self._bias_N
        return block_epilogue(z_MN, self._block.norm, self._block.activation)


def _by_rows(tensor: Tensor) -> Quantized:
    """As a block reads its input and its weight in forward."""
    return quantize(tensor, Format.E4M3, Scaling.ROWWISE, powers=has_powers(tensor.shape[1]))


def _by_one(tensor: Tensor, powers: bool) -> Quantized:
    """As backward reads them, and the gradient: with one scale for all."""
    return quantize(tensor.float(), Format.E4M3, Scaling.TENSORWISE, powers=powers)


def _lost(x_MK: Tensor, weight_NK: Tensor) -> tuple[float, float, float]:
    """The shares of values that the casts flush and saturate, the larger of both operands', and of x's features silenced."""
    (x, x_cast), (w, w_cast) = ((tensor, _by_rows(tensor)) for tensor in (x_MK, weight_NK))
    flushed = max(flushed_share(x, x_cast).item(), flushed_share(w, w_cast).item())
    saturated = max(saturated_share(x, x_cast).item(), saturated_share(w, w_cast).item())
    return flushed, saturated, silenced_share(x, x_cast).item()


def is_fused(site: SiteRecord, dtype: Format, device: torch.device) -> bool:
    """Whether the fused kernel takes the site, with what follows it, on this device."""
    if not _may_be_block(site):
        return False
    block = build_block(block_shape(site, usual_rows(site), dtype), site.weight_NK, site.bias_N, device)
    return isinstance(block, FusedBlock) and block.why_reference is None


def _may_be_block(site: SiteRecord) -> bool:
    """A norm or an activation follows it; or it is no head, and follows a block that feeds nothing else."""
    return bool(site.norm or site.activation) or (site.producer is not None and not site.is_head)


def block_shape(site: SiteRecord, m: int, dtype: Format) -> BlockShape:
    kinds = (site.norm_kind if site.norm else None, site.activation_kind if site.activation else None)
    asked = site.roles if site.trains else tuple(Role)
    needs = (Role.DGRAD in asked, Role.WGRAD in asked)
    stored = (site.weight_format, site.has_bias)
    rest = (site.entry_block, site.cast_in_step, site.norm_block, site.norm_eps)
    return BlockShape(SiteShape(m, site.k, site.n), dtype, *stored, *kinds, *needs, *rest)


def _outputs(run: Callable[[Tensor], Tensor], weight_NK: Tensor, x_MK: Tensor, dy_MN: Tensor | None) -> dict[Role, Tensor]:
    """y, and dx and dw where there is a gradient."""
    x_MK = x_MK.detach().requires_grad_(dy_MN is not None)
    y_MN = run(x_MK)
    if dy_MN is None:
        return {Role.FPROP: y_MN.detach()}
    dx_MK, dw_NK = torch.autograd.grad(y_MN, (x_MK, weight_NK), dy_MN.to(y_MN.dtype))
    return {Role.FPROP: y_MN.detach(), Role.DGRAD: dx_MK, Role.WGRAD: dw_NK}


def _candidate(
    site: SiteRecord, errors: dict[Role, OptionError], misread_backward: float, times: dict[int, dict[str, float]]
) -> BlockCandidate:
    """Its times leave out the cast of the input, which a block in front may make needless."""

    def of(name: str, without: str | None = None) -> Times:
        return {m: max(0.0, us.get(name, 0.0) - us.get(without or "", 0.0)) for m, us in times.items()}

    return BlockCandidate(
        kernel=BLOCK_KERNEL,
        norm=site.norm,
        activation=site.activation,
        error={role: error.estimates() for role, error in errors.items()},
        flushed=errors[Role.FPROP].flushed,
        silenced=errors[Role.FPROP].silenced,
        misread_backward=misread_backward,
        input_cast_us=of("input_cast"),
        training_cast_us=of("training_cast"),
        forward_us=of("forward", without="input_cast"),
        training_us=of("training", without="training_cast"),
        weight_cast_us=of("weight_cast", without="step_without_cast"),
        baseline_forward_us=of("baseline_forward"),
        baseline_training_us=of("baseline_training"),
        epilogue_forward_us=of("epilogue_forward"),
        epilogue_training_us=of("epilogue_training"),
        **(_of_entry(site, times) if site.entry and all("entry_forward" in us for us in times.values()) else {}),
    )


def _of_entry(site: SiteRecord, times: dict[int, dict[str, float]]) -> dict[str, Any]:
    names = ("entry_forward", "entry_training", "entry_baseline_forward", "entry_baseline_training")
    return {"entry": site.entry} | {f"{name}_us": {m: us[name] for m, us in times.items()} for name in names}
