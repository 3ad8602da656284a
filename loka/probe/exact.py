"""FP32 products that are FP32: neither TF32 nor autocast, whatever the training around them uses."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from loka.numerics.float32_products import float32_products


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Inside the block matrix products of FP32 tensors on ``device`` are rounded nowhere else."""
    with float32_products("highest"), torch.autocast(device.type, enabled=False):
        yield
