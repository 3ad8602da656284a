"""The user's own model and the arguments of a call, whatever they come wrapped in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from loka.core.errors import InvalidInput, require_kind

Example = tuple[Any, ...] | Mapping[str, Any]  # arguments of forward: in their order, or by name


@dataclass(frozen=True)
class Arguments:
    """Those of one call."""

    args: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)


def arguments_of(example: Example | Arguments) -> Arguments:
    if isinstance(example, Arguments):
        return example
    if isinstance(example, tuple):
        return Arguments(example)
    if isinstance(example, Mapping) and all(isinstance(name, str) for name in example):
        return Arguments(keywords=example)
    raise InvalidInput(
        f"example must be a tuple of forward's arguments, such as (batch,), or a dict of them by name, "
        f"got a {type(example).__name__}"
    )


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Whether ``torch.compile(module)`` made it."""
    return "dynamo_ctx" in vars(module)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside torch.compile's, DistributedDataParallel's, and one that averages weights."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod  # pyrefly: ignore[bad-assignment]
        elif isinstance(model, nn.parallel.DistributedDataParallel | AveragedModel):
            model = model.module
        else:
            require_kind(model, nn.Module, "the model", "give the model itself")
            return model
