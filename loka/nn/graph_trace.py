"""The data flow of a model without an example, by ``torch.fx``: the whole model, or the largest parts that can be traced.

A forward that branches on its input cannot be traced, but the modules inside it usually can: a module at fault is taken as
one opaque call where its parent is traced, and its children are pieces of their own.
"""

import inspect
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch.fx
from torch import nn

from loka.nn.graph import KEPT, Call, Graph, Kind, Method, kind_of_function, kind_of_module, plain_name
from loka.nn.kept_state import left_as_it_was, random_state_kept, rid_of
from loka.nn.within import within

# What these give is no tensor: reading it is not reading the values.
_FACTS = {"shape", "dtype", "device", "ndim", "layout", "requires_grad", "size", "dim", "stride", "numel", "is_floating_point"}


def trace(model: nn.Module) -> Graph:
    """The calls of ``model``'s forward as far as they can be traced; ``untraceable`` names what could not, and why."""
    search = _Search(dict(model.named_modules()))
    with ExitStack() as stack:
        stack.enter_context(left_as_it_was(model))
        stack.enter_context(rid_of(torch.fx.Proxy, model))
        stack.enter_context(random_state_kept(model))  # a trace draws what forward draws
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # a forward that warns should warn its caller, not us
        search.try_tracing("")
    builder = _GraphBuilder(search)
    builder.add_piece("", owner=None)
    method = Method.PARTS if search.untraceable else Method.TRACE
    return Graph(tuple(builder.calls), method, search.untraceable, builder.parameters_read)


@dataclass
class _Search:
    """Which modules can be traced, each with its opaque children left out."""

    modules: dict[str, nn.Module]
    graphs: dict[str, torch.fx.Graph] = field(default_factory=dict)
    kept: dict[str, list[torch.fx.Node]] = field(default_factory=dict)  # what forward put into attributes of modules
    untraceable: dict[str, str] = field(default_factory=dict)

    def is_leaf(self, name: str) -> bool:
        return kind_of_module(self.modules[name]) is not None

    def children(self, name: str) -> Iterator[str]:
        """Modules that ``name``'s forward may call: its children, and those of lists and dicts of modules among them."""
        for child, module in self.modules[name].named_children():
            child = f"{name}.{child}" if name else child
            if child not in self.modules:  # an alias: the module is known by its first name
                continue
            if isinstance(module, nn.ModuleList | nn.ModuleDict):
                yield from self.children(child)
            else:
                yield child

    def try_tracing(self, name: str) -> bool:
        """Trace ``name``; where that fails find out which modules inside are at fault, and try again without them."""
        if self.is_leaf(name) or self._attempt(name):
            return True
        known = set(self.untraceable)
        for child in self.children(name):
            self.try_tracing(child)
        return not known.issuperset(self.untraceable) and self._attempt(name)

    def _attempt(self, name: str) -> bool:
        module = self.modules[name]
        tracer = _Tracer({id(self.modules[other]) for other in self.untraceable})
        try:
            self.graphs[name] = tracer.trace(module, concrete_args=_defaults(module))
        except Exception as error:  # the user's own forward, run on stand-ins for tensors, may raise anything
            self.untraceable[name] = f"{type(error).__name__}: {_first_sentence(str(error))}"
            return False
        finally:  # what fx leaves is a cycle that holds the modules: their weights would outlive them
            vars(tracer).clear()
        self.untraceable.pop(name, None)
        attributes = (value for part in module.modules() for value in vars(part).values())
        held = (one for value in attributes for one in within(value, depth=3, objects=True))
        nodes = [one.node for one in held if isinstance(one, torch.fx.Proxy)]
        self.kept[name] = [node for node in nodes if node.graph is self.graphs[name]]
        return True


class _Tracer(torch.fx.Tracer):
    def __init__(self, opaque: set[int]) -> None:
        super().__init__()
        self._opaque = opaque

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return kind_of_module(m) is not None or id(m) in self._opaque


def _defaults(module: nn.Module) -> dict[str, Any]:
    """Arguments that callers usually leave out, such as ``mask=None``, keep their default: forwards branch on them."""
    parameters = inspect.signature(module.forward).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


