"""Watching one step: hooks on every site that take some rows of x and, when the gradient arrives, the same rows of dy.

Rows are taken from tensors in whatever layout: flattening one that lies transposed would copy all of it. The gradient of the
weight costs nothing more, and is made of all rows.

Axes:  M rows of a call,  R rows taken of them,  K in_features,  N out_features;
       S more rows, with only I of the K features, and J of the N (F of either).
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from loka.kernels.providers.torch_left import matrices_across
from loka.nn.linear import has_rows
from loka.nn.passing_hook import PassingHook, on_gradient
from loka.nn.site_device import device_of_sites
from loka.nn.unwrap import Arguments
from loka.numerics.wgrad_errors import feature_stride, some_of_gradient
from loka.probe.weights import plain_weight

MOST_ROWS = 2048  # of a call that are looked at closely;
STRETCH = 128  # where there are more, rows are taken in stretches as long as the blocks that share a scale
_ORDERED = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})  # those that ``aminmax`` takes


class Close(NamedTuple):
    """A tensor looked at closely: a few features of many rows, and the largest magnitude of all its values."""

    values_SF: Tensor
    amax: Tensor


@dataclass
class Call:
    """One call of a site during the step."""

    m: int
    x_RK: Tensor
    dtype: torch.dtype  # of the output: what the GEMM ran in
    needs_dx: bool  # whether anything in front of it learns
    dy_RN: Tensor | None = None
    is_first_backward: bool = True  # of several through this call
    x_close: Close | None = None
    dy_close: Close | None = None
    across: int | None = None  # as in the site's facts


@dataclass
class Run:
    """One call of the model during the step."""

    given: Arguments | None  # None where sites were called past the model's forward
    autocast: torch.dtype | None = None
    called: set[str] = field(default_factory=set)  # sites


@dataclass
class Watch:
    """What one step showed: the calls of every site in their order, the gradient of its weight, whole or in part, and one call
    of the model for each set of sites that a call went through."""

    calls: dict[str, list[Call]] = field(default_factory=dict)
    dw_NK: dict[str, Tensor] = field(default_factory=dict)
    dw_JI: dict[str, Tensor] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    running: Run | None = None

    def runs_through_sites(self) -> list[Run]:
        """Those of ``runs`` that called a site; if sites were only called past the model's forward, one Run of all of them."""
        return [run for run in self.runs if run.called] or [Run(None, called=set(self.calls))]

    def has_gradients(self) -> bool:
        return any(call.dy_RN is not None for calls in self.calls.values() for call in calls)

    def trained_calls(self, site: str) -> list[Call]:
        """The calls to learn from. Where some got a gradient, the others are repetitions: activation checkpointing runs a
        site twice, once without a graph or for a graph that is thrown away."""
        calls = self.calls.get(site, [])
        return [call for call in calls if call.dy_RN is not None] or calls

    def leaves_calls_out(self, site: str) -> bool:
        """Whether ``trained_calls`` leaves out calls that ran on other rows, as behind a stopped gradient."""
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
    closely: Mapping[str, int] = MappingProxyType({}),
) -> Iterator[Watch]:
    """Hooks on ``model`` while the block runs; after it there are none.

    Calls of equally many rows show the same rows. Sites in ``with_dw`` give the whole gradient of their weight; those in
    ``closely`` are also looked at closely, at no more features than it names.
    """
    seen = Watch()
    take = _Take(rows, generator)
    handles = [
        model.register_forward_pre_hook(PassingHook(_begin_run(seen)), with_kwargs=True),
        model.register_forward_hook(PassingHook(_end_run(seen)), always_call=True),
    ]
    hooks = {name: PassingHook(_site_hook(seen, name, take, closely.get(name, 0))) for name in sites}
    handles += [site.register_forward_hook(hooks[name], with_kwargs=True) for name, site in sites.items()]
    weights = {name: weight for name, weight in _own_weights(model, sites).items() if name in with_dw or name in closely}
    for name, weight in weights.items():
        if name in with_dw:
            handles.append(weight.register_hook(_weight_hook(seen.dw_NK, name, lambda dw_NK: dw_NK)))
        if name in closely:
            some = functools.partial(some_of_gradient, most=closely[name])
            handles.append(weight.register_hook(_weight_hook(seen.dw_JI, name, some)))
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
    weights = {name: weight for name, site in sites.items() if (weight := plain_weight(site)) is not None}
    holders = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    return {name: weight for name, weight in weights.items() if weight.requires_grad and holders[id(weight)] == 1}


def _weight_hook(sums: dict[str, Tensor], name: str, part: Callable[[Tensor], Tensor]) -> Any:
    def hook(dw_NK: Tensor) -> None:
        of_dw = part(dw_NK.detach())
        sums[name] = sums[name] + of_dw if name in sums else of_dw.float().clone()

    return hook


