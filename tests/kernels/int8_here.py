"""Kernels of INT8 that this CPU has: on x86 without VNNI or AMX, ``onednn.int8_dynamic`` would be wrong, and is refused."""

import pytest
import torch

from loka.kernels.contract import KERNELS
from loka.kernels.device import device_of


def needs(kernel: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(is_missing(kernel), reason=f"no {kernel} on this CPU")


def is_missing(kernel: str) -> bool:
    return bool(KERNELS.get(kernel).missing(device_of(torch.device("cpu"))))


def where_they_run(*kernels: str) -> list[object]:
    """For ``parametrize``."""
    return [pytest.param(kernel, marks=needs(kernel)) for kernel in kernels]
