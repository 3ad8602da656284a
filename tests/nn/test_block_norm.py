"""BlockNorm against its formula written element by element, its bound, and everything a module lives through."""

import copy
import math
import re

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import loka
from loka.core.errors import InvalidInput
from loka.nn.block_norm import block_sizes

WIDTHS = st.integers(1, 700)
BLOCKS = st.sampled_from([1, 2, 7, 128, 256])


def by_formula(row: list[float], sizes: list[int], eps: float) -> list[float]:
    """The definition in Python floats, one block after another."""
    out: list[float] = []
    for size in sizes:
        block = row[len(out) : len(out) + size]
        rms = math.sqrt(math.fsum(value * value for value in block) / size + eps)
        out += [value / rms for value in block]
    return out


@pytest.mark.parametrize(
    ("n", "sizes"),
    [
        (1, [1]),
        (256, [256]),
        (257, [129, 128]),
        (512, [256, 256]),
        (768, [256] * 3),
        (1000, [250] * 4),
        (1023, [256, 256, 256, 255]),
        (4098, [242, *[241] * 16]),
    ],
)
def test_block_sizes_by_hand(n: int, sizes: list[int]) -> None:
    assert list(block_sizes(n)) == sizes


@given(n=st.integers(1, 200_000), block=st.integers(1, 1000))
def test_blocks_cover_the_features_and_are_as_few_and_as_even_as_can_be(n: int, block: int) -> None:
    sizes = block_sizes(n, block)
    assert sum(sizes) == n
    assert max(sizes) <= block
    assert max(sizes) - min(sizes) <= 1
    assert (len(sizes) - 1) * block < n  # one block fewer could not hold them
    assert list(sizes) == sorted(sizes, reverse=True)


