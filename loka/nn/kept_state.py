"""Running a model without a trace of it: what forward does to its modules, and the random numbers it draws, are undone."""

import copy
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from loka.nn.within import own_attributes, within

_MOST_ITEMS, _MOST_BYTES = 10_000, 2**26  # of a collection that is looked into, and of an array that is copied
_COLLECTIONS = (dict, OrderedDict, defaultdict, Counter, list, deque, set)


@contextmanager
def left_as_it_was(model: nn.Module, *given: object) -> Iterator[None]:
    """Undo what a forward pass does to the modules (attributes it sets, buffers, and tensors, arrays, generators and nested
    collections that they hold and it updates in place), and to what is ``given`` to it, tuples and dicts of arguments: they are
    the user's batch. Objects of other classes are not looked into: another thread may be at work in them. Parameters are not
    copied: a forward pass only reads them."""
    tables = _tables_of(model, *given)
    tables_before = [(table, copy.copy(table)) for table in tables if not isinstance(table, tuple)]
    buffers_before = {id(buffer): (buffer, buffer.clone()) for buffer in model.buffers()}
    kinds = {Tensor, torch.Generator, random.Random, *_numpy_kinds()}
    values = chain.from_iterable(_values_of(table) for table in tables)
    held = {id(value): value for value in values if type(value) in kinds}  # a vocabulary's entries are of none
    others = [value for key, value in held.items() if key not in buffers_before and _is_own_tensor(value)]
    tensors_before = [(tensor, tensor._version, tensor.detach().clone()) for tensor in others]
    put_back = [_put_back(value) for value in held.values() if not isinstance(value, Tensor)]
    try:
        yield
    finally:
        for table, before in tables_before:
            table.clear()
            table.extend(before) if isinstance(table, list | deque) else table.update(before)
        for buffer, before in buffers_before.values():
            buffer.data.copy_(before)
        for tensor, version, before in tensors_before:
            if tensor._version != version:
                tensor.data.copy_(before)
        for undo in put_back:
            undo()


@contextmanager
def rid_of(kind: type, model: nn.Module) -> Iterator[None]:
    """Undo one thing alone: where an object of ``kind``, which nobody else makes, was put into users' own objects that modules
    hold, put back what was there. All else stays as it is: another thread may be writing there."""
    before = {id(table): (table, copy.copy(table)) for table in _tables_of_objects(model)}
    try:
        yield
    finally:
        for table, then in before.values():
            if isinstance(table, dict):
                for name in [name for name, value in table.items() if _holds(value, kind)]:
                    table.update({name: then[name]}) if name in then else table.pop(name)
            elif _holds(table, kind):
                table.clear()
                table.extend(then) if isinstance(table, list | deque) else table.update(then)


def _tables_of_objects(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        for attribute in list(vars(module).values()):
            for value in within(attribute, depth=4, objects=True):
                table: Any = value if type(value) in _COLLECTIONS else own_attributes(value)
                if len(table) <= _MOST_ITEMS:
                    yield table


def _holds(value: object, kind: type) -> bool:
    return any(isinstance(one, kind) for one in within(value, depth=3))


def _tables_of(model: nn.Module, *more: object) -> list[Any]:
    """The attributes of its modules, with the tables of parameters, buffers and children, and the collections that lie in them,
    in those again, and so on; one so large that it is data is not looked into."""
    tables: dict[int, Any] = {}
    pending: list[Any] = [*(module.__dict__ for module in model.modules()), *more]
    while pending:
        table = pending.pop()
        if id(table) not in tables:
            tables[id(table)] = table
            if len(table) <= _MOST_ITEMS:
                pending += [value for value in _values_of(table) if type(value) in _COLLECTIONS or isinstance(value, tuple)]
    return list(tables.values())


def _values_of(table: Any) -> Iterable[object]:
    return table.values() if isinstance(table, dict) else table


def _numpy_kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    return (numpy.ndarray, numpy.random.Generator, numpy.random.RandomState) if numpy else ()


def _put_back(value: Any) -> Callable[[], None]:
    """A function that makes ``value``, an array or a generator of torch, Python or numpy, what it is now."""
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if hasattr(value, "bit_generator"):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if hasattr(value, "set_state"):
        return partial(value.set_state, value.get_state())
    if not value.flags.writeable or value.nbytes > _MOST_BYTES:
        return lambda: None
    return partial(_write, value, value.copy())


def _write(array: Any, before: Any) -> None:
    if array.shape != before.shape:
        array.resize(before.shape, refcheck=False)
    array[...] = before


def _is_own_tensor(value: object) -> TypeGuard[Tensor]:
    """A plain tensor that a module holds by itself and may write: no parameter, not what autograd has made of one, and not
    expanded, so that one value stands for many."""
    if type(value) is not Tensor or value.layout is not torch.strided or value.is_inference():
        return False
    return value.grad_fn is None and 0 not in value.stride()


@contextmanager
def random_state_kept(model: nn.Module) -> Iterator[None]:
    """Torch's random numbers (on the model's GPUs too), Python's, and numpy's where that is in use go on after the block as if
    none had been drawn in it."""
    devices = list({parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"})
    numpy = sys.modules.get("numpy")
    python_before, numpy_before = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_before)
        if numpy:
            numpy.random.set_state(numpy_before)
