"""In what precision torch multiplies FP32 matrices: a switch of the whole process, set for a while and given back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Precision = Literal["highest", "high", "medium"]  # FP32; TF32; and as coarse as bf16 on a CPU, TF32 on CUDA


@contextmanager
def float32_products(precision: Precision) -> Iterator[None]:
    """``torch.set_float32_matmul_precision`` for the block."""
    # Written through the older of torch's two interfaces, which sets both: inductor reads that one and fails when they differ
    # (pytorch/pytorch#166387). Read through the newer, which never raises.
    before = _current()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _current() -> Precision:
    if torch.backends.cuda.matmul.fp32_precision != "tf32":
        return "highest"
    of_cpu = torch.backends.mkldnn.matmul.fp32_precision  # pyrefly: ignore[missing-attribute]
    return "medium" if of_cpu == "bf16" else "high"
