"""The precision in which torch multiplies FP32 matrices: a switch of the whole process, set for a while and then restored."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Precision = Literal["highest", "high", "medium"]  # FP32; TF32; and as coarse as bf16 on a CPU, TF32 on CUDA


@contextmanager
def float32_products(precision: Precision) -> Iterator[None]:
    """``torch.set_float32_matmul_precision`` for the block."""
    # torch has two interfaces to it. We write through the older, which sets both: inductor reads that one and fails when they
    # differ (pytorch/pytorch#166387). We read through the newer, which never raises and may hold a setting for each backend.
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # pyrefly: ignore[missing-attribute]
    before = [backend.fp32_precision for backend in backends]
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(_in_one_word(*map(str, before)))
        for backend, own in zip(backends, before, strict=True):
            if backend.fp32_precision != own:
                backend.fp32_precision = own


def _in_one_word(of_cuda: str, of_cpu: str) -> Precision:
    if of_cuda != "tf32":
        return "highest"
    return "medium" if of_cpu == "bf16" else "high"
