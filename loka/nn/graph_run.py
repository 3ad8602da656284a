"""The data flow of a model, recorded while it runs once on an example.

Tensors are followed by identity, so any Python between the calls will do: branches, loops, the user's own batch types.
"""

import re
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

_IN_PLACE = re.compile(r"\w*[^_]_|__i\w+__|__setitem__")
_VALUES = {"item", "tolist", "numpy", "__array__"}  # what these give is no tensor, and still they read the values


def record_run(model: nn.Module, given: Arguments) -> Graph:
    """Run ``model`` once on what is given, without gradients, and return every call it made.

    Afterwards the model, its buffers and random states are what they were. What the model raises is raised here.
    """
    recorder = _Recorder(model)
    with ExitStack() as stack:
        stack.enter_context(left_as_it_was(model, given.args, dict(given.keywords)))
        stack.enter_context(random_state_kept(model))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # a compiled part would make calls of its own
        recorder.watch_modules(stack)
        with recorder:
            output = model(*given.args, **given.keywords)
        recorder.close(output)
    return Graph(tuple(recorder.calls), Method.RUN, {}, recorder.parameters_read, frozenset(recorder.read_past))


class _Recorder(TorchFunctionMode):
    """Sees every torch function outside leaf modules, and every leaf module as one call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.parameters_read: dict[str, str] = {}
        self.read_past: set[str] = set()
        self._model = model
        self._parameters: defaultdict[int, list[str]] = defaultdict(list)  # all names of each
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._parameters[id(parameter)].append(name)
        self._constants = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}  # and what is made of them alone
        self._maker: dict[int, int] = {}  # id of a tensor → the call that made it
        self._owner: dict[int, int] = {}  # address of memory → the call that gave it, or that last wrote there
        self._in_place: dict[int, str] = {}  # id of a tensor → the module that changed it in place
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
        """Record who reads what the run leaves, and let go of all that it computed: others may keep this recorder's frames."""
        reads = self._reads(list(_tensors_in(output)))
        attributes = (value for module in self._model.modules() for value in vars(module).values())
        held = (tensor for value in attributes for tensor in _tensors_in(value, depth=3))
        kept = [origin for tensor in held if (origin := self._origin(tensor)) is not None]
        if kept:  # in attributes of the modules, to be read later
            self.calls.append(Call(Kind.OTHER, KEPT, False, "", tuple(dict.fromkeys(kept))))
        self.calls.append(Call(Kind.OUTPUT, "output", False, "", reads))
        self._alive.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._leaf is not None:
            return func(*args, **kwargs)
        given = list(_tensors_in((args, kwargs)))
        versions = [_version(tensor) for tensor in given]
        output = func(*args, **kwargs)
        written = [tensor for tensor, version in zip(given, versions, strict=True) if _version(tensor) != version]
        self._record_function(_name_of(func), args, kwargs, given, written, output)
        return output

    def _hooks(self, name: str, kind: Kind | None) -> tuple[Any, Any]:
        def enter(module: nn.Module, args: Any) -> None:
            if self._leaf is None and kind is not None:
                self._leaf = module
            elif self._leaf is None:
                self._inside.append(name)

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor | None:
            if kind is None and self._leaf is None:
                self._inside.pop()
            elif self._leaf is module and isinstance(module, nn.Identity):
                self._leaf = None  # it hands on the very tensor, with the call that made it
            elif self._leaf is module:
                given, made = (list(_tensors_in(value)) for value in ((args, kwargs), output))
                self._record(kind or Kind.OTHER, name, True, given, made)
                told_apart = self._told_apart(name, output) if _is_among(output, given) else None
                self._leaf = None
                return told_apart
            return None

        return enter, leave

    def _told_apart(self, name: str, written: Tensor) -> Tensor:
        """The output of a module that wrote to its input, as another tensor of the same values: so who reads the output can be
        told from who goes on with the input."""
        given = written.detach()
        self._remember(given, len(self.calls) - 1)
        self._in_place[id(written)] = name
        return given

    def _record_function(
        self, raw_name: str, args: Any, kwargs: dict[str, Any], given: list[Tensor], written: list[Tensor], output: Any
    ) -> None:
        outputs = [args[0]] if raw_name == "__setitem__" else list(_tensors_in(output))
        # Judged by name and options as well: tensors of inference mode do not count how often they are written.
        is_in_place = bool(_IN_PLACE.fullmatch(raw_name)) or kwargs.get("out") is not None or kwargs.get("inplace") is True
        made = [tensor for tensor in outputs if is_in_place or not _is_among(tensor, given)]
        made += [tensor for tensor in written if not _is_among(tensor, made)]
        if not made and raw_name not in _VALUES:
            return  # a shape or the like, or x.contiguous() of what is contiguous
        name = plain_name(raw_name)
        for tensor in given:
            self.parameters_read |= dict.fromkeys(self._parameters.get(id(tensor), ()), name)
        self._record(None, name, False, given, made)

    def _record(self, kind: Kind | None, name: str, is_module: bool, given: list[Tensor], made: list[Tensor]) -> None:
        reads = self._reads(given)
        if not reads and not is_module:
            self._constants.update(map(id, made))
            self._alive += made
            return
        kind = kind or kind_of_function(name, len(reads))
        self.calls.append(Call(kind, name, is_module, self._inside[-1], reads))
        for tensor in made:
            self._remember(tensor, len(self.calls) - 1, is_written=_is_among(tensor, given))

    def _reads(self, tensors: list[Tensor]) -> tuple[int, ...]:
        """The calls that made ``tensors``. One that nobody made, and that is no constant, came in from outside."""
        reads = []
        for tensor in tensors:
            origin = self._origin(tensor)
            if origin is None and id(tensor) in self._constants:
                continue
            if origin is None:
                self.calls.append(Call(Kind.INPUT, "input", False, ""))
                origin = len(self.calls) - 1
                self._remember(tensor, origin)
            reads.append(origin)
        return tuple(dict.fromkeys(reads))

    def _origin(self, tensor: Tensor) -> int | None:
        """The call that made ``tensor``, or that wrote its memory since: by way of a view, or of what it is a view of.

        A tensor that no call is known to have made may lie in memory that is known (from numpy, or behind ``torch.vmap``).
        """
        if id(tensor) in self._in_place:
            self.read_past.add(self._in_place[id(tensor)])
        made, owner = self._maker.get(id(tensor)), self._owner.get(_address(tensor))
        if made is not None:
            return made if owner is None else max(made, owner)
        return owner if owner is not None and self.calls[owner].kind is not Kind.INPUT else None

    def _remember(self, tensor: Tensor, call: int, *, is_written: bool = False) -> None:
        self._alive.append(tensor)
        self._maker[id(tensor)] = call
        if address := _address(tensor):
            self._owner[address] = call if is_written else self._owner.get(address, call)


def _name_of(function: Any) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    # A property such as x.mT arrives as the ``__get__`` of its descriptor.
    return getattr(getattr(function, "__self__", None), "__name__", name) if name == "__get__" else name


def _tensors_in(value: object, depth: int = 8) -> Iterator[Tensor]:
    return (_unwrapped(part) for part in within(value, depth, objects=True) if isinstance(part, Tensor))


def _unwrapped(tensor: Tensor) -> Tensor:
    """The tensor that ``torch.vmap`` and its like hand on wrapped."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _is_among(tensor: Tensor, others: list[Tensor]) -> bool:
    return any(tensor is other for other in others)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _address(tensor: Tensor) -> int:
    """Of its memory, which views share; 0 where it has none of its own (sparse, nested, empty)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0