def _begin_run(seen: Watch) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = Arguments(*tree_map(lambda leaf: leaf, (args, kwargs)))  # copied collections: forward may take items out
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


def _site_hook(seen: Watch, name: str, take: "_Take", features: int) -> Any:
    """``features``: how many are looked at closely, at most; 0 for none."""

    def hook(module: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> None:
        x = args[0] if args else kwargs.get("input")
        if not (_ends_in(x, module.in_features) and _ends_in(y, module.out_features)):
            return  # a subclass, say, that takes or gives something else
        m = math.prod(x.shape[:-1])
        if not m or m != math.prod(y.shape[:-1]):
            return
        call = Call(m, take.rows(x), y.dtype, x.requires_grad, x_close=take.closely(x, features), across=_rows_across(x))
        seen.calls.setdefault(name, []).append(call)
        if seen.running is not None:
            seen.running.called.add(name)
        if y.requires_grad:
            on_gradient(y, lambda dy: _note_gradient(seen.calls[name], call, take.rows(dy), take.closely(dy, features)))

    return hook


def _rows_across(x: Tensor) -> int | None:
    """Where ``x`` lies transposed, as behind ``x.mT``, how many of its rows lie side by side in every feature."""
    matrices = matrices_across(x)
    return matrices and matrices[1]


def largest_magnitude(values: Tensor) -> Tensor:
    """FP32; in one pass, without a copy of all magnitudes."""
    lowest, highest = torch.aminmax(values if values.dtype in _ORDERED else values.float())
    return torch.maximum(-lowest.float(), highest.float())


def _ends_in(value: object, features: int) -> TypeGuard[Tensor]:
    """Whether ``value`` is a tensor of rows of so many features; what ``torch.func`` puts in a tensor's place has no rows."""
    if not isinstance(value, Tensor) or not has_rows(value) or torch._C._functorch.is_functorch_wrapped_tensor(value):
        return False
    return value.ndim > 0 and value.shape[-1] == features and features > 0


def _note_gradient(calls: list[Call], call: Call, dy_RN: Tensor, dy_close: Close | None) -> None:
    """A second backward pass through the same call, as for a second task, is noted as another call with the same rows of x."""
    if call.dy_RN is None:
        call.dy_RN, call.dy_close = dy_RN, dy_close
    else:
        calls.append(replace(call, dy_RN=dy_RN, dy_close=dy_close, is_first_backward=False))


class _Take:
    """Copies of parts of tensors, in FP32; of tensors of equally many rows the same rows."""

    def __init__(self, rows: int, generator: torch.Generator) -> None:
        few = functools.cache(lambda m: choose_rows(m, rows, generator))
        many = functools.cache(lambda m: choose_stretches(m, generator))
        self._few = functools.cache(lambda shape: _places(few(math.prod(shape)), shape))
        self._many = functools.cache(lambda shape: _places(many(math.prod(shape)), shape))

    def rows(self, values: Tensor) -> Tensor:
        values = torch.atleast_2d(values.detach())
        return values[self._few(values.shape[:-1])].float()

    def closely(self, values: Tensor, features: int) -> Close | None:
        if not features:
            return None
        values = torch.atleast_2d(values.detach())
        places = [along_S[:, None] for along_S in self._many(values.shape[:-1])]
        chosen_F = torch.arange(0, values.shape[-1], feature_stride(values.shape[-1], features), device=values.device)
        return Close(values[(*places, chosen_F)].float(), largest_magnitude(values))


def _places(rows_R: Tensor, shape: torch.Size) -> tuple[Tensor, ...]:
    """The indices of the rows along each axis of ``shape``. ``torch.unravel_index`` would wait for a GPU."""
    along = []
    for size in reversed(shape):
        along.append(rows_R % size)
        rows_R = rows_R // size
    return tuple(reversed(along))


def choose_rows(m: int, rows: int, generator: torch.Generator) -> Tensor:
    """Indices of ``rows`` different rows out of ``m``, one at random from each of so many equal stretches."""
    device = generator.device
    if m <= rows:
        return torch.arange(m, device=device)
    edges = torch.arange(rows + 1, device=device) * m // rows
    chance_R = torch.rand(rows, generator=generator, device=device, dtype=torch.float64)
    return edges[:-1] + (chance_R * edges.diff()).long()


def choose_stretches(m: int, generator: torch.Generator) -> Tensor:
    """Indices of all rows, or of stretches at random places: rows of one example lie together, and depend on each other."""
    device = generator.device
    if m <= MOST_ROWS:
        return torch.arange(m, device=device)
    first_S1 = STRETCH * choose_rows(m // STRETCH, MOST_ROWS // STRETCH, generator)[:, None]
    return (first_S1 + torch.arange(STRETCH, device=device)).flatten()
