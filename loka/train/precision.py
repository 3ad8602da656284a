"""The device a run uses and the arithmetic on it."""

from contextlib import AbstractContextManager, nullcontext

import torch

from loka.core.errors import InvalidInput
from loka.kernels.device import device_named
from loka.numerics.float32_products import float32_products
from loka.train.config import Precision


def resolve_device(name: str, precision: Precision) -> torch.device:
    """The device a user names, refused where it lacks the precision."""
    device = device_named(name)
    if device.type == "cpu" and precision == Precision.TF32:
        raise InvalidInput("tf32 is an arithmetic of NVIDIA's tensor cores, and this run is on the CPU: use precision fp32")
    return device


def matmul_precision(precision: Precision) -> AbstractContextManager[None]:
    """fp32 GEMMs on CUDA run in exactly the precision asked for inside the block; torch's own setting returns behind it."""
    return float32_products("high" if precision == Precision.TF32 else "highest")


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """For the forward pass. Embedding look-ups are no autocast op, so the tables stay fp32 and the dense part alone changes."""
    return torch.autocast(device.type, torch.bfloat16) if precision == Precision.BF16 else nullcontext()