@given(n=WIDTHS, block=BLOCKS, leading=st.lists(st.integers(0, 3), max_size=3), seed=st.integers(0, 2**16))
@example(n=257, block=256, leading=[2], seed=0)
@example(n=1000, block=256, leading=[], seed=0)
def test_values_are_the_formulas(n: int, block: int, leading: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-3, 3, n, dtype=torch.float64)  # so that blocks differ, and a wrong one shows
    x = scale * torch.randn(*leading, n, generator=generator, dtype=torch.float64)
    y = loka.BlockNorm(n, block, eps=1e-3)(x)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    count = -(-n // block)
    sizes = [n // count + (i < n % count) for i in range(count)]
    for row, out in zip(x.reshape(-1, n).tolist(), y.reshape(-1, n).tolist(), strict=True):
        assert out == pytest.approx(by_formula(row, sizes, 1e-3), rel=1e-12)


MAGNITUDES = st.sampled_from([0.0, 1e-45, 1e-30, 1e-10, 1e-3, 1.0, 1e4, 1e10, 1e18, 1e30, 3e38])


@given(
    n=WIDTHS,
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    magnitude=MAGNITUDES,
    outlier=MAGNITUDES,
    seed=st.integers(0, 2**16),
)
@example(n=256, dtype=torch.float32, magnitude=0.0, outlier=1.0, seed=0)  # all in one value: the bound is reached
@example(n=256, dtype=torch.bfloat16, magnitude=0.0, outlier=3e38, seed=0)
def test_output_never_leaves_the_bound(n: int, dtype: torch.dtype, magnitude: float, outlier: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = magnitude * torch.rand(4, n, generator=generator, dtype=torch.float64)
    x[:, seed % n] = outlier
    x = x.clamp(max=torch.finfo(dtype).max).to(dtype)
    module = loka.BlockNorm(n)
    assert module.bound == math.sqrt(block_sizes(n)[0])
    rounding = 1 + 2 * torch.finfo(dtype).eps
    assert module(x).double().abs().max().item() <= module.bound * rounding


def test_the_bound_is_reached_and_is_16_for_whole_blocks() -> None:
    x = torch.zeros(1, 512)
    x[0, 300] = -1e4
    assert loka.BlockNorm(512).bound == 16
    assert loka.BlockNorm(512)(x)[0, 300].item() == pytest.approx(-16)


def test_an_outlier_touches_its_own_block_only() -> None:
    x = torch.randn(3, 600)
    spoiled = x.clone()
    spoiled[1, 250] = 1e6
    y, y_spoiled = loka.BlockNorm(600)(x), loka.BlockNorm(600)(spoiled)
    differs = (y != y_spoiled).nonzero()
    assert set(differs[:, 0].tolist()) == {1}
    assert (int(differs[:, 1].min()), int(differs[:, 1].max())) == (200, 399)


def test_zeros_stay_zero_and_their_gradient_is_finite() -> None:
    x = torch.zeros(2, 300, requires_grad=True)
    y = loka.BlockNorm(300)(x)
    y.sum().backward()
    assert not y.any()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full_like(x, 1e-5**-0.5))


def test_second_derivatives_at_zeros_are_finite() -> None:
    """As for a gradient penalty. Those of the norm of a vector are not: squares may not be summed by it."""
    norm = loka.BlockNorm(8)
    x = torch.zeros(2, 8, dtype=torch.float64, requires_grad=True)
    y = norm(x)
    (dx,) = torch.autograd.grad((y + y.square()).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(dx.square().sum(), x)
    torch.testing.assert_close(second, torch.full_like(x, 4 / norm.eps**1.5))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_seen_behind_the_norm(bad: float) -> None:
    x = torch.randn(2, 300)
    x[0, 10] = bad
    y = loka.BlockNorm(300)(x)
    assert y[0, 10].isnan()
    assert y[1].isfinite().all()


@given(n=st.integers(1, 40), block=st.sampled_from([3, 8, 256]), seed=st.integers(0, 2**16))
def test_gradient_is_that_of_finite_differences(n: int, block: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, n, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loka.BlockNorm(n, block, eps=1e-2), (x,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_narrow_types_are_float32(dtype: torch.dtype) -> None:
    """Squares of 500 overflow float16, and a bf16 sum of 256 squares would be off by percents: only rounding may remain."""
    x = (500 * torch.randn(64, 300, generator=torch.Generator().manual_seed(0))).to(dtype)
    y = loka.BlockNorm(300)(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y, loka.BlockNorm(300)(x.double()).to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


def test_autocast_changes_nothing() -> None:
    module, x = loka.BlockNorm(300), torch.randn(4, 300)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x), module(x.clone()))
        assert module(x).dtype == torch.float32
        assert module(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("n", [256, 1000, 257])
def test_compiles_into_one_graph_forward_and_backward(n: int) -> None:
    module = loka.BlockNorm(n)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")

    def run(function) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        x = torch.linspace(-3, 5, 6 * n, dtype=torch.float64).reshape(2, 3, n).requires_grad_()
        y = function(x)
        y.square().mul(torch.arange(n)).sum().backward()
        assert x.grad is not None
        return y.detach(), x.grad

    for actual, expected in zip(run(compiled), run(module), strict=True):
        torch.testing.assert_close(actual, expected)


def test_compiled_on_a_cpu_its_deviations_are_made_once_for_who_reads_its_output_twice(fresh_compiler: None) -> None:
    """As an INT8 cast does, for the largest value and for the codes; unless gradients are needed."""
    norm, x = loka.BlockNorm(64), torch.randn(48, 64)

    def read_twice(x: Tensor) -> Tensor:
        y = norm(x)
        return (y / y.amax(1, keepdim=True)).round()

    compiled = torch.compile(read_twice, fullgraph=True)
    y, (code,) = run_and_get_code(compiled, x)
    torch.testing.assert_close(y, read_twice(x), rtol=0, atol=1)  # codes
    assert len(re.findall(r"\.rsqrt\(\)|sqrt\(tmp", code)) == 1
    x.requires_grad_()
    torch.testing.assert_close(compiled(x), read_twice(x), rtol=0, atol=1)
    program = torch.export.export(norm, (torch.randn(48, 64),))
    assert "as_strided" not in str(program.graph)


def test_has_nothing_to_learn_or_to_save() -> None:
    module = copy.deepcopy(loka.BlockNorm(1000, eps=1e-6))
    assert not list(module.parameters())
    assert not module.state_dict()
    assert repr(module) == "BlockNorm(1000, block=256, eps=1e-06)"


@pytest.mark.parametrize("x", [torch.randn(4, 7), torch.tensor(1.0), torch.ones(4, 8, dtype=torch.int64)])
def test_bad_input_says_what_is_expected(x: Tensor) -> None:
    with pytest.raises(InvalidInput, match=r"expected floats of shape \(..., 8\), got torch\.\w+ of"):
        loka.BlockNorm(8)(x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "n_features must be.*at least 1"),
        (("a",), "n_features must be"),
        ((8, 0), "block must be"),
        ((8, 8, 0.0), "eps must be"),
    ],
)
def test_bad_options_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        loka.BlockNorm(*arguments)


@given(vectors=st.integers(1, 5), n=st.integers(1, 40), block=st.integers(1, 16))
def test_rows_of_several_vectors(vectors: int, n: int, block: int) -> None:
    norm = loka.BlockNorm(n, block, eps=0.1)
    over = norm.over(vectors * n)
    if over is None:
        assert vectors > 1
        assert norm.sizes[0] != norm.sizes[-1]
        return
    x = torch.randn(3, vectors, n, dtype=torch.float64)
    torch.testing.assert_close(over(x.flatten(1)), norm(x).flatten(1))
    assert norm.over(vectors * n + 1) is None or n == 1
