"""The precision of FP32 products is a switch of the process, and is given back as it was found."""

from collections.abc import Iterator

import pytest
import torch

from loka.numerics.float32_products import float32_products

BACKENDS = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # pyrefly: ignore[missing-attribute]


def found() -> list[str]:
    return [backend.fp32_precision for backend in BACKENDS]


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
@pytest.mark.parametrize("within", ["highest", "high", "medium"])
def test_of_what_was_said_in_one_word(before: str, within: str) -> None:
    torch.set_float32_matmul_precision(before)
    with float32_products(within):  # pyrefly: ignore[bad-argument-type]
        assert torch.get_float32_matmul_precision() == within
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("of_cuda", ["ieee", "tf32"])
@pytest.mark.parametrize("of_cpu", ["ieee", "tf32", "bf16"])
def test_of_what_was_said_of_each_backend(of_cuda: str, of_cpu: str) -> None:
    for backend, precision in zip(BACKENDS, (of_cuda, of_cpu), strict=True):
        backend.fp32_precision = precision
    with float32_products("highest"):
        assert "tf32" not in found()
    assert found() == [of_cuda, of_cpu]
