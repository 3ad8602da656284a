"""``torch.optim.AdamW`` that writes the 8-bit copies of planned weights in the pass in which it writes the weights."""

import weakref
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from loka.kernels.stepping import AdamStep, settings_of
from loka.nn.weight_casts import HoldsWeightCasts, is_capturing, only_holders

# Values of a weight. Below, launching a step of its own takes longer than the read it saves. On an H200 step and casts took
# 0.87 times as long for weights of 1024×1024 and 0.80 for 4096×4096 (layers, 2026-11-18, by benchmarks/adamw.py); for 512×512
# 1.36 times, in a run of the day before that is not kept.
WORTH_IT = 2**20

_optimizers: "weakref.WeakSet[AdamW]" = weakref.WeakSet()


class _Settings:
    """What kernels read of a parameter group, kept on the device, where kernels that are launched again find new values."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.tensor = torch.zeros(count, dtype=torch.float32, device=device)
        self.values: list[float | None] = [None] * count  # None: written on the device itself
        self.captured = False  # by a graph, to which these settings belong from then on

    def write(self, values: list[float | None]) -> None:
        for index, value in enumerate(values):
            if value is not None and value != self.values[index]:
                self.tensor[index].fill_(value)  # a launch, which a graph may hold, and no wait
        self.values = values


class AdamW(torch.optim.AdamW):
    """The same steps and the same state, so that checkpoints of either load into the other.

    After a step of ``torch.optim.AdamW`` every weight that a plan runs in 8 bits is read once more, to be cast. This one casts
    in the pass that steps, for next to nothing, where the weight is FP32 and large and our own kernels cast it with one scale
    for all (or in a fused block one a row). All else is stepped by torch, in its fused form unless told otherwise: complex
    parameters, which that refuses, need ``fused=False``.
    """

    def __init__(self, params: Any, *args: Any, **options: Any) -> None:
        told = any(options.get(name) for name in ("foreach", "differentiable"))  # which fused forms refuse
        options.setdefault("fused", None if told else True)
        super().__init__(params, *args, **options)
        _optimizers.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _optimizers.add(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """How a step is computed is no state: fused steps stay fused when a checkpoint of others is loaded, which a GradScaler
        counts on."""
        own = ({"foreach": None, "fused": True} if group["fused"] else {} for group in self.param_groups)
        groups = [{**group, **kept} for group, kept in zip_longest(state_dict["param_groups"], own, fillvalue={})]
        super().load_state_dict({**state_dict, "param_groups": groups[: len(state_dict["param_groups"])]})

    def _init_group(
        self,
        group: dict[str, Any],
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
    ) -> bool:
        """torch gathers here what it is going to step: what we step ourselves is taken out."""
        gathered = params_with_grad, grads, exp_avgs, exp_avg_sqs, state_steps
        has_complex = super()._init_group(group, *gathered[:4], max_exp_avg_sqs, state_steps)
        holders = {} if self._torch_steps_all(group) else only_holders()
        own: list[tuple[HoldsWeightCasts, tuple[Tensor, ...]]] = []
        left: list[tuple[Tensor, ...]] = []
        for tensors in zip(*gathered, strict=True):
            holder = holders.get(id(tensors[0]))
            if holder is not None and _can_be_ours(*tensors) and holder.can_step():
                own.append((holder, tensors[1:]))
            else:
                left.append(tensors)
        if own:
            self._step_and_cast(group, own)
            for index, tensors in enumerate(gathered):
                tensors[:] = [parameter[index] for parameter in left]
        return has_complex

    def _torch_steps_all(self, group: dict[str, Any]) -> bool:
        unknown = group["amsgrad"] or group["maximize"] or group["differentiable"] or not group["decoupled_weight_decay"]
        scaled = getattr(self, "grad_scale", None) is not None
        # Tracing runs this code at once, but not torch's step: what we stepped here would be missing from the compiled step.
        traced = torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None
        hooked = bool(self._optimizer_step_post_hooks)  # they run before the hook that casts after a step, and may write .data
        return unknown or scaled or traced or hooked or any(map(torch.is_tensor, group["betas"]))

    def _step_and_cast(self, group: dict[str, Any], own: list[tuple[HoldsWeightCasts, tuple[Tensor, ...]]]) -> None:
        """``own``: with the holder of each weight its gradient, both averages and the number of steps."""
        found_inf, steps = getattr(self, "found_inf", None), [tensors[3] for _, tensors in own]
        torch._foreach_add_(steps, 1)
        settings = {device: self._settings(group, device) for device in {step.device for step in steps}}
        for holder, (gradient, average, square, step) in own:
            here = None if found_inf is None else found_inf.to(step.device, non_blocking=True)
            holder.step_and_recast(AdamStep(gradient, average, square, step, settings[step.device], here))
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf.to(step.device, non_blocking=True) for step in steps])

    def _settings(self, group: dict[str, Any], device: torch.device) -> Tensor:
        """Those of ``group`` as it is now. A captured graph goes on with those it was captured with, as torch's does: nobody
        else writes them. Only a learning rate that lies on the device is read anew in every step and replay."""
        lr, known_settings = group["lr"], self.__dict__.setdefault("_settings_of_groups", {})  # a copied optimizer has none
        on_device = torch.is_tensor(lr) and lr.device == device
        rate = 0.0 if on_device else float(lr)
        values: list[float | None] = [*settings_of(rate, group["betas"], group["eps"], group["weight_decay"])]
        values[0] = None if on_device else rate
        capturing = is_capturing(device)
        known: _Settings | None = known_settings.get((id(group), device))
        is_new = known is None or known.values != values
        if known is None or (is_new and (known.captured or capturing)):
            known = _Settings(device, len(values))
        known.write(values)
        if on_device:
            known.tensor[0].copy_(lr.reshape(()))
        known.captured |= capturing
        if is_new and capturing:  # written by replays: no eager step finds them
            self.__dict__.setdefault("_settings_of_graphs", []).append(known)
        else:
            known_settings[id(group), device] = known
        return known.tensor


def is_cast_in_step(weight: Tensor) -> bool:
    """Whether an existing ``AdamW`` casts ``weight`` in the pass that steps it, if the kernels it runs on have such a cast."""
    if not weight.requires_grad or not _can_be_ours(weight):
        return False
    for optimizer in list(_optimizers):
        for group in optimizer.param_groups:
            if any(parameter is weight for parameter in group["params"]):
                return _counts_beside(weight, group) and not optimizer._torch_steps_all(group)
    return False


def _counts_beside(weight: Tensor, group: dict[str, Any]) -> bool:
    """Whether torch counts steps where the weight lies, and our kernels can read them: else it does so on the CPU."""
    return weight.device.type == "cpu" or bool(group["fused"] or group["capturable"])


def _can_be_ours(weight: Tensor, *others: Tensor) -> bool:
    """Whether our kernels can read them, FP32 without gaps on one device, and it pays. Averages of another shape, loaded from
    another model, they would read past the end: torch says what is wrong with those."""
    if weight.numel() < WORTH_IT or any(tensor.shape != weight.shape for tensor in others[:-1]):
        return False
    alike = all(tensor.dtype == torch.float32 and tensor.device == weight.device for tensor in (weight, *others))
    return alike and all(tensor.is_contiguous() for tensor in (weight, *others))
