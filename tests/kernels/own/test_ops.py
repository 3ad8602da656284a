"""Our ops as torch sees them: schemas, fake kernels, and one graph under torch.compile."""

import pytest
import torch

import loka.kernels.triton.casts
import loka.kernels.triton.gemm  # noqa: F401  (both register ops)


def arguments(name: str) -> tuple[object, ...]:
    a, b = torch.randn(20, 32).to(torch.float8_e4m3fn), torch.randn(24, 32).to(torch.float8_e4m3fn)
    return {
        "cast_e4m3": (torch.randn(20, 30), "rowwise", 20, 32, 1.0, "1x128", 32, 32, 1.0),
        "fp8_gemm": (a, b, torch.ones(20, 1), torch.ones(1, 1), torch.randn(24), 20, 24, 32, torch.bfloat16, True),
        "fp8_grouped_gemm": (a, b, torch.ones(1, 20), torch.ones(24, 1), 20, 24, torch.float32, False),
    }[name]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", ["cast_e4m3", "fp8_gemm", "fp8_grouped_gemm"])
def test_fake_kernels_tell_the_truth(name: str) -> None:
    op = getattr(torch.ops.loka, name).default
    torch.library.opcheck(op, arguments(name), test_utils="test_faketensor")
