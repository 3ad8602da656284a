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
    """Inside the block, fp32 GEMMs on CUDA run in exactly the precision asked for; after it torch's setting is as before."""
    return float32_products("high" if precision == Precision.TF32 else "highest")


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Autocast for the forward pass. It leaves embedding look-ups in fp32, so it changes the dense part alone."""
    return torch.autocast(device.type, torch.bfloat16) if precision == Precision.BF16 else nullcontext()
