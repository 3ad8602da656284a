"""Keeping the 8-bit copies of weights current.

A weight is cast once a step, not once a call. Its copies are refreshed after every step of an optimizer that holds it, after
``load_state_dict``, after ``.to()``, and by ``refresh``. Eager calls also see, by its version and its address, that something
else has written it, as an average of weights is written; but the version does not move under ``.data`` writes, and cannot be
read in a compiled graph. A tensor that stands in the weight's place for a call, as ``functional_call`` puts it there, is cast
for that call alone.
"""

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from loka.core.errors import InvalidInput
from loka.kernels.stepping import AdamStep


class HoldsWeightCasts(Protocol):
    weight: Tensor

    def refresh_weight_casts(self) -> None: ...

    def recast_after_step(self) -> None: ...

    def can_step(self) -> bool:
        """Whether a step of Adam can be made in the pass that casts the weight."""
        ...

    def step_and_recast(self, adam: AdamStep) -> None: ...


HELD = "_held"  # where a stand-in keeps what it holds beside its parameters
_CASTS = "weight_"  # with which the names of casts begin
CAST_OF = "_cast_of"  # the weight that was cast, and its mark
_holders: weakref.WeakSet[Any] = weakref.WeakSet()
_hook_installed = False


class _CastOf(NamedTuple):
    weight: Tensor  # itself, for its address may be another's later; not by weakref, with which it could not be swapped
    mark: tuple[int, int]
    shape: torch.Size  # as it was then: data of another may have been put into it
    in_step: bool = False  # cast by the optimizer itself, whose step is not over


class _Rewrite(NamedTuple):
    place: tuple[object, ...]  # the weight's shape and strides, addresses of it, its casts and what it is stepped by
    run: Callable[[], None]


class _Held(nn.Module):
    """What a stand-in holds beside its parameters: in buffers, which compiled graphs know to stay where they are, but not in
    the model's own buffers. Averages of models pair those one by one, and DistributedDataParallel sends them."""


_rewrites: weakref.WeakKeyDictionary[nn.Module, _Rewrite] = weakref.WeakKeyDictionary()  # not in the modules: they are pickled


def refuse_replicas() -> NoReturn:
    """nn.DataParallel copies modules to other devices, but not what they hold beside parameters and buffers."""
    raise InvalidInput(
        "a planned layer holds casts on one device, which nn.DataParallel does not copy to the others: use "
        "DistributedDataParallel, one process for each GPU, or loka.restore(model) first"
    )


def keep_current(holder: HoldsWeightCasts) -> None:
    """Refresh ``holder``'s casts after each step of any optimizer that holds its weight."""
    global _hook_installed
    if not _hook_installed:
        register_optimizer_step_post_hook(torch._disable_dynamo(_after_step))  # a compiled step would trace it in pieces
        _hook_installed = True
    _holders.add(holder)


def has_own_weight(module: nn.Module) -> bool:
    """Whether its weight is a parameter. One that was parametrized or pruned since makes it in every call, and may draw."""
    return "weight" in module._parameters


def leave_as_it_is(module: nn.Module) -> None:
    """No longer cast its weight after steps: another module has taken its place."""
    _holders.discard(module)


def refresh(model: nn.Module) -> None:
    """Cast all weights of ``model`` again: for those changed by other means than ``torch.optim`` or ``load_state_dict``.

    Where a frozen model holds codes in their place, what kernels have packed of those is packed again.
    """
    for module in model.modules():
        if callable(recast := getattr(module, "refresh_weight_casts", None)):
            recast()


def holders_behind_steps(model: nn.Module, *, in_step: Callable[[Tensor], bool]) -> list[HoldsWeightCasts]:
    """The holders whose ``recast_after_step`` an optimizer's step would be followed by, for timing a step without an optimizer:
    all but those whose weights are cast ``in_step``, which is never done for a weight that two modules hold."""
    alone = only_holders()

    def is_made_in_step(holder: HoldsWeightCasts) -> bool:
        weight = holder.weight
        return alone.get(id(weight)) is holder and in_step(weight) and holder.can_step()

    return [holder for holder in _holders_in(model) if not is_made_in_step(holder)]


