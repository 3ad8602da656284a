"""Modules that take another's place: what users hang on theirs, which a stand-in cannot keep or has to take over."""

from typing import Any

from torch import nn

from loka.core.errors import InvalidInput
from loka.nn.passing_hook import nothing
from loka.nn.weight_casts import CAST_OF, HELD

_OWN = "_own_names"  # on a stand-in, the names of the attributes that it has by itself
_COMPILED = "_compiled_call_impl"  # made by ``module.compile()``: it would go on with the module that it was made of
_NOT_TAKEN = (CAST_OF, HELD, _OWN, _COMPILED)  # the first three a stand-in may get later by itself


def why_not_stood_in_for(module: nn.Module, own: tuple[str, ...] = ("weight", "bias")) -> str | None:
    """Why nothing can take the place of a linear layer, norm or activation: it holds more than its ``own``."""
    held = {**module._parameters, **module._buffers, **module._modules}
    beside = [name for name, value in held.items() if value is not None and name not in own]
    if not beside:
        return None
    return f"holds {', '.join(beside)} too, which a module in its place would not: put that into a module around it"


def is_compiled(module: nn.Module) -> bool:
    """Whether it was compiled in place, by ``module.compile()``."""
    return vars(module).get(_COMPILED) is not None


def has_hooks(module: nn.Module) -> bool:
    """Whether it has hooks, other than those that do nothing: copies have these in place of a Probe's or a Guard's."""
    tables = (table for name, table in vars(module).items() if name.endswith("hooks") and isinstance(table, dict))
    return any(hook is not nothing for table in tables for hook in table.values())


def why_not_taken_over(old: nn.Module, new: nn.Module) -> str | None:
    """Why ``new`` cannot have what users put on ``old``: it has an attribute of that name."""
    taken = next((name for name in users_attributes(old) if hasattr(new, name)), None)
    if taken is None:
        return None
    return f"has an attribute {taken!r} put on it, which the {type(new).__name__} in its place has too: rename or remove it"


def take_over(old: nn.Module, new: nn.Module) -> None:
    """Give ``new``, which takes the place of ``old``, the plain attributes that users put on that: their forwards read them."""
    if why := why_not_taken_over(old, new):
        raise InvalidInput(why)
    note_own(new)
    vars(new).update(users_attributes(old))


def give_back_attributes(stand_in: nn.Module, original: nn.Module) -> None:
    """Give what users have put on ``stand_in``, as it is now, to the module whose place that took."""
    now = users_attributes(stand_in)
    for name in users_attributes(original):
        if name not in now:
            del vars(original)[name]
    vars(original).update(now)


def note_own(stand_in: nn.Module) -> None:
    """Whatever is on ``stand_in`` now is its own, if that was not noted before."""
    vars(stand_in).setdefault(_OWN, frozenset(vars(stand_in)))


def is_stand_in(module: nn.Module) -> bool:
    return _OWN in vars(module)


def users_attributes(module: nn.Module) -> dict[str, Any]:
    """What users put on a module, by name; parameters, buffers and submodules are not among it. Nor is a forward put on a
    user's own module: such a module is left alone."""
    own = vars(module).get(_OWN, (*vars(nn.Module()), *getattr(module, "__constants__", ()), "forward"))
    return {name: value for name, value in vars(module).items() if name not in own and name not in _NOT_TAKEN}
