"""Ops of our own, so that torch.compile sees one node and not what is inside.

Registered by their schema, not by ``torch.library.custom_op``, whose wrapper takes some 15 µs of every call, also in a compiled
graph.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("loka", "FRAGMENT")
_HOMES = (  # where ops are defined
    "providers.onednn",
    "providers.torch_high",
    *(f"triton.{name}" for name in ("block", "casts", "gemm", "gradient", "share")),
)


def load_ops() -> None:
    """Register all of LoKA's ops with torch, for a process that loads an exported program: its model names them."""
    for home in _HOMES:
        importlib.import_module(f"loka.kernels.{home}")


def op(name: str, *devices: str) -> Callable[[Callable[..., Any]], Any]:
    """``loka::name`` on ``devices``, CPU and CUDA if none are given: a function that changes none of its arguments, and whose
    results share no memory with them. It has no gradient."""

    def register(function: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        for device in devices or ("CPU", "CUDA"):
            _LIBRARY.impl(name, function, device)
        return getattr(torch.ops.loka, name).default

    return register


def fake_of(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What ``loka::name`` returns as far as a tracer asks: shapes, dtypes and strides."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.register_fake(f"loka::{name}", function, lib=_LIBRARY)
        return function

    return register
