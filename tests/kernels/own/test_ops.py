"""Our ops as torch sees them: what the fake kernels promise is what the real ones return."""

import pytest
import torch

from loka.kernels.triton import block, casts, gemm, gradient, share

REGISTERED_BY = (block, casts, gemm, gradient, share)  # importing them is what makes torch know these


def cases() -> dict[str, tuple[object, ...]]:
    """Arguments, by the name of an op and maybe more words."""
    a, b = torch.randn(20, 32).to(torch.float8_e4m3fn), torch.randn(24, 32).to(torch.float8_e4m3fn)
    return {
        "cast_e4m3": (torch.randn(20, 30), "rowwise", 20, 32, 1.0, "1x128", 32, 32, 1.0, False),
        "cast_e4m3 and sums": (torch.randn(80, 30), "tensorwise", 80, 32, 1.0, "tensorwise", 32, 80, 1.0, True),
        "cast_e4m3 and sums, rows alone": (torch.randn(80, 30), "rowwise", 80, 32, 1.0, "none", 0, 0, 1.0, True),
        "cast_by_rows": (torch.randn(20, 30), True),
        "cast_by_rows by powers of two": (torch.randn(3, 520), True),
        "cast_by_rows not transposed": (torch.randn(3, 520), False),
        "cast_int8_rows": (torch.randn(20, 30), 32, 32),
        "scaled_gemm": (a, b, torch.ones(20, 1), torch.ones(1, 1), torch.randn(24), 20, 24, 32, torch.bfloat16, True, 0.5),
        "block_forward": (
            a, None, 0.5, b, torch.ones(24), None, 20, 32, 256, 1e-5, "relu", torch.bfloat16, True, True, None,
        ),
        "block_forward without norm": (
            a, None, 0.5, b, torch.ones(24), None, 20, 32, None, 0.0, "relu", torch.float32, False, False, torch.bfloat16,
        ),
        "norm_forward": (torch.randn(20, 30), 256, 1e-5, "none", None, True, True, torch.float8_e4m3fn),
        "block_gradient": (torch.randn(20, 24), torch.randn(20, 32).to(torch.float8_e4m3fn), torch.ones(1, 20),
                           256, "relu", True, True, True, 0.5),
        "block_gradient of the weight without norm": (torch.randn(20, 24), torch.randn(20, 24), torch.empty(0), None, "relu",
                                                      False, True, False, 0.5),
        "norm_gradient": (torch.randn(20, 24), torch.randn(20, 32).to(torch.float8_e4m3fn), torch.ones(1, 20), 256),
    }  # fmt: skip


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", cases())
def test_fake_kernels_tell_the_truth(name: str) -> None:
    op = getattr(torch.ops.loka, name.split()[0]).default
    torch.library.opcheck(op, cases()[name], test_utils="test_faketensor")
