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
from loka.numerics.fprop_errors import MOST_OUTPUTS, MOST_ROWS, RECIPES, fprop_errors, some_outputs, some_rows
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
    errors = fprop_errors(x_RK, x_RK.abs().amax(), weight_JK)
    for index, recipe in enumerate(RECIPES):
        floored, squares = one_by_one(recipe, x_RK, weight_JK)
        assert float(errors.floored_W[index]) == pytest.approx(floored, rel=1e-3, abs=1e-5)
        assert math.sqrt(float(errors.squares_W[index] / errors.size)) == pytest.approx(math.sqrt(squares), rel=1e-3, abs=1e-5)


def test_one_scale_for_all_covers_the_largest_value_of_rows_that_are_not_looked_at() -> None:
    """Ten thousand times as large: of int8, with one scale for all, nothing is left of the others."""
    x_RK, weight_JK = torch.randn(64, 32), torch.randn(16, 32)
    errors = fprop_errors(x_RK, torch.tensor(1e4), weight_JK)
    of = {str(recipe): float(error) for recipe, error in zip(RECIPES, errors.squares_W / errors.size, strict=True)}
    assert of["int8 tensorwise"] == pytest.approx(1.0)
    assert of["int8 rowwise"] < 1e-3


def test_values_whose_squares_leave_fp32_have_errors_too() -> None:
    x_RK, weight_JK = torch.randn(64, 32), torch.randn(16, 32)
    usual, huge = (fprop_errors(size * x_RK, size * x_RK.abs().amax(), weight_JK) for size in (1.0, 2.0**70))
    by_own_scale = [index for index, recipe in enumerate(RECIPES) if recipe.a_scaling is not Scaling.STATIC]
    torch.testing.assert_close(huge.floored_W[by_own_scale], usual.floored_W[by_own_scale])


@pytest.mark.parametrize("every", [2, 16, 128])
def test_no_kind_of_row_is_passed_over(every: int) -> None:
    """Of rows that come in turns, as those of one example do, looks see all turns, and each about as often."""
    rows = torch.arange(4096)[:, None] % every
    seen = torch.cat([some_rows(rows, look) for look in range(64)]).flatten()
    counts = torch.bincount(seen, minlength=every)
    assert len(seen) == 64 * MOST_ROWS
    assert counts.min() > 0.7 * len(seen) / every
    assert counts.max() < 1.3 * len(seen) / every


def test_of_few_rows_all_are_looked_at_and_of_wide_ones_fewer() -> None:
    few = torch.randn(MOST_ROWS, 8)
    assert some_rows(few, 3) is few
    assert len(some_rows(torch.zeros(64, 2**16), 0)) == 8


def test_outputs_that_stand_for_all_are_a_copy() -> None:
    """The weight itself changes while samples wait to be learned."""
    weight_NK = torch.randn(16, 4)
    some_JK = some_outputs(weight_NK)
    expected_JK = weight_NK.clone()
    weight_NK.zero_()
    assert torch.equal(some_JK, expected_JK)
    assert some_outputs(torch.zeros(100, 4)).shape == (25, 4)
