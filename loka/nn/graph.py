"""A model's data flow in calls of modules and functions: who reads whose output.

Two ways lead to it: one recorded run of the model on an example (``graph_run``), which sees whatever Python does, and a
symbolic trace (``graph_trace``), which needs no example and covers the parts of the model that can be traced.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from torch import nn
from torch.nn import functional
from torch.nn.modules import activation, batchnorm, dropout, instancenorm

from loka.nn.block_norm import BlockNorm


class Kind(StrEnum):
    """What a call is to a site in front of it."""

    SITE = "site"
    NORM = "norm"
    ACTIVATION = "activation"
    ADD = "add"  # of two computed tensors: a residual
    PASS = "pass"  # the same values in another shape or dtype, or dropout
    OTHER = "other"
    INPUT = "input"
    OUTPUT = "output"  # of the whole model
    UNKNOWN = "unknown"  # a part of the model that could not be traced


KEPT = "attribute"  # the name of the call that reads what forward leaves in attributes of its modules


class Method(StrEnum):
    RUN = "run"  # recorded while the model ran on an example
    TRACE = "trace"  # symbolic, the whole model in one piece
    PARTS = "parts"  # symbolic, in the pieces that could be traced


@dataclass(frozen=True)
class Call:
    """One call of a leaf module or a function; ``reads`` are the places in ``Graph.calls`` whose output it takes."""

    kind: Kind
    name: str  # the module's fully qualified name, or the function's
    is_module: bool
    inside: str  # the module whose forward makes the call; "" is the model itself
    reads: tuple[int, ...] = ()


@dataclass(frozen=True)
class Graph:
    """All calls of one forward pass, each behind those it reads; or of the pieces that could be traced."""

    calls: tuple[Call, ...]
    method: Method
    untraceable: dict[str, str]  # modules whose forward could not be traced → why; empty for a whole graph
    parameters_read: dict[str, str]  # parameters that a function reads past their own module → that function's name
    read_past: frozenset[str] = frozenset()  # modules that change their input in place, and whose input is then read again

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each call, those that read its output."""
        readers: list[list[int]] = [[] for _ in self.calls]
        for index, call in enumerate(self.calls):
            for read in call.reads:
                readers[read].append(index)
        return tuple(map(tuple, readers))

    @cached_property
    def _calls_by_module(self) -> dict[str, list[int]]:
        calls: dict[str, list[int]] = {}
        for index, call in enumerate(self.calls):
            if call.is_module:
                calls.setdefault(call.name, []).append(index)
        return calls

    def calls_of(self, module: str) -> list[int]:
        return self._calls_by_module.get(module, [])

    def is_known(self, module: str) -> bool:
        """Whether the graph shows every call of ``module``: all that it lies in was traced."""
        return not any(contains(part, module) for part in self.untraceable)


def contains(module: str, name: str) -> bool:
    """Whether ``name`` lies inside ``module``, both fully qualified."""
    return not module or name.startswith(f"{module}.")


_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, BlockNorm, batchnorm._BatchNorm, instancenorm._InstanceNorm)
_ACTIVATIONS = tuple(getattr(activation, name) for name in activation.__all__ if name != "MultiheadAttention")
_PASSING_MODULES = (dropout._DropoutNd, nn.Flatten, nn.Unflatten)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

_NORM_FUNCTIONS = {name for name in functional.__dict__ if name.endswith("_norm")}
_ACTIVATION_FUNCTIONS = {name.lower() for name in activation.__all__}  # written without underscores
_SHAPES = {"contiguous", "flatten", "reshape", "reshape_as", "squeeze", "unflatten", "unsqueeze", "view", "view_as"}
_COPIES = {"bfloat16", "clone", "data", "detach", "double", "float", "half", "to", "type", "type_as"}


def kind_of_module(module: nn.Module) -> Kind | None:
    """None for a module that is looked into rather than taken as one call.

    A class of the user's own whose name ends in Norm counts as a norm, so that nobody puts a second one behind it; one that
    holds linear layers does not.
    """
    if isinstance(module, nn.Linear):
        return Kind.SITE
    if isinstance(module, _NORMS) or (type(module).__name__.endswith("Norm") and _is_leaf_of_theirs(module)):
        return Kind.NORM
    if isinstance(module, _PASSING_MODULES):
        return Kind.PASS
    if isinstance(module, _ACTIVATIONS):
        return Kind.ACTIVATION
    return Kind.OTHER if is_from_torch(module) else None


def _is_leaf_of_theirs(module: nn.Module) -> bool:
    return not is_from_torch(module) and not any(isinstance(part, nn.Linear) for part in module.modules())


def changes_shape_alone(call: Call, model: nn.Module) -> bool:
    """Whether ``call`` hands on the values it reads as they are, in their order, however they lie in memory."""
    if call.is_module:
        return isinstance(model.get_submodule(call.name), nn.Flatten | nn.Unflatten)
    return call.name in _SHAPES - {"view", "view_as"}


def is_from_torch(module: nn.Module) -> bool:
    """A module of ``torch.nn`` that computes something of its own, so no container."""
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, _CONTAINERS)


def _is_made_from_torch(module: nn.Module) -> bool:
    """As ``is_from_torch``, or of a class derived from such a one, whose forward may be torch's."""
    return not isinstance(module, _CONTAINERS) and any(
        base.__module__.startswith("torch.nn.") and base is not nn.Module for base in type(module).__mro__
    )


def names_inside_torch(model: nn.Module) -> dict[str, str]:
    """Parts of torch's own composite modules, such as an encoder layer, and of classes derived from those → the class, which
    reads its parts' parameters itself."""
    return {
        f"{name}.{part}" if name else part: type(module).__name__
        for name, module in model.named_modules()
        if _is_made_from_torch(module)
        for part, _ in module.named_modules()
        if part
    }


def kind_of_function(name: str, n_reads: int) -> Kind:
    if name in _NORM_FUNCTIONS:
        return Kind.NORM
    if name.replace("_", "") in _ACTIVATION_FUNCTIONS:
        return Kind.ACTIVATION
    if name in _SHAPES | _COPIES or "dropout" in name:
        return Kind.PASS
    return Kind.ADD if name == "add" and n_reads > 1 else Kind.OTHER


def plain_name(function: str) -> str:
    """``add`` for ``add``, ``add_``, ``__add__``, ``__radd__``, ``__iadd__`` and ``add.default``."""
    name = function.partition(".")[0].strip("_")
    is_operator = function.startswith("__")
    return name[1:] if is_operator and name[:1] in "ir" and name[1:] in ("add", "sub", "mul", "truediv", "matmul") else name
