"""Errors of dw on a few features at once, held to casts and products one by one."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loka.core.gemm import GemmProblem, Role, SiteShape
from loka.core.recipe import Format, Recipe, Scaling
from loka.kernels.contract import KERNELS, is_oracle
from loka.kernels.device import device_of
from loka.numerics.metrics import mere_floored
from loka.numerics.scaling import STATIC_SCALE, dequantize, quantize
from loka.numerics.wgrad_errors import MOST_FEATURES, RECIPES, VALUES, of_batch, some_rows, wgrad_errors


def cast_transposed(values_RF: Tensor, format: Format, scaling: Scaling) -> Tensor:
    static = STATIC_SCALE if scaling is Scaling.STATIC else None
    return dequantize(quantize(values_RF.t().contiguous(), format, scaling, static_scale=static), torch.float64)


def one_by_one(recipe: Recipe, x_RK: Tensor, dy_RN: Tensor) -> tuple[float, float]:
    """``mere_floored``, and Σ error² / Σ dw², of the whole product."""
    dw_NK = dy_RN.t().double() @ x_RK.double()
    dy_NR = cast_transposed(dy_RN, recipe.a_format, recipe.a_scaling)
    x_KR = cast_transposed(x_RK, recipe.b_format, recipe.b_scaling)
    out_NK = dy_NR @ x_KR.t()
    return float(mere_floored(out_NK, dw_NK, axis=0)), float((out_NK - dw_NK).square().sum() / dw_NK.square().sum())


def test_they_are_of_every_fp8_recipe_that_a_gradient_of_weights_can_have() -> None:
    problem = GemmProblem.of(Role.WGRAD, SiteShape(128, 32, 16), Format.FP32, device_of(torch.device("cpu")))
    of_oracle = {
        kernel.recipe(Role.WGRAD)
        for name, kernel in KERNELS.items()
        if is_oracle(name) and "int8" not in name and kernel.why_not(problem) is None
    }
    assert set(RECIPES) == of_oracle


@given(
    rows=st.integers(1, VALUES // MOST_FEATURES),
    k=st.integers(1, MOST_FEATURES),
    n=st.integers(1, MOST_FEATURES),
    seed=st.integers(0, 100),
    size=st.sampled_from([1.0, 1e-12, 1e-20]),
)
def test_errors_of_several_batches_are_those_of_each_recipe_alone(rows: int, k: int, n: int, seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(2):
        x_RK = torch.randn(rows, k, generator=generator) * torch.exp2(3 * torch.randn(k, generator=generator))
        x_RK[:, 0] *= x_RK[:, 0] > 0
        batches.append((x_RK, size * torch.randn(rows, n, generator=generator)))
    errors = wgrad_errors([some_rows(*batch) for batch in batches])
    for number, (x_RK, dy_RN) in enumerate(batches):
        for index, recipe in enumerate(RECIPES):
            floored, squares = one_by_one(recipe, x_RK, dy_RN)
            assert float(errors.floored_WB[index, number]) == pytest.approx(floored, rel=1e-3, abs=1e-5)
            of_size = float(errors.squares_WB[index, number] / errors.size_B[number])
            assert math.sqrt(of_size) == pytest.approx(math.sqrt(squares), rel=1e-3, abs=1e-5, nan_ok=True)  # 0 of 0


def test_what_gradients_add_up_to_is_next_to_rows_that_do_not_cancel() -> None:
    """Two equal rows: Σ dw² is twice what it would be without a term between them; two opposite ones leave nothing."""
    x_RK, dy_RN = torch.randn(1, 6).repeat(2, 1), torch.randn(1, 3).repeat(2, 1)
    alike, opposite = (some_rows(x_RK, torch.stack([dy_RN[0], sign * dy_RN[1]])) for sign in (1, -1))
    assert wgrad_errors([alike, opposite]).size_B.tolist() == pytest.approx([2.0, 0.0])


def test_some_rows_of_a_batch_are_held_to_the_gradient_of_all() -> None:
    """The same rows four times: their errors are all alike, so four times as large, where chance would double them."""
    x_RK, dy_RN = torch.randn(32, 6), torch.randn(32, 3)
    x_MK, dy_MN = x_RK.repeat(4, 1), dy_RN.repeat(4, 1)
    of_all = wgrad_errors([some_rows(x_MK, dy_MN)])
    some = some_rows(x_RK, dy_RN)
    of_some = wgrad_errors([of_batch(*some[:4], dy_MN.t() @ x_MK, 128)])
    torch.testing.assert_close(2 * of_some.floored_WB, of_all.floored_WB, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(of_some.size_B, of_all.size_B, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(4 * of_some.squares_WB, of_all.squares_WB, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(of_all.alike_WB, of_all.squares_WB, rtol=1e-4, atol=0.0)
    assert (of_some.alike_WB < 0.9 * of_some.squares_WB).all()


def test_without_a_gradient_all_is_zero() -> None:
    x_RK = torch.randn(9, 5)
    errors = wgrad_errors([some_rows(x_RK, torch.zeros(9, 3)), some_rows(torch.zeros(9, 5), torch.randn(9, 3))])
    assert not any(values.any() for values in errors)


def test_some_features_of_a_wide_layer_are_cast_by_the_largest_of_all() -> None:
    """Feature 1, which is not among the evenly spaced ones, takes the range of one scale for all, and of no other."""
    x_RK, dy_RN = torch.randn(64, 4 * MOST_FEATURES), torch.randn(64, 8)
    plain = wgrad_errors([some_rows(x_RK, dy_RN)]).floored_WB[:, 0]
    x_RK[0, 1] = 2.0**20
    some = some_rows(x_RK, dy_RN)
    assert some.x_RI.shape == (64, MOST_FEATURES)
    assert float(some.x_RI.abs().max()) < 100
    floored = wgrad_errors([some]).floored_WB[:, 0]
    tensorwise = torch.tensor([recipe.b_scaling is Scaling.TENSORWISE for recipe in RECIPES])
    assert (floored > 5 * plain)[tensorwise].all()
    torch.testing.assert_close(floored[~tensorwise], plain[~tensorwise])
