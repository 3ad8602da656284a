"""The device a run uses and the arithmetic on it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from loka.core.errors import InvalidInput
from loka.kernels.device import device_named
from loka.train.config import Precision


def resolve_device(name: str, precision: Precision) -> torch.device:
    """The device a user names, refused where it lacks the precision."""
    device = device_named(name)
    if device.type == "cpu" and precision is Precision.TF32:
        raise InvalidInput("tf32 is an arithmetic of NVIDIA's tensor cores, and this run is on the CPU: use precision fp32")
    return device


@contextmanager
def matmul_precision(precision: Precision) -> Iterator[None]:
    """fp32 GEMMs on CUDA run in exactly the precision asked for inside the block; torch's own setting returns behind it."""
    # Written through the older of torch's two interfaces, which sets both: inductor reads that one and fails when they differ
    # (pytorch/pytorch#166387). Read through the newer, which never raises.
    before = torch.backends.cuda.matmul.fp32_precision
    torch.set_float32_matmul_precision("high" if precision is Precision.TF32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("high" if before == "tf32" else "highest")


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """For the forward pass. Embedding look-ups are no autocast op, so the tables stay fp32 and the dense part alone changes."""
    return torch.autocast(device.type, torch.bfloat16) if precision is Precision.BF16 else nullcontext()
