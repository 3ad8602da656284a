"""LeftLinear: nn.Linear in everything but the order in which it sums."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loka.core.errors import InvalidInput
from loka.nn import left_linear
from loka.nn.left_linear import LeftLinear


@pytest.fixture
def from_the_left(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what was multiplied from the left."""
    shapes: list[tuple[int, ...]] = []
    real = left_linear.from_the_left

    def told(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        shapes.append(tuple(x.shape))
        return real(x, weight_NK, bias_N)

    monkeypatch.setattr(left_linear, "from_the_left", told)
    return shapes


def across(*shape: int) -> Tensor:
    *leading, rows, k = shape
    return torch.randn(*leading, k, rows).mT


@pytest.mark.parametrize("bias", [False, True])
def test_it_multiplies_from_the_left_where_x_lies_across(bias: bool, from_the_left: list[tuple[int, ...]]) -> None:
    linear = nn.Linear(24, 16, bias)
    module = LeftLinear.from_linear(linear)
    with torch.no_grad():
        for x in (across(5, 24), across(7, 5, 24), across(2, 3, 5, 24), torch.randn(7, 5, 24)):
            torch.testing.assert_close(module(x), linear(x), rtol=1e-5, atol=1e-5)
    assert from_the_left == [(5, 24), (7, 5, 24), (2, 3, 5, 24)]


def test_gradients_are_torchs_own(from_the_left: list[tuple[int, ...]]) -> None:
    linear, x = nn.Linear(24, 16), across(7, 5, 24).requires_grad_()
    module = LeftLinear.from_linear(copy.deepcopy(linear))
    dy = torch.randn(7, 5, 16)
    for one in (linear, module):
        one(x).backward(dy)
    assert x.grad is not None
    once = torch.autograd.grad(linear(x), x, dy)[0]
    assert torch.equal(x.grad, 2 * once)
    assert linear.weight.grad is not None
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad, linear.weight.grad)
    module.requires_grad_(False)
    module(x).sum().backward()
    assert from_the_left == []


def test_under_autocast_it_multiplies_in_that_dtype(from_the_left: list[tuple[int, ...]]) -> None:
    module, x = LeftLinear.from_linear(nn.Linear(24, 16)), across(7, 5, 24)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y, expected = module(x), F.linear(x, module.weight, module.bias)
    assert y.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    assert from_the_left == [(7, 5, 24)]


def test_it_is_compiled_whole(fresh_compiler: None) -> None:
    """For inputs that lie either way, and of any number of rows."""
    module = LeftLinear.from_linear(nn.Linear(24, 16)).requires_grad_(False)
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    for x in (across(7, 5, 24), across(9, 6, 24), torch.randn(7, 5, 24)):
        torch.testing.assert_close(compiled(x), F.linear(x, module.weight, module.bias), rtol=1e-5, atol=1e-5)


def test_it_has_the_face_of_linear() -> None:
    linear = nn.Linear(24, 16).eval()
    linear.gain = 3.0  # type: ignore[assignment]
    module = LeftLinear.from_linear(linear)
    assert [id(p) for p in module.parameters()] == [id(p) for p in linear.parameters()]
    assert list(module.state_dict()) == list(linear.state_dict())
    assert not module.training
    assert module.gain == 3.0
    assert repr(module) == "LeftLinear(in_features=24, out_features=16, bias=True, fprop=torch.fp32_left)"


def test_a_layer_that_makes_its_weight_is_refused() -> None:
    with pytest.raises(InvalidInput, match="remove its parametrization"):
        LeftLinear.from_linear(nn.utils.parametrizations.weight_norm(nn.Linear(24, 16)))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (across(7, 5, 23), r"expected input of shape \(..., 24\), got \(7, 5, 23\)"),
        (across(7, 5, 24).double(), "input is torch.float64, the weight torch.float32"),
    ],
)
def test_bad_input_says_what_is_expected(x: Tensor, message: str) -> None:
    with torch.no_grad(), pytest.raises(InvalidInput, match=message):
        LeftLinear.from_linear(nn.Linear(24, 16))(x)
