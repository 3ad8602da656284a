"""A layer over another axis, multiplied from the left: the layer's numbers, and its output lies as the layer's does."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from loka.core.gemm import Device, GemmProblem, Role, SiteShape
from loka.core.recipe import Format
from loka.kernels.contract import KERNELS, why_not
from loka.kernels.providers.torch_left import LEFT, from_the_left, lies_across

sizes = st.integers(2, 9)


def lying_across(leading: list[int], rows: int, k: int) -> Tensor:
    return torch.randn(*leading, k, rows).mT


@given(leading=st.lists(st.integers(0, 4), max_size=2), rows=sizes, k=sizes, n=sizes, bias=st.booleans())
def test_it_is_the_layer(leading: list[int], rows: int, k: int, n: int, bias: bool) -> None:
    x, linear = lying_across(leading, rows, k), nn.Linear(k, n, bias)
    assert lies_across(x)
    y = from_the_left(x, linear.weight, linear.bias)
    assert (y.shape, y.dtype) == ((*leading, rows, n), x.dtype)
    torch.testing.assert_close(y.double(), linear.double()(x.double()), rtol=1e-5, atol=1e-5)
    assert y.is_contiguous()


@given(leading=st.lists(st.integers(1, 4), max_size=2), rows=sizes, k=sizes)
def test_rows_that_lie_one_by_one_do_not_lie_across(leading: list[int], rows: int, k: int) -> None:
    assert not lies_across(torch.randn(*leading, rows, k))


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor(1.0),
        torch.randn(4),
        torch.randn(8, 1),  # one feature, one row: both ways at once
        torch.randn(3, 1, 8),
        torch.randn(4, 8).to_sparse(),
        torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged),
    ],
    ids=["0-D", "1-D", "one feature", "one row", "sparse", "nested"],
)
def test_what_has_no_second_axis_to_lie_along_does_not(x: Tensor) -> None:
    assert not lies_across(x)


@pytest.mark.parametrize(
    ("role", "device", "reason"),
    [
        (Role.FPROP, Device("cpu", "some CPU"), None),
        (Role.DGRAD, Device("cpu", "some CPU"), "is for fprop: torch's own layer makes the gradients"),
        (Role.WGRAD, Device("cpu", "some CPU"), "is for fprop: torch's own layer makes the gradients"),
        (Role.FPROP, Device("cuda", "some GPU", (9, 0)), "multiplies on a CPU alone"),
    ],
)
def test_it_runs_forward_on_a_cpu(role: Role, device: Device, reason: str | None) -> None:
    assert why_not(KERNELS.get(LEFT), GemmProblem.of(role, SiteShape(64, 32, 16), Format.FP32, device)) == reason
