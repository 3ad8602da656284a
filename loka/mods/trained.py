"""Does a model look trained? Mods change what it computes, so its weights would be lost."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def evidence_of_training(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> str | None:
    """The first sign of training found, or None.

    Signs are: an optimizer that has made steps, a parameter with a gradient, a norm whose parameters differ from feature to
    feature, a BatchNorm that has seen batches, a bias of a linear layer that is neither constant nor inside the ±1/√in_features
    it starts from. A model without norms that has trained for a few steps only may show none.
    """
    if any(_has_stepped(state) for optimizer in optimizers for state in optimizer.state.values()):
        return "its optimizer has made steps"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            return f"{name} has a gradient"
    for name, module in model.named_modules():
        if sign := _sign_of_training(module):
            return f"{name or 'the model'} ({type(module).__name__}) {sign}"
    return None


def _has_stepped(state: dict[str, object]) -> bool:
    """By the count of steps where there is one; an optimizer without has zeros, or nothing, before its first."""
    values = [state["step"]] if "step" in state else list(state.values())
    return any(bool(value.any()) if isinstance(value, Tensor) else bool(value) for value in values)


def _sign_of_training(module: nn.Module) -> str | None:
    if isinstance(module, _BatchNorm) and module.num_batches_tracked is not None and module.num_batches_tracked > 0:
        return "has seen batches"
    if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm | _BatchNorm):
        for name, parameter in module.named_parameters(recurse=False):
            if not _is_constant(parameter):
                return f"has a {name} that differs from feature to feature"
    if isinstance(module, nn.Linear) and module.bias is not None and not _is_constant(module.bias):
        bound = 1 / math.sqrt(max(module.in_features, 1))
        if module.bias.abs().max().item() > 1.01 * bound:  # 1 % for initial values rounded to bf16
            return f"has a bias outside its initial ±{bound:.3g}"
    return None


@torch.no_grad()
def _is_constant(parameter: Tensor) -> bool:
    return parameter.is_meta or parameter.numel() == 0 or bool((parameter == parameter.flatten()[0]).all())
