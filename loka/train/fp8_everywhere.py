"""Low precision without a choice: one kernel at every linear layer but the prediction heads. LoKA is compared with this."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from loka.core.gemm import GemmProblem, Role, SiteShape
from loka.dispatch.frozen import FrozenLinear
from loka.dispatch.planned import PlannedLinear
from loka.kernels.contract import KERNELS, why_not
from loka.kernels.device import device_of
from loka.kernels.executor import SiteKernels
from loka.nn.blocks import Block, find_blocks
from loka.nn.linear import LokaLinear, input_of
from loka.numerics.formats import format_of


@dataclass(frozen=True)
class Everywhere:
    """Which sites were moved to the kernel, and why the others were not."""

    moved: tuple[str, ...]
    left: Mapping[str, str] = field(default_factory=dict)  # site → reason


def apply_everywhere(model: nn.Module, example: tuple[Any, ...], kernel: str, *, trains: bool = True) -> Everywhere:
    """Swap every linear layer of ``model`` for one that runs all its roles on ``kernel``, in place; heads stay.

    ``example`` are the arguments of one forward call with as many rows as the model will see: a kernel may refuse a shape.
    Every layer that the kernel takes is moved, whether that pays and is precise enough or not. A model that never trains
    (``trains=False``) holds codes in place of its weights, as a frozen one does.
    """
    found = find_blocks(model, example)
    rows = _rows_of_calls(model, example)
    roles = tuple(Role) if trains else (Role.FPROP,)
    moved, left = [], {}
    for block in found:
        site = model.get_submodule(block.site)
        assert isinstance(site, nn.Linear)
        reason = "is a prediction head" if block.is_head else _refusal(site, rows.get(block.site), kernel, roles)
        if reason:
            left[block.site] = reason
        else:
            parent, _, name = block.site.rpartition(".")
            moved_site = LokaLinear.from_linear(site, SiteKernels.same(kernel)) if trains else _served(site, kernel, block)
            setattr(model.get_submodule(parent), name, moved_site)
            moved.append(block.site)
    return Everywhere(tuple(moved), left)


def _served(site: nn.Linear, kernel: str, block: Block) -> FrozenLinear:
    kernels = SiteKernels(kernel, "torch.fp32", "torch.fp32")  # it has no gradients
    planned = PlannedLinear.from_linear(site, kernels)
    return FrozenLinear(planned, keep_weight=block.read_by is not None)


def _refusal(site: nn.Linear, rows: int | None, kernel: str, roles: tuple[Role, ...]) -> str | None:
    if rows is None:
        return "is never called"
    shape = SiteShape(rows, site.in_features, site.out_features)
    where, out = device_of(site.weight.device), format_of(site.weight.dtype)
    problems = (GemmProblem.of(role, shape, out, where) for role in roles)
    reasons = (why_not(KERNELS.get(kernel), problem) for problem in problems)
    return next((reason for reason in reasons if reason), None)


def _rows_of_calls(model: nn.Module, example: tuple[Any, ...]) -> dict[str, int]:
    """How many rows each linear layer is called with, at most."""
    rows: dict[str, int] = {}

    def note(name: str, x: torch.Tensor) -> None:
        rows[name] = max(rows.get(name, 0), x.numel() // x.shape[-1])

    see_inputs(model, example, note)
    return rows


def see_inputs(model: nn.Module, example: tuple[Any, ...], note: Callable[[str, torch.Tensor], None]) -> None:
    """Run ``model`` once, and call ``note`` with the name and the input of every linear layer that is called."""
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: note(name, input_of(args, kwargs)), with_kwargs=True
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        with torch.no_grad():
            model(*example)
    finally:
        for handle in handles:
            handle.remove()
