"""FP32 products that are FP32: neither TF32 nor autocast, whatever the training around them uses."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Inside the block matrix products of FP32 tensors on ``device`` are rounded nowhere else."""
    # Read by the newer of torch's two interfaces, which never raises, and written by the older, which sets both
    # (pytorch/pytorch#166387). What is "medium" there is TF32 on CUDA and bf16 on a CPU.
    is_medium = torch.backends.mkldnn.matmul.fp32_precision == "bf16"  # pyrefly: ignore[missing-attribute]
    before = "medium" if is_medium else "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
