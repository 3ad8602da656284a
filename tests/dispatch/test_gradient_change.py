"""How far a plan puts gradients off, against sums written out."""

import math

import pytest
import torch

from loka.dispatch.gradient_change import GradientChange, gradient_change

HIGH = {"a.weight": torch.tensor([3.0, 4.0]), "b.weight": torch.tensor([[1.0, 0.0]])}


def test_it_is_that_of_the_worst_module_over_all_batches() -> None:
    first = {"a.weight": torch.tensor([3.0, 4.5]), "b.weight": torch.tensor([[1.0, 0.3]])}
    second = {"a.weight": torch.tensor([3.0, 4.0]), "b.weight": torch.tensor([[0.6, 0.0]])}
    change = gradient_change([(first, HIGH), (second, HIGH)])
    assert change.module == "b"
    assert change.error == pytest.approx(math.sqrt((0.3**2 + 0.4**2) / 2))  # of a: sqrt(0.25 / 50)


def test_a_gradient_that_does_not_arrive_is_off_by_all_it_is() -> None:
    assert gradient_change([({"a.weight": HIGH["a.weight"]}, HIGH)]) == GradientChange(1.0, "b")
    assert gradient_change([({**HIGH, "b.weight": torch.zeros(1, 2)}, HIGH)]) == GradientChange(1.0, "b")


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_no_number_is_off_without_bound_and_judges_nobody(wrong: float) -> None:
    bad = {**HIGH, "a.weight": torch.tensor([wrong, 0.0])}
    assert gradient_change([(bad, HIGH)]) == GradientChange(math.inf, "a")
    assert gradient_change([({**bad, "b.weight": torch.zeros(1, 2)}, bad)]) == GradientChange(1.0, "b")


def test_half_precision_gradients_are_summed_in_full() -> None:
    high = {"a.weight": torch.full((4096,), 300.0, dtype=torch.float16)}  # its squares are past float16
    assert gradient_change([({"a.weight": high["a.weight"] * 2}, high)]) == GradientChange(1.0, "a")


def test_what_learns_nothing_counts_for_nothing() -> None:
    high = {**HIGH, "dead.weight": torch.zeros(2), "nearly.weight": torch.tensor([1e-9])}
    planned = {**HIGH, "dead.weight": torch.full((2,), 1e-8), "nearly.weight": torch.tensor([-1e-9])}
    assert gradient_change([(planned, high)]).error == 0
    assert gradient_change([({}, {})]) == GradientChange(0.0, "")


def test_a_bias_whose_gradient_is_rounding_alone_is_judged_with_its_weight() -> None:
    high = {**HIGH, "a.bias": torch.tensor([1e-2])}
    assert gradient_change([({**high, "a.bias": torch.tensor([-1e-2])}, high)]).error < 0.01


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("exact", [0.0, 1e-9])
def test_what_is_no_number_spoils_a_weight_however_little_it_learns(wrong: float, exact: float) -> None:
    high = {**HIGH, "dead.weight": torch.tensor([exact])}
    assert gradient_change([({**high, "dead.weight": torch.tensor([wrong])}, high)]) == GradientChange(math.inf, "dead")


@pytest.mark.parametrize("size", [1e-25, 1e22])
def test_gradients_whose_squares_leave_fp32_are_judged(size: float) -> None:
    high = {"a.weight": torch.tensor([size, 2 * size])}
    assert gradient_change([({"a.weight": torch.zeros(2)}, high)]).error == pytest.approx(1.0)


def test_a_module_of_small_gradients_is_judged_too() -> None:
    """They are a hundred-thousandth of the whole, and learn; a ten-millionth does not."""
    high = {"a.weight": torch.tensor([1.0]), "b.weight": torch.tensor([1e-5]), "c.weight": torch.tensor([1e-7])}
    lost = {**high, "b.weight": torch.zeros(1), "c.weight": torch.zeros(1)}
    assert gradient_change([(lost, high)]) == GradientChange(1.0, "b")
    assert gradient_change([({**lost, "b.weight": high["b.weight"]}, high)]).error == 0.0
