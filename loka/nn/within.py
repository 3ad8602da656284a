"""What a value holds, in collections inside of collections, whatever users put into attributes and batches."""

import dataclasses
import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from torch import Tensor, nn

_NOT_THEIRS = ("builtins", "collections", "functools", "torch", "types")


def within(value: object, depth: int, *, objects: bool = False) -> Iterator[object]:
    """``value``, and what it holds down to ``depth``: items of collections, and with ``objects`` the fields of dataclasses, the
    attributes of objects whose class is neither Python's nor torch's, a partial's function and arguments, a bound method's
    object, and what a function closes over or has for defaults. Tensors and modules are not looked into."""
    yield value
    if depth:
        for part in _parts_of(value, objects):
            yield from within(part, depth - 1, objects=objects)


def _parts_of(value: object, objects: bool) -> Iterable[object]:
    if isinstance(value, Mapping):
        try:
            return list(value.values())
        except Exception:  # a user's own class, such as a store that is closed by now
            return ()
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    if not objects or isinstance(value, type | nn.Module | Tensor):
        return ()
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, types.MethodType):
        return (value.__self__,)
    if isinstance(value, types.FunctionType):
        return _held_by_function(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return list(own_attributes(value).values())


def _held_by_function(function: types.FunctionType) -> Iterator[object]:
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # what is assigned later
            yield cell.cell_contents


def own_attributes(value: object) -> dict[str, object]:
    """The attributes of an object whose class is neither Python's nor torch's, where they lie; of others, and modules, none."""
    if isinstance(value, type | nn.Module | Tensor) or type(value).__module__.partition(".")[0] in _NOT_THEIRS:
        return {}
    return getattr(value, "__dict__", {})