class _GraphBuilder:
    """Turns the fx graphs of all pieces into one list of calls."""

    def __init__(self, search: _Search) -> None:
        self.calls: list[Call] = []
        self.parameters_read: dict[str, str] = {}
        self._search = search
        self._names = {id(module): name for name, module in search.modules.items()}
        self._parameters: defaultdict[int, list[str]] = defaultdict(list)  # all names of each
        for name, module in search.modules.items():
            for parameter_name, parameter in module.named_parameters(recurse=False):
                self._parameters[id(parameter)].append(f"{name}.{parameter_name}" if name else parameter_name)

    def add_piece(self, name: str, owner: str | None) -> None:
        """``owner`` is the untraceable module that calls this piece; what it does with the output is not known."""
        if name in self._search.untraceable:
            for child in self._search.children(name):
                self.add_piece(child, owner=name)
        elif self._search.is_leaf(name):
            self._add(Kind.INPUT, "input", False, name)
            self._add_module(self._search.modules[name], name, owner or "", (len(self.calls) - 1,))
            self._add_end(owner, (len(self.calls) - 1,))
        else:
            for opaque in self._add_graph(name, self._search.graphs[name], owner):
                self.add_piece(opaque, owner=None)

    def _add_graph(self, root: str, graph: torch.fx.Graph, owner: str | None) -> list[str]:
        """Returns the opaque modules that were called."""
        maker: dict[torch.fx.Node, int] = {}  # nodes that are no tensors are not in it
        opaque = []
        for node in graph.nodes:
            reads = tuple(dict.fromkeys(maker[read] for read in node.all_input_nodes if read in maker))
            inside = self._inside(node, root)
            if node.op == "placeholder":
                maker[node] = self._add(Kind.INPUT, "input", False, root)
            elif node.op == "output":
                self._add_end(owner, reads)
            elif node.op == "call_module":
                module = self._search.modules[root].get_submodule(str(node.target))
                name = self._names[id(module)]
                if isinstance(module, nn.Identity):
                    if reads:
                        maker[node] = reads[0]
                    continue
                if name in self._search.untraceable:
                    opaque.append(name)
                maker[node] = self._add_module(module, name, inside, reads)
            elif node.op in ("call_function", "call_method") and not _is_fact(node):
                function = plain_name(_function_name(node))
                self._note_parameters(node, root, function)
                if reads:  # otherwise it is made of shapes or parameters alone
                    maker[node] = self._add(kind_of_function(function, len(reads)), function, False, inside, reads)
        if kept := [maker[node] for node in self._search.kept[root] if node in maker]:
            self._add(Kind.OTHER, KEPT, False, root, tuple(dict.fromkeys(kept)))
        return list(dict.fromkeys(opaque))

    def _add_module(self, module: nn.Module, name: str, inside: str, reads: tuple[int, ...]) -> int:
        return self._add(kind_of_module(module) or Kind.OTHER, name, True, inside, reads)

    def _add_end(self, owner: str | None, reads: tuple[int, ...]) -> None:
        if owner is None:
            self._add(Kind.OUTPUT, "output", False, "", reads)
        else:
            self._add(Kind.UNKNOWN, owner, False, owner, reads)

    def _add(self, kind: Kind, name: str, is_module: bool, inside: str, reads: tuple[int, ...] = ()) -> int:
        self.calls.append(Call(kind, name, is_module, inside, reads))
        return len(self.calls) - 1

    def _inside(self, node: torch.fx.Node, root: str) -> str:
        """The innermost module that was being traced when ``node`` was made."""
        stack = node.meta.get("nn_module_stack") or {}
        paths = [path for path, _ in stack.values() if path]
        if node.op == "call_module":
            paths = [path for path in paths if path != node.target]
        return ".".join(filter(None, [root, paths[-1] if paths else ""]))

    def _note_parameters(self, node: torch.fx.Node, root: str, function: str) -> None:
        for read in node.all_input_nodes:
            if read.op == "get_attr":
                owner, _, attribute = str(read.target).rpartition(".")
                tensor = getattr(self._search.modules[root].get_submodule(owner), attribute, None)
                self.parameters_read |= dict.fromkeys(self._parameters.get(id(tensor), ()), function)


def _first_sentence(message: str) -> str:
    return message.strip().split("\n")[0].split(". ")[0]


def _function_name(node: torch.fx.Node) -> str:
    if node.op == "call_method" or isinstance(node.target, str):
        return str(node.target)
    if node.target is getattr:
        return str(node.args[1])
    return getattr(node.target, "__name__", type(node.target).__name__)


def _is_fact(node: torch.fx.Node) -> bool:
    return _function_name(node) in _FACTS and (node.op == "call_method" or node.target is getattr)
