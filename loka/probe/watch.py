"""Watching one step: hooks on every site that take some rows of x and, when the gradient arrives, the same rows of dy.

Of tensors in whatever layout: to flatten one that lies transposed would copy all of it.

The gradient of the weight comes along for nothing, and is made of all rows.

Axes:  M rows of a call,  R rows taken of them,  K in_features,  N out_features.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from loka.nn.linear import has_rows
from loka.nn.passing_hook import PassingHook
from loka.nn.site_device import device_of_sites
from loka.nn.unwrap import Arguments

_ORDERED = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})  # those that ``aminmax`` takes


@dataclass
class Call:
    """One call of a site during the step."""

    m: int
    x_RK: Tensor
    x_amax: Tensor | None  # of all rows, where it was asked for
    dtype: torch.dtype  # of the output: what the GEMM ran in
    needs_dx: bool  # whether anything in front of it learns
    dy_RN: Tensor | None = None
    is_first_backward: bool = True  # through it, of several


@dataclass
class Run:
    """One call of the model during the step."""

    given: Arguments | None  # None for what was called past its forward
    autocast: torch.dtype | None = None
    called: set[str] = field(default_factory=set)  # sites


@dataclass
class Watch:
    """What one step showed: the calls of every site in their order, the gradient of its weight, and the calls of the model, one
    for each set of sites that such a call went through."""

    calls: dict[str, list[Call]] = field(default_factory=dict)
    dw_NK: dict[str, Tensor] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    running: Run | None = None

    def runs_through_sites(self) -> list[Run]:
        """Those of ``runs`` that called a site; where sites were called past the model's forward alone, one of these."""
        return [run for run in self.runs if run.called] or [Run(None, called=set(self.calls))]

    def trained_calls(self, site: str) -> list[Call]:
        """The calls to learn from. Where some got a gradient, the others are repetitions: activation checkpointing runs a
        site twice, once without a graph or for a graph that is thrown away."""
        calls = self.calls.get(site, [])
        return [call for call in calls if call.dy_RN is not None] or calls

    def leaves_calls_out(self, site: str) -> bool:
        """Whether ``trained_calls`` are without some that ran on something else, as behind a stopped gradient."""
        calls = self.calls.get(site, [])
        has_gradient = [call.dy_RN is not None for call in calls]
        if all(has_gradient) or not any(has_gradient):
            return False
        sums = torch.stack([call.x_RK.double().nan_to_num().sum() for call in calls]).tolist()
        rows = [(call.m, of_rows) for call, of_rows in zip(calls, sums, strict=True)]
        trained = {of_call for of_call, is_trained in zip(rows, has_gradient, strict=True) if is_trained}
        return not trained.issuperset(rows)


