"""Keeping the 8-bit copies of weights current.

A weight is cast once a step, not once a call. Its copies are refreshed after every optimizer step that moved it, after
``load_state_dict``, after ``.to()``, and by ``refresh``. They cannot watch the weight: its version counter does not move
under fused AdamW or ``.data`` writes, and cannot be read in a compiled graph.
"""

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook


class HoldsWeightCasts(Protocol):
    weight: Tensor

    def refresh_weight_casts(self) -> None: ...


_holders: weakref.WeakSet[Any] = weakref.WeakSet()
_hook_installed = False


def keep_current(holder: HoldsWeightCasts) -> None:
    """Refresh ``holder``'s casts after each step of any optimizer that holds its weight."""
    global _hook_installed
    if not _hook_installed:
        register_optimizer_step_post_hook(_after_step)
        _hook_installed = True
    _holders.add(holder)


def refresh(model: nn.Module) -> None:
    """Cast all weights of ``model`` again: call it after changing them by other means than a ``torch.optim`` optimizer."""
    within = set(model.modules())
    for holder in list(_holders):
        if holder in within:
            holder.refresh_weight_casts()


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _holders:
        return
    moved = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for holder in list(_holders):
        if id(holder.weight) in moved:
            holder.refresh_weight_casts()
