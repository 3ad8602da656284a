"""The data flow of a model, recorded while it runs once on an example.

Tensors are followed by identity, so any Python between the calls will do: branches, loops, the user's own batch types.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from loka.nn.graph import (
    KEPT,
    Call,
    Graph,
    Kind,
    Method,
    kind_of_function,
    kind_of_module,
    plain_name,
)
from loka.nn.kept_state import left_as_it_was, random_state_kept
from loka.nn.unwrap import Arguments
from loka.nn.within import within


def record_run(model: nn.Module, given: Arguments) -> Graph:
    """Run ``model`` once on what is given, without gradients, and return every call it made.

    Afterwards the model, its buffers and random states are what they were. What the model raises is raised here.
    """
    recorder = _Recorder(model)
    with ExitStack() as stack:
        stack.enter_context(left_as_it_was(model))
        stack.enter_context(random_state_kept(model))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # a compiled part would make calls of its own
        recorder.watch_modules(stack)
        with recorder:
            output = model(*given.args, **given.keywords)
        recorder.close(output)
    return Graph(tuple(recorder.calls), Method.RUN, {}, recorder.parameters_read)


class _Recorder(TorchFunctionMode):
    """Sees every torch function outside leaf modules, and every leaf module as one call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.parameters_read: dict[str, str] = {}
        self._model = model
        self._parameters: defaultdict[int, list[str]] = defaultdict(list)  # all names of each
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._parameters[id(parameter)].append(name)
        self._constants = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}  # and what is made of them alone
        self._maker: dict[int, int] = {}  # id of a tensor → the call that made it
        self._alive: list[Tensor] = []  # as long as a tensor lives, its id is its own
        self._inside = [""]
        self._leaf: nn.Module | None = None  # the leaf module now running, whose inner workings are not recorded

    def watch_modules(self, stack: ExitStack) -> None:
        for name, module in self._model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it takes no hooks
            enter, leave = self._hooks(name, kind_of_module(module))
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, with_kwargs=True, always_call=True).remove)

    def close(self, output: object) -> None:
        reads = self._reads(list(_tensors_in(output)))
        attributes = (value for module in self._model.modules() for value in vars(module).values())
        held = (tensor for value in attributes for tensor in _tensors_in(value, depth=3))
        kept = [self._maker[id(tensor)] for tensor in held if id(tensor) in self._maker]
        if kept:  # by the modules, for whoever asks them later
            self.calls.append(Call(Kind.OTHER, KEPT, False, "", tuple(dict.fromkeys(kept))))
        self.calls.append(Call(Kind.OUTPUT, "output", False, "", reads))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self._leaf is None:
            self._record_function(_name_of(func), args, kwargs, output)
        return output

    def _hooks(self, name: str, kind: Kind | None) -> tuple[Any, Any]:
        def enter(module: nn.Module, args: Any) -> None:
            if self._leaf is None and kind is not None:
                self._leaf = module
            elif self._leaf is None:
                self._inside.append(name)

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if kind is None and self._leaf is None:
                self._inside.pop()
            elif self._leaf is module:
                self._leaf = None
                if not isinstance(module, nn.Identity):  # it hands on the very tensor, with the call that made it
                    self._record(kind or Kind.OTHER, name, True, (args, kwargs), list(_tensors_in(output)))

        return enter, leave

    def _record_function(self, raw_name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        made = list(_tensors_in(output))
        is_in_place = raw_name == "__setitem__" or (raw_name.endswith("_") and not raw_name.endswith("__"))
        is_in_place |= kwargs.get("out") is not None
        if raw_name == "__setitem__":
            made = [args[0]]
        given = list(_tensors_in((args, kwargs)))
        if not made or (not is_in_place and all(any(tensor is other for other in given) for tensor in made)):
            return  # a shape or the like, or x.contiguous() of what is contiguous
        if is_in_place:  # a view is written: so is what it is a view of
            made += [tensor._base for tensor in made if tensor._base is not None]
        name = plain_name(raw_name)
        for tensor in given:
            self.parameters_read |= dict.fromkeys(self._parameters.get(id(tensor), ()), name)
        self._record(None, name, False, (args, kwargs), made)

    def _record(self, kind: Kind | None, name: str, is_module: bool, given: Any, made: list[Tensor]) -> None:
        reads = self._reads(list(_tensors_in(given)))
        if not reads and not is_module:
            self._constants.update(map(id, made))
            self._alive += made
            return
        kind = kind or kind_of_function(name, len(reads))
        self.calls.append(Call(kind, name, is_module, self._inside[-1], reads))
        for tensor in made:
            self._remember(tensor, len(self.calls) - 1)

    def _reads(self, tensors: list[Tensor]) -> tuple[int, ...]:
        """The calls that made ``tensors``. One that nobody made, and that is no constant, came in from outside."""
        reads = []
        for tensor in tensors:
            if id(tensor) not in self._maker:
                if id(tensor) in self._constants:
                    continue
                self.calls.append(Call(Kind.INPUT, "input", False, ""))
                self._remember(tensor, len(self.calls) - 1)
            reads.append(self._maker[id(tensor)])
        return tuple(dict.fromkeys(reads))

    def _remember(self, tensor: Tensor, call: int) -> None:
        self._alive.append(tensor)
        self._maker[id(tensor)] = call


def _name_of(function: Any) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    # A property such as x.mT arrives as the ``__get__`` of its descriptor.
    return getattr(getattr(function, "__self__", None), "__name__", name) if name == "__get__" else name


def _tensors_in(value: object, depth: int = 8) -> Iterator[Tensor]:
    return (part for part in within(value, depth, objects=True) if isinstance(part, Tensor))