@contextmanager
def watch(
    model: nn.Module,
    sites: Mapping[str, nn.Linear],
    rows: int,
    generator: torch.Generator,
    *,
    with_dw: Collection[str] = (),
    with_amax: Collection[str] = (),
) -> Iterator[Watch]:
    """Hooks on ``model`` while the block runs; behind it there are none.

    Calls of equally many rows show the same rows. Of the sites of ``with_dw`` the gradient of the weight is asked for, of those
    of ``with_amax`` the largest magnitude of x.
    """
    seen = Watch()
    take = _taking(rows, generator)
    handles = [
        model.register_forward_pre_hook(PassingHook(_begin_run(seen)), with_kwargs=True),
        model.register_forward_hook(PassingHook(_end_run(seen)), always_call=True),
    ]
    hooks = {name: PassingHook(_site_hook(seen, name, take, with_amax=name in with_amax)) for name in sites}
    handles += [site.register_forward_hook(hooks[name], with_kwargs=True) for name, site in sites.items()]
    weights = {name: weight for name, weight in _own_weights(model, sites).items() if name in with_dw}
    handles += [weight.register_hook(_weight_hook(seen, name)) for name, weight in weights.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
        for weight in weights.values():
            weight._backward_hooks = weight._backward_hooks or None  # an empty table would be a trace of ours


def _own_weights(model: nn.Module, sites: Mapping[str, nn.Linear]) -> dict[str, nn.Parameter]:
    """The weights that are trained and no other module's, site or embedding: the gradient of a shared one is not made of one
    site's rows."""
    weights = {name: weight for name, site in sites.items() if (weight := site._parameters.get("weight")) is not None}
    holders = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    return {name: weight for name, weight in weights.items() if weight.requires_grad and holders[id(weight)] == 1}


def _weight_hook(seen: Watch, name: str) -> Any:
    def hook(dw_NK: Tensor) -> None:
        so_far_NK = seen.dw_NK.get(name)
        seen.dw_NK[name] = dw_NK.detach().float().clone() if so_far_NK is None else so_far_NK + dw_NK.detach()

    return hook


def _begin_run(seen: Watch) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = Arguments(*tree_map(lambda leaf: leaf, (args, kwargs)))  # forward may take out of collections
        device = device_of_sites(module).type
        seen.running = Run(given, torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None)

    return hook


def _end_run(seen: Watch) -> Any:
    """Of runs through the same sites the first is enough: the batches of others are let go."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if seen.running is not None and all(run.called != seen.running.called for run in seen.runs):
            seen.runs.append(seen.running)
        seen.running = None

    return hook


def _site_hook(seen: Watch, name: str, take: Callable[[Tensor], Tensor], *, with_amax: bool) -> Any:
    def hook(module: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> None:
        x = args[0] if args else kwargs.get("input")
        if not (_ends_in(x, module.in_features) and _ends_in(y, module.out_features)):
            return  # a subclass, say, that takes or gives something else
        m = math.prod(x.shape[:-1])
        if not m or m != math.prod(y.shape[:-1]):
            return
        x_amax = largest_magnitude(x.detach()) if with_amax else None
        call = Call(m, take(x), x_amax, y.dtype, x.requires_grad)
        seen.calls.setdefault(name, []).append(call)
        if seen.running is not None:
            seen.running.called.add(name)
        if y.requires_grad:
            y.register_hook(lambda dy: _note_gradient(seen.calls[name], call, take(dy)))

    return hook


def largest_magnitude(values: Tensor) -> Tensor:
    """FP32; in one pass, without a copy of all magnitudes."""
    lowest, highest = torch.aminmax(values if values.dtype in _ORDERED else values.float())
    return torch.maximum(-lowest.float(), highest.float())


def _ends_in(value: object, features: int) -> TypeGuard[Tensor]:
    """Not of what ``torch.func`` puts in a tensor's place: its rows are not to be had either."""
    if not isinstance(value, Tensor) or not has_rows(value) or torch._C._functorch.is_functorch_wrapped_tensor(value):
        return False
    return value.ndim > 0 and value.shape[-1] == features and features > 0


def _note_gradient(calls: list[Call], call: Call, dy_RN: Tensor) -> None:
    """Of a second backward pass through the same call, as for a second task, another call with the same rows of x."""
    if call.dy_RN is None:
        call.dy_RN = dy_RN
    else:
        calls.append(replace(call, dy_RN=dy_RN, is_first_backward=False))


def _taking(rows: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    """A function that copies some rows of a tensor, in FP32; of tensors of equally many rows the same."""
    chosen = functools.cache(lambda m: choose_rows(m, rows, generator))

    @functools.cache
    def places(shape: torch.Size) -> tuple[Tensor, ...]:
        """An index along each axis but that of features. ``torch.unravel_index`` would wait for a GPU."""
        rows_R, along = chosen(math.prod(shape)), []
        for size in reversed(shape):
            along.append(rows_R % size)
            rows_R = rows_R // size
        return tuple(reversed(along))

    def take(values: Tensor) -> Tensor:
        values = torch.atleast_2d(values.detach())
        return values[places(values.shape[:-1])].float()

    return take


def choose_rows(m: int, rows: int, generator: torch.Generator) -> Tensor:
    """Indices of ``rows`` different rows out of ``m``, one at random from each of so many equal stretches."""
    device = generator.device
    if m <= rows:
        return torch.arange(m, device=device)
    edges = torch.arange(rows + 1, device=device) * m // rows
    chance_R = torch.rand(rows, generator=generator, device=device, dtype=torch.float64)
    return edges[:-1] + (chance_R * edges.diff()).long()
