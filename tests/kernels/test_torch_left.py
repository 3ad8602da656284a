"""A layer over another axis, multiplied from the left: the layer's numbers, and its output lies as the layer's does."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from loka.core.gemm import Device, GemmProblem, Role, SiteShape
from loka.core.recipe import Format
from loka.kernels.contract import KERNELS, why_not
from loka.kernels.providers.torch_left import LEFT, from_the_left, matrices_across

A_CPU, sizes = Device("cpu", "some CPU"), st.integers(0, 9)


@given(matrices=sizes, rows=sizes, k=sizes, n=st.integers(1, 9), bias=st.booleans())
def test_it_is_the_layer(matrices: int, rows: int, k: int, n: int, bias: bool) -> None:
    x_BRK, weight_NK = torch.randn(matrices, k, rows).mT, torch.randn(n, k)
    bias_N = torch.randn(n) if bias else None
    y_BRN = from_the_left(x_BRK, weight_NK, bias_N)
    assert (y_BRN.shape, y_BRN.dtype) == ((matrices, rows, n), x_BRK.dtype)
    expected = nn.functional.linear(x_BRK.double(), weight_NK.double(), None if bias_N is None else bias_N.double())
    torch.testing.assert_close(y_BRN.double(), expected, rtol=1e-5, atol=1e-5)
    assert y_BRN.is_contiguous()


@pytest.mark.parametrize(
    ("x", "matrices"),
    [
        (torch.zeros(4, 3, 5), None),
        (torch.zeros(4, 5, 3).mT, (4, 3)),
        (torch.zeros(2, 4, 5, 3).mT, (8, 3)),
        (torch.zeros(0, 5, 3).mT, (0, 3)),
        (torch.zeros(5, 7).t(), (1, 7)),
        (torch.zeros(2, 5, 4, 3).permute(0, 2, 3, 1), (2, 12)),  # an image's channels: all its places lie side by side
        (torch.zeros(6, 4, 5).permute(1, 2, 0), (1, 20)),  # of features that were stacked in front
        (torch.zeros(4, 5, 1).mT, None),  # one row: it lies as rows do
        (torch.zeros(4, 5, 0).mT, None),
        (torch.zeros(4, 1, 3).mT, None),  # one feature
        (torch.zeros(3, 1, 8), None),
        (torch.zeros(3, 4, 5).transpose(0, 1), None),  # rows are whole, wherever they lie
        (torch.zeros(9).unfold(0, 5, 1), None),  # rows overlap
        (torch.zeros(5).expand(3, 5), None),
        (torch.zeros(3, 1).expand(3, 5), None),
        (torch.zeros(5), None),
        (torch.tensor(1.0), None),
        (torch.zeros(3, 5).to_sparse(), None),
        (torch.nested.nested_tensor([torch.zeros(2, 8), torch.zeros(3, 8)], layout=torch.jagged), None),
    ],
)
def test_rows_that_lie_across_are_noticed(x: Tensor, matrices: tuple[int, int] | None) -> None:
    assert matrices_across(x) == matrices
    if matrices is not None:
        assert x.numel() == 0 or x.reshape(*matrices, x.shape[-1]).data_ptr() == x.data_ptr(), "read as it lies"


@pytest.mark.parametrize(
    ("role", "across", "device", "reason"),
    [
        (Role.FPROP, True, A_CPU, None),
        (Role.FPROP, False, A_CPU, "multiplies from the left, and here x lies row by row"),
        (Role.DGRAD, True, A_CPU, "is for fprop: torch's own layer makes the gradients"),
        (Role.WGRAD, True, A_CPU, "is for fprop: torch's own layer makes the gradients"),
        (Role.FPROP, True, Device("cuda", "some GPU", (9, 0)), "multiplies on a CPU alone"),
    ],
)
def test_it_runs_forward_on_a_cpu(role: Role, across: bool, device: Device, reason: str | None) -> None:
    problem = GemmProblem.of(role, SiteShape(64, 32, 16), Format.FP32, device, across=across)
    assert why_not(KERNELS.get(LEFT), problem) == reason