def holds_current_casts(holder: Any) -> bool:
    """Whether the casts held are of the weight as it is. If it was written, which compiled calls cannot see, they are made
    again first; but never of another tensor in its place: a backward pass may still need them."""
    known: _CastOf = holder.__dict__[CAST_OF]
    weight = holder.weight
    if known.weight is not weight:
        return False
    if not torch.compiler.is_compiling() and known.mark != _mark_of(weight):
        holder.refresh_weight_casts()
    return True


def _mark_of(weight: Tensor) -> tuple[int, int]:
    """It differs once a weight was written, or another was put in its place. Tensors of other kinds may have no address."""
    place = weight.data_ptr() if type(weight) in (Tensor, nn.Parameter) else id(weight)
    return place, 0 if weight.is_inference() else weight._version


def _note_cast_of(module: nn.Module, *, in_step: bool = False) -> None:
    weight = module.weight
    assert isinstance(weight, Tensor)
    module.__dict__[CAST_OF] = _CastOf(weight, _mark_of(weight), weight.shape, in_step)


def only_holders() -> dict[int, HoldsWeightCasts]:
    """The id of a weight → the module that holds its casts, where that is one alone."""
    holders: dict[int, list[HoldsWeightCasts]] = {}
    for holder in list(_holders):
        holders.setdefault(id(holder._parameters.get("weight")), []).append(holder)  # not .weight, as in _after_step
    return {weight: found[0] for weight, found in holders.items() if len(found) == 1}


def _holders_in(model: nn.Module) -> list[HoldsWeightCasts]:
    within = set(model.modules())
    return [holder for holder in list(_holders) if holder in within]


def hold(module: nn.Module, name: str, tensor: Tensor | None) -> None:
    """Hold ``tensor`` beside the parameters of ``module``: in no buffer or ``state_dict`` of the model, nor moved with it."""
    if HELD not in vars(module):
        vars(module)[HELD] = _Held()  # past nn.Module, which would make a submodule of it
    vars(module)[HELD].register_buffer(name, tensor)


def held(module: nn.Module) -> dict[str, Tensor]:
    """What ``module`` holds beside its parameters, by name."""
    buffers = vars(module)[HELD]._buffers if HELD in vars(module) else {}
    return {name: tensor for name, tensor in buffers.items() if tensor is not None}


def held_tensor(module: nn.Module, name: str) -> Tensor:
    return getattr(module._held, name)


