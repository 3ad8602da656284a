"""What hooks take of a step: rows of tensors in any layout, a few features of many rows, gradients of weights."""

import itertools
import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from loka.numerics.wgrad_errors import MOST_FEATURES
from loka.probe.watch import choose_rows, choose_stretches, largest_magnitude, watch


@given(m=st.integers(1, 5000), rows=st.integers(1, 300), seed=st.integers(0, 99))
def test_chosen_rows_are_different_and_from_everywhere(m: int, rows: int, seed: int) -> None:
    chosen = choose_rows(m, rows, torch.Generator().manual_seed(seed)).tolist()
    assert len(set(chosen)) == len(chosen) == min(m, rows)
    assert all(0 <= row < m for row in chosen)
    gaps = [b - a for a, b in itertools.pairwise(chosen)]
    assert all(gap <= 2 * m / min(m, rows) + 1 for gap in gaps)


@given(shape=st.lists(st.integers(1, 6), min_size=0, max_size=3), is_transposed=st.booleans())
def test_rows_are_taken_of_any_shape_and_layout(shape: list[int], is_transposed: bool) -> None:
    """The same of x and dy, as if both were flat, and copies: nothing that the model does to them later shows. Closely, in
    stretches of four."""
    sites = {"": nn.Linear(5, 3)}
    x = torch.randn(*shape, 5)
    if is_transposed and len(shape) > 1:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    dy = torch.randn(*shape, 3)
    m, seed = math.prod(shape), torch.Generator().manual_seed(1)
    with mock.patch.multiple("loka.probe.watch", MOST_ROWS=8, STRETCH=4):
        with watch(sites[""], sites, 4, torch.Generator().manual_seed(1), closely={"": MOST_FEATURES}) as seen:
            sites[""](x).backward(dy)
        chosen_R, stretches_S = choose_rows(m, 4, seed), choose_stretches(m, seed)
    (call,) = seen.calls[""]
    assert stretches_S.tolist() == list(range(m)) if m <= 8 else (stretches_S.view(2, 4).diff(dim=1) == 1).all()
    flat_MK, flat_MN = x.clone().reshape(-1, 5), dy.clone().reshape(-1, 3)
    x.zero_()
    dy.zero_()
    for rows, close, flat in (call.x_RK, call.x_close, flat_MK), (call.dy_RN, call.dy_close, flat_MN):
        assert rows is not None
        assert close is not None
        assert torch.equal(rows, flat[chosen_R])
        assert torch.equal(close.values_SF, flat[stretches_S])
        assert close.amax == flat.abs().max()


def test_a_wide_layer_is_looked_at_closely_by_some_features() -> None:
    """The same of the gradient of its weight, over two backward passes."""
    site, x_MK = nn.Linear(3 * MOST_FEATURES, MOST_FEATURES + 1), torch.randn(7, 3 * MOST_FEATURES)
    with watch(site, {"": site}, 4, torch.Generator(), closely={"": MOST_FEATURES}) as seen:
        for _ in range(2):
            site(x_MK).square().sum().backward()
    call, _ = seen.calls[""]
    assert call.x_close is not None
    assert torch.equal(call.x_close.values_SF, x_MK[:, ::3])
    assert site.weight.grad is not None
    torch.testing.assert_close(seen.dw_JI[""], site.weight.grad[::2, ::3])
    assert not seen.dw_NK


def test_the_largest_value_is_that_of_all_rows_where_it_is_asked_for() -> None:
    model = nn.Linear(4, 1)
    x_MK = torch.zeros(64, 4)
    x_MK[13, 2] = -9.0
    for asked, expected in ({"": 64}, [9.0]), ({}, [None]):
        with watch(model, {"": model}, 1, torch.Generator(), closely=asked) as seen:
            model(x_MK)
        assert [call.x_close and call.x_close.amax for call in seen.calls[""]] == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.bool, torch.uint8])
def test_the_largest_magnitude_of_any_dtype(dtype: torch.dtype) -> None:
    values = torch.tensor([[1.0, -3.0 if dtype.is_signed else 3.0]]).to(dtype)
    assert float(largest_magnitude(values)) == (1.0 if dtype is torch.bool else 3.0)


def test_the_gradient_of_a_weight_of_another_layout_is_not_looked_at() -> None:
    class Packed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.view(4, 3)

    module = Packed(4, 3, bias=False)
    module.weight = nn.Parameter(torch.randn(12))
    with watch(module, {"": module}, 2, torch.Generator(), with_dw=[""], closely={"": 64}) as seen:
        module(torch.randn(8, 4)).sum().backward()
    assert module.weight.grad is not None
    assert seen.calls[""][0].dy_RN is not None
    assert not seen.dw_NK
    assert not seen.dw_JI


class Writing(nn.Module):
    """Rows in two axes, whose layers' outputs are written in place."""

    def __init__(self, is_in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.act = nn.Linear(6, 8), nn.Linear(8, 6), nn.ReLU(inplace=is_in_place)
        self.is_in_place = is_in_place

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.act(self.up(x)))
        return y.add_(x) if self.is_in_place else y + x


@pytest.mark.parametrize("is_autocast", [False, True])
def test_gradients_arrive_where_outputs_are_written_in_place(is_autocast: bool) -> None:
    """A layer's output for rows in several axes is a view, which loses its gradient when it is written."""
    x, seen = torch.randn(5, 7, 6), []
    for is_in_place in (False, True):
        model = Writing(is_in_place)
        sites = {"up": model.up, "down": model.down}
        with (
            watch(model, sites, 9, torch.Generator().manual_seed(1), closely={"up": 4}) as of_step,
            torch.autocast("cpu", torch.bfloat16, enabled=is_autocast),
        ):
            model(x).square().sum().backward()
        seen.append(of_step)
    for site in ("up", "down"):
        (plain,), (written,) = (of_step.calls[site] for of_step in seen)
        assert plain.dy_RN is not None
        assert torch.equal(written.dy_RN, plain.dy_RN)
        assert (written.dy_close is None) == (site == "down")
