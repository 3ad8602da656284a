"""Modules that a model also reaches by other ways than their names: what is put in their place would not run there."""

from collections.abc import Iterable

from torch import nn

from loka.core.errors import InvalidInput
from loka.nn.stand_in import is_stand_in, users_attributes
from loka.nn.unwrap import is_compiled_wrapper
from loka.nn.within import within


def refuse_held_in_lists(model: nn.Module, replaced: Iterable[nn.Module]) -> None:
    """Raise where an attribute of some module of ``model`` that names no submodule, such as a plain list, holds one that is
    about to be replaced: forward may go through that, and on with the old module. What LoKA itself holds is not looked at."""
    names = {id(module): name for name, module in model.named_modules()}
    wanted = {id(module) for module in replaced} & names.keys()
    for owner_name, owner in model.named_modules():
        if is_compiled_wrapper(owner):
            continue  # a swap makes it compile what is put into it
        for attribute, value in (users_attributes(owner) if is_stand_in(owner) else vars(owner)).items():
            if attribute in ("_modules", "_parameters", "_buffers") or attribute.endswith("_hooks") or _is_ours(value):
                continue
            found = next((names[id(one)] for one in within(value, depth=4, objects=True) if id(one) in wanted), None)
            if found is not None:
                where = f"{owner_name}.{attribute}" if owner_name else attribute
                how = "put there past nn.Module" if isinstance(value, nn.Module) else f"a plain {type(value).__name__}"
                raise InvalidInput(
                    f"{found} is to be replaced, and {where}, {how}, holds it too: forward would go on with the old one. "
                    f"Make it an nn.ModuleList or nn.ModuleDict, or go by the modules' names"
                )


def _is_ours(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "loka" and not isinstance(value, nn.Module)