def move_held(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Take what ``module`` holds to where ``fn`` takes its parameters, in the dtype that it has; casts are made anew."""
    for name, tensor in held(module).items():
        if not name.startswith(_CASTS):
            moved = fn(tensor)
            if moved is not tensor:  # it may have been shared with other processes, where it lies
                hold(module, name, torch.zeros_like(tensor, device=moved.device) if tensor.is_meta else tensor.to(moved.device))


@torch.no_grad()
def store_casts(module: nn.Module, casts: Mapping[str, Tensor]) -> None:
    """Hold ``casts``. Those that are there are written in place: captured graphs see the new values. On the CPU, where
    comparing waits for nothing, casts that all came out as they were are not written: a backward pass to come may read them,
    and what a kernel has packed of them is found by their versions."""
    there, weight = held(module), module.weight
    shared = isinstance(weight, Tensor) and weight.device.type == "cpu" and weight.is_shared()  # so are its casts, then
    casts = {_CASTS + name: cast.share_memory_() if shared else cast for name, cast in casts.items()}
    # In shared memory another process may have written both weight and casts, and not the versions that this one goes by.
    if shared or not all(name in there and _is_same_on_cpu(there[name], cast) for name, cast in casts.items()):
        for name, cast in casts.items():
            old = there.get(name)
            if old is None or _kind_of(old) != _kind_of(cast):
                hold(module, name, cast)
                _rewrites.pop(module, None)  # it would keep alive what lay there before
            else:
                old.copy_(cast)
    _note_cast_of(module)


def _is_same_on_cpu(old: Tensor, cast: Tensor) -> bool:
    """Bit for bit, so that NaN is NaN. Of tensors of other kinds, such as fake ones, nobody can say."""
    is_known = cast.device.type == "cpu" and type(old) is Tensor and type(cast) is Tensor
    return is_known and _kind_of(old) == _kind_of(cast) and torch.equal(_bits(old), _bits(cast))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)  # an axis of length 1 may have any stride in a contiguous tensor


def _kind_of(cast: Tensor) -> tuple[object, ...]:
    return cast.shape, cast.dtype, cast.device, cast.device.type == "cpu" and cast.is_shared()


def holds_casts_of(module: nn.Module, weight: Tensor) -> bool:
    """Whether casts are held on ``weight``'s device, and of its shape: its data may have been moved, or others put there."""
    casts = _held_casts(module)
    if not casts or any(cast.device != weight.device for cast in casts):
        return False
    return vars(module)[CAST_OF].shape == weight.shape


def _held_casts(module: nn.Module) -> list[Tensor]:
    return [tensor for name, tensor in held(module).items() if name.startswith(_CASTS)]


def rewrite_casts(
    module: nn.Module, weight: Tensor, prepare: Callable[[], Callable[[], None]], adam: AdamStep | None = None
) -> None:
    """Write the casts of ``weight`` again where they lie; with ``adam``, the weight itself too, by that step. It is done by
    what ``prepare`` makes, which is kept as long as everything lies where it did."""
    place = (weight.shape, weight.stride(), *(tensor.data_ptr() for tensor in (weight, *_held_casts(module))))
    place += () if adam is None else adam.places()
    capturing = is_capturing(weight.device)  # a graph may outlive what is kept here, and then so must its launches' memory
    known = None if capturing else _rewrites.get(module)
    if known is None or known.place != place:
        known = _Rewrite(place, prepare())
        if not capturing:
            _rewrites[module] = known
    before = _mark_of(weight)
    known.run()
    if adam is not None and before == _mark_of(weight):  # prepared with another tensor that lay here, whose version moved
        torch.autograd.graph.increment_version(weight)
    _note_cast_of(module, in_step=adam is not None)


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def stored_cast(module: nn.Module, name: str) -> Tensor:
    return held_tensor(module, _CASTS + name)


def drop_casts(module: nn.Module) -> None:
    _rewrites.pop(module, None)
    for name in held(module):
        if name.startswith(_CASTS):
            delattr(vars(module)[HELD], name)


def state_without_casts(module: nn.Module) -> dict[str, Any]:
    """What copies and pickles carry: the weight, from which casts are made again."""
    state, kept = {name: value for name, value in vars(module).items() if name != CAST_OF}, _Held()
    for name, tensor in held(module).items():
        if not name.startswith(_CASTS):
            kept.register_buffer(name, tensor)
    return {**state, HELD: kept}


def refresh_after_load(module: nn.Module, incompatible_keys: Any) -> None:
    """A ``load_state_dict`` post-hook for a module that holds casts."""
    module.refresh_weight_casts()  # pyrefly: ignore[not-callable]


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _holders:
        return
    moved = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for holder in list(_holders):
        if id(holder._parameters.get("weight")) in moved:  # not .weight: parametrized since, it would be made, and may draw
            known: _CastOf | None = vars(holder).get(CAST_OF)
            stepped = holder.weight.grad is not None  # else ``in_step`` is left over from a step that failed later on
            if known is not None and known.in_step and stepped and known.mark == _mark_of(holder.weight):
                vars(holder)[CAST_OF] = known._replace(in_step=False)
                continue
            with _versions_kept_if_unmoved(holder):
                holder.recast_after_step()


def _versions_kept_if_unmoved(holder: Any) -> AbstractContextManager[None]:
    """Within it, autograd does not notice that the casts of a weight are written again, if its optimizer has not moved it.

    An optimizer skips what has no gradient. The casts of such a weight come out as they were, and a backward pass that is still
    to come may read them. (Not casting them at all would miss writes to ``.data``.) Only values of a block's transpose that are
    too small for e4m3's normal numbers may differ: a step of ``loka.AdamW`` rounds them once, a cast twice."""
    return nullcontext() if holder.weight.grad is not None else versions_kept_if_unwritten(holder)


def versions_kept_if_unwritten(holder: Any) -> AbstractContextManager[None]:
    """The same, if the weight is not known to have been written: ``model.to(device)`` of a model that lies there casts it again
    too. On a GPU only: on the CPU ``store_casts`` compares, and by versions a kernel knows what it must pack again."""
    known: _CastOf | None = vars(holder).get(CAST_OF)
    weight = holder._parameters.get("weight")
    if known is None or weight is None or known.weight is not weight or known.mark != _mark_of(weight) or not weight.is_cuda:
        return nullcontext()
    return torch.autograd._unsafe_preserve_version_counter(tuple(held(holder).values()))
