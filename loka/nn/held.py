"""Modules that a model also reaches by other ways than their names: what is put in their place would not run there."""

from collections.abc import Iterable

from torch import nn

from loka.core.errors import InvalidInput


def refuse_held_in_lists(model: nn.Module, replaced: Iterable[nn.Module]) -> None:
    """Raise where a plain list, tuple or dict of some module of ``model`` holds one that is about to be replaced: forward may
    go through that, and on with the old module."""
    wanted = {id(module) for module in replaced}
    names = {id(module): name for name, module in model.named_modules()}
    for owner_name, owner in model.named_modules():
        for attribute, value in vars(owner).items():
            if attribute in ("_modules", "_parameters", "_buffers"):
                continue
            inside = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
            found = next((names[id(item)] for item in inside if isinstance(item, nn.Module) and id(item) in wanted), None)
            if found is not None:
                where = f"{owner_name}.{attribute}" if owner_name else attribute
                raise InvalidInput(
                    f"{found} is to be replaced, and {where}, a plain {type(value).__name__}, holds it too: forward would "
                    f"go on with the old one. Make it an nn.ModuleList or nn.ModuleDict, or go by the modules' names"
                )
