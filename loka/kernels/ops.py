"""Ops of our own, so that torch.compile sees one node and not what is inside.

They are registered by their schema, not by ``torch.library.custom_op``: its wrapper takes some 15 µs of every call, in compiled
graphs too.
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
    """Register all of LoKA's ops with torch. A process that loads an exported program needs this: the program names them."""
    for home in _HOMES:
        importlib.import_module(f"loka.kernels.{home}")


def op(name: str, *devices: str) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as ``loka::name`` on ``devices``, CPU and CUDA if none are given. It must change none of its
    arguments, and its results must share no memory with them. The op has no gradient."""

    def register(function: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        for device in devices or ("CPU", "CUDA"):
            _LIBRARY.impl(name, function, device)
        return getattr(torch.ops.loka, name).default

    return register


def fake_of(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what a tracer sees of the results of ``loka::name``: their shapes, dtypes and strides."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.register_fake(f"loka::{name}", function, lib=_LIBRARY)
        return function

    return register
