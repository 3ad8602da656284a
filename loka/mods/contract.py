"""What a Mod is, and the registry of them."""

from dataclasses import dataclass
from typing import Protocol

from torch import nn

from loka.core.registry import Registry
from loka.nn.blocks import FoundBlocks
from loka.nn.stand_in import has_hooks, why_not_stood_in_for


@dataclass(frozen=True)
class Place:
    """A module of the user's model, by its fully qualified name, and what is known of its neighbours."""

    name: str
    module: nn.Module
    found: FoundBlocks


class Mod(Protocol):
    """One change of a model, made module by module.

    ``concerns`` is about the kind of module, subclasses and look-alikes included; ``why_not`` says why one of them cannot be
    changed, and the report prints it. Neither of these changes anything, nor do ``change`` and ``removes``.
    """

    default: bool  # made unless others are asked for by name
    order: int  # of several Mods on one module the lowest goes first
    replaces: bool  # puts another module in its place, instead of changing the one there
    functions: frozenset[str]  # function calls it would change if they were modules

    def concerns(self, place: Place) -> bool: ...

    def why_not(self, place: Place) -> str | None: ...

    def change(self, place: Place) -> tuple[str, str]:
        """What is there, and what will be."""
        ...

    def removes(self, place: Place) -> tuple[str, ...]:
        """The module's own parameters that go."""
        ...

    def replace(self, place: Place) -> nn.Module:
        """What stands there from now on: a new module, or the same one changed."""
        ...


MODS: Registry[Mod] = Registry("mod", "loka.mods")


def why_not_this_type(module: nn.Module, *types: type[nn.Module]) -> str | None:
    """Only the very types are changed: a subclass may compute something else, and rely on what a Mod takes away."""
    if type(module) in types:
        return None
    if hasattr(module, "parametrizations"):
        return "is parametrized"
    wanted = " and ".join(f"{kind.__module__.partition('.modules')[0]}.{kind.__name__}" for kind in types)
    return f"is a {type(module).__name__}: only {wanted} {'are' if len(types) > 1 else 'is'} changed"


def why_not_replaced(module: nn.Module) -> str | None:
    """A new module has none of the hooks that were put on the old one, and nothing that it holds beside weight and bias."""
    return "has hooks, which a new module would lose" if has_hooks(module) else why_not_stood_in_for(module)
