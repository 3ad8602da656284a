"""LeftLinear: nn.Linear in everything but the order in which it sums."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from loka.core.errors import InvalidInput
from loka.nn import left_linear
from loka.nn.left_linear import LeftLinear


@pytest.fixture
def from_the_left(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what was multiplied from the left."""
    shapes: list[tuple[int, ...]] = []
    real = left_linear.from_the_left

    def told(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, **options: bool) -> Tensor:
        shapes.append(tuple(x.shape))
        return real(x, weight_NK, bias_N, **options)

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
    assert from_the_left == [(1, 5, 24), (7, 5, 24), (6, 5, 24)]


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


@pytest.mark.parametrize("learns", ["weight", "bias"])
def test_what_learns_behind_an_input_that_does_not_has_torchs_own_gradients(
    learns: str, from_the_left: list[tuple[int, ...]]
) -> None:
    """As in the first layer of a model."""
    linear, x, dy = nn.Linear(24, 16).requires_grad_(False), across(7, 5, 24), torch.randn(7, 5, 16)
    linear.get_parameter(learns).requires_grad_(True)
    module = LeftLinear.from_linear(copy.deepcopy(linear))
    for one in (linear, module):
        one(x).backward(dy)
    gradient, expected = module.get_parameter(learns).grad, linear.get_parameter(learns).grad
    assert gradient is not None
    assert expected is not None
    assert torch.equal(gradient, expected)
    assert from_the_left == []


def test_under_autocast_it_is_torchs_own(from_the_left: list[tuple[int, ...]]) -> None:
    module, x = LeftLinear.from_linear(nn.Linear(24, 16)), across(7, 5, 24)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y, expected = module(x), F.linear(x, module.weight, module.bias)
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, expected)
    assert from_the_left == []


def test_on_another_device_it_is_torchs_own(from_the_left: list[tuple[int, ...]]) -> None:
    module = LeftLinear.from_linear(nn.Linear(24, 16)).to("meta")
    with torch.no_grad():
        assert module(torch.empty(7, 24, 5, device="meta").mT).shape == (7, 5, 16)
    assert from_the_left == []


def test_it_is_compiled_whole(fresh_compiler: None) -> None:
    """For inputs that lie either way, and of any number of rows."""
    module = LeftLinear.from_linear(nn.Linear(24, 16)).requires_grad_(False)
    graphs = CompileCounterWithBackend("inductor")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=graphs)
    for x in (across(7, 5, 24), across(9, 6, 24), torch.randn(7, 5, 24)):
        torch.testing.assert_close(compiled(x), F.linear(x, module.weight, module.bias), rtol=1e-5, atol=1e-5)
    assert [multiplications_of(graph) for graph in graphs.graphs] == [["bmm"], ["linear"]]


@pytest.mark.parametrize("feeds_product", [False, True])
def test_a_product_reads_its_output_row_by_row_if_it_was_told_of_one(feeds_product: bool, fresh_compiler: None) -> None:
    """Otherwise compiled code turns the output where it is read, and a product is given it as it was made."""
    linear, x = nn.Linear(24, 16), torch.randn(7, 24, 5)
    layer, strides = LeftLinear.from_linear(linear, feeds_product=feeds_product).requires_grad_(False), []

    @torch.library.custom_op("loka_tests::product", mutates_args=(), tags=(torch.Tag.flexible_layout,))
    def product(a: Tensor, b: Tensor) -> Tensor:
        strides.append(b.stride())
        return a @ b

    product.register_fake(lambda a, b: a @ b)
    y = torch.compile(lambda x: product(x, layer(x.mT)), fullgraph=True)(x)
    torch.testing.assert_close(y, x @ linear(x.mT), rtol=1e-5, atol=1e-5)
    assert strides == [(5 * 16, 16, 1) if feeds_product else (5 * 16, 1, 5)]


class OfTheOtherAxis(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        return self.layer((x if chosen is None else x[:, chosen.nonzero().flatten()]).mT)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("shape", "axis"), [((24, 8), 1), ((4, 24, 8), 0)], ids=["rows", "matrices"])
def test_it_is_exported_for_any_number_of_them(shape: tuple[int, ...], axis: int, strict: bool) -> None:
    linear = nn.Linear(24, 16)
    model = OfTheOtherAxis(LeftLinear.from_linear(linear)).requires_grad_(False)
    sizes = ({axis: torch.export.Dim("any", min=0)},)
    program = torch.export.export(model, (torch.randn(shape),), dynamic_shapes=sizes, strict=strict)
    assert multiplications_of(program.graph_module) == ["bmm"]
    serve = program.module()
    for size in (0, 1, 2, 33):
        x = torch.randn(*shape[:axis], size, *shape[axis + 1 :])
        torch.testing.assert_close(serve(x), linear(x.mT), rtol=1e-5, atol=1e-5)


def test_rows_whose_number_the_data_tell_are_torchs_own(fresh_compiler: None) -> None:
    linear, x = nn.Linear(24, 16), torch.randn(24, 8)
    model, chosen = OfTheOtherAxis(LeftLinear.from_linear(linear)).requires_grad_(False), torch.arange(8) % 3 > 0
    program = torch.export.export(model, (x, chosen))
    assert multiplications_of(program.graph_module) == ["linear"]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for call in (program.module(), torch.compile(model, fullgraph=True)):
            for some in (chosen, ~chosen):
                torch.testing.assert_close(call(x, some), linear(x[:, some].mT), rtol=1e-5, atol=1e-5)


def multiplications_of(graph: torch.fx.GraphModule) -> list[str]:
    names = [str(getattr(node.target, "__name__", node.target)).split(".")[0] for node in graph.graph.nodes]
    return [name for name in names if name in ("bmm", "linear")]


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
