"""Errors of outputs by all recipes at once, held to casts and products one by one."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loka.core.gemm import Role
from loka.core.recipe import Format, Recipe, Scaling
from loka.kernels.contract import KERNELS
from loka.measure.factors import as_looked_at
from loka.numerics.fprop_errors import MOST_OUTPUTS, MOST_ROWS, RECIPES, fprop_errors, some_outputs, which_rows
from loka.numerics.metrics import mere_floored
from loka.numerics.scaling import STATIC_SCALE, dequantize, quantize


def cast(values: Tensor, format: Format, scaling: Scaling) -> Tensor:
    static = STATIC_SCALE if scaling is Scaling.STATIC else None
    return dequantize(quantize(values, format, scaling, static_scale=static), torch.float64)


def one_by_one(recipe: Recipe, x_RK: Tensor, weight_JK: Tensor) -> tuple[float, float]:
    """``mere_floored``, and Σ error² / Σ y²."""
    y_RJ = x_RK.double() @ weight_JK.double().t()
    out_RJ = cast(x_RK, recipe.a_format, recipe.a_scaling) @ cast(weight_JK, recipe.b_format, recipe.b_scaling).t()
    return float(mere_floored(out_RJ, y_RJ, axis=1)), float((out_RJ - y_RJ).square().sum() / y_RJ.square().sum())


def test_they_are_of_every_recipe_that_a_kernel_has() -> None:
    recipes = {kernel.recipe(Role.FPROP) for _, kernel in KERNELS.items()}
    assert set(RECIPES) == {as_looked_at(recipe) for recipe in recipes if recipe.a_format.is_8bit}


@given(rows=st.integers(1, 100), k=st.integers(1, 300), n=st.integers(1, MOST_OUTPUTS), seed=st.integers(0, 100))
def test_errors_are_those_of_each_recipe_alone(rows: int, k: int, n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x_RK = torch.randn(rows, k, generator=generator) * torch.exp2(3 * torch.randn(rows, 1, generator=generator))
    x_RK[0] = 0.0  # as a masked example
    x_RK = torch.cat([x_RK, torch.ones(1, k)])
    weight_JK = torch.randn(n, k, generator=generator)
    errors = fprop_errors(x_RK, x_RK.abs().amax(), weight_JK, weight_JK.abs().amax())
    for index, recipe in enumerate(RECIPES):
        floored, squares = one_by_one(recipe, x_RK, weight_JK)
        assert float(errors.floored_W[index]) == pytest.approx(floored, rel=1e-3, abs=1e-5)
        assert math.sqrt(float(errors.squares_W[index] / errors.size)) == pytest.approx(math.sqrt(squares), rel=1e-3, abs=1e-5)


def test_one_scale_for_all_covers_the_largest_value_of_rows_that_are_not_looked_at() -> None:
    """Ten thousand times as large: of int8, with one scale for all, nothing is left of the others."""
    x_RK, weight_JK = torch.randn(64, 32), torch.randn(16, 32)
    errors = fprop_errors(x_RK, torch.tensor(1e4), weight_JK, weight_JK.abs().amax())
    of = {str(recipe): float(error) for recipe, error in zip(RECIPES, errors.squares_W / errors.size, strict=True)}
    assert of["int8 tensorwise"] == pytest.approx(1.0)
    assert of["int8 rowwise"] < 1e-3


def test_every_call_and_the_weight_have_scales_of_their_own() -> None:
    """The same rows a thousand times as large in another call; and an output that is not looked at rules the weight's scale."""
    x_RK, weight_JK = torch.randn(32, 24), torch.randn(16, 24)
    both_RK = torch.cat([x_RK, 1000 * x_RK])
    amax_R1 = torch.cat([torch.full((32, 1), float(part.abs().amax())) for part in (x_RK, 1000 * x_RK)])
    one, both = (
        fprop_errors(x, a, weight_JK, weight_JK.abs().amax()) for x, a in ((x_RK, x_RK.abs().amax()), (both_RK, amax_R1))
    )
    index = [str(recipe) for recipe in RECIPES].index("int8 tensorwise")
    assert float(both.floored_W[index]) == pytest.approx(float(one.floored_W[index]), rel=1e-3)
    ruled = fprop_errors(x_RK, x_RK.abs().amax(), weight_JK, 1e4 * weight_JK.abs().amax())
    assert float(ruled.squares_W[index] / ruled.size) == pytest.approx(1.0)


def test_values_whose_squares_leave_fp32_have_errors_too() -> None:
    x_RK, weight_JK = torch.randn(64, 32), torch.randn(16, 32)
    amaxes = x_RK.abs().amax(), weight_JK.abs().amax()
    usual, huge = (fprop_errors(size * x_RK, size * amaxes[0], weight_JK, amaxes[1]) for size in (1.0, 2.0**70))
    by_own_scale = [index for index, recipe in enumerate(RECIPES) if recipe.a_scaling is not Scaling.STATIC]
    torch.testing.assert_close(huge.floored_W[by_own_scale], usual.floored_W[by_own_scale])


@pytest.mark.parametrize("every", [2, 16, 128])
def test_no_kind_of_row_is_passed_over(every: int) -> None:
    """Of rows that come in turns, as those of one example do, looks see all turns, and each about as often."""
    seen = torch.cat([which_rows(torch.zeros(4096, 1), look) for look in range(64)])
    counts = torch.bincount(seen % every, minlength=every)
    assert len(seen) == 64 * MOST_ROWS
    assert counts.min() > 0.7 * len(seen) / every
    assert counts.max() < 1.3 * len(seen) / every


def test_of_few_rows_all_are_looked_at_and_of_wide_ones_fewer() -> None:
    assert which_rows(torch.zeros(MOST_ROWS, 8), 3).tolist() == list(range(MOST_ROWS))
    assert len(which_rows(torch.zeros(64, 2**16), 0)) == 8


def test_outputs_that_stand_for_all_are_a_copy() -> None:
    """The weight itself changes while samples wait to be learned."""
    weight_NK = torch.randn(16, 4)
    some_JK = some_outputs(weight_NK)
    expected_JK = weight_NK.clone()
    weight_NK.zero_()
    assert torch.equal(some_JK, expected_JK)
    assert some_outputs(torch.arange(100.0)[:, None])[:, 0].tolist() == [float(n) for n in range(0, 100, 4)]
