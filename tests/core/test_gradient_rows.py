"""dy = e·u: two numbers for each output are exchanged for one that says how strong a row is."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loka.core.gradient_rows import alignment, reference_of, split_rows, strength


@given(rows=st.integers(1, 40), outputs=st.integers(1, 70), zeros=st.floats(0, 1), exponent=st.integers(-25, 20))
def test_the_parts_multiply_to_the_rows(rows: int, outputs: int, zeros: float, exponent: int) -> None:
    """For any rows, more or fewer than outputs, with zeros among them, and however small."""
    dy_RN = torch.randn(rows, outputs) * 10.0**exponent * (torch.rand(rows, outputs) >= zeros)
    reference_N = reference_of(dy_RN)
    u_RN, e_R = split_rows(dy_RN, reference_N)
    assert u_RN.isfinite().all()
    assert e_R.isfinite().all()
    torch.testing.assert_close(u_RN * e_R[:, None], dy_RN, rtol=1e-5, atol=0)
    assert (u_RN @ reference_N >= -1e-3).all()
    nonzero = dy_RN.any(1)
    torch.testing.assert_close(strength(u_RN, reference_N)[nonzero], torch.ones(int(nonzero.sum())), rtol=1e-4, atol=0)


@pytest.mark.parametrize("outputs", [16, 300])
def test_a_planted_error_and_direction_are_found(outputs: int) -> None:
    """Errors of two humps times one direction, through a mask as a ReLU leaves it: u takes two values and e is the error."""
    error_R = torch.where(torch.rand(128) < 0.2, -0.8, 0.2)
    direction_N = torch.randn(outputs) + torch.randn(outputs).sign()
    dy_RN = error_R[:, None] * direction_N * (torch.rand(128, outputs) < 0.5)
    reference_N = reference_of(dy_RN)
    _, e_R = split_rows(dy_RN, reference_N)
    assert abs(alignment(reference_N, direction_N)) > 0.9999
    seen_R = dy_RN.any(1)  # a row of the mask may be empty
    ratio_R = (torch.sign(reference_N @ direction_N) * e_R / error_R)[seen_R]
    assert ratio_R.std() < 0.01 * ratio_R.mean()  # by a plain norm of so sparse rows it would be 0.25 for 16 outputs


def test_the_largest_entry_of_a_reference_is_positive_and_its_rms_about_one() -> None:
    dy_RN = torch.randn(64, 1) * torch.tensor([1.0, -5.0, 2.0, 0.0]) * 1e-12
    reference_N = reference_of(dy_RN)
    assert reference_N[1] == reference_N.max() > 0
    assert (reference_N[[0, 2]] < 0).all()
    assert reference_N.square().mean().sqrt() == pytest.approx(1, abs=0.05)


def test_rows_without_a_gradient_stay_so() -> None:
    dy_RN = torch.zeros(3, 5)
    u_RN, e_R = split_rows(dy_RN, reference_of(dy_RN))
    assert not u_RN.any()
    assert not e_R.any()
