import math

import pytest
import torch

from loka.core.errors import InvalidInput
from loka.core.recipe import Format, Scaling
from loka.numerics.reference import gemm
from loka.numerics.scaling import quantize

SCALINGS = [Scaling.TENSORWISE, Scaling.ROWWISE, Scaling.COLWISE, Scaling.BLOCK_1X128, Scaling.BLOCK_128X128]


@pytest.mark.parametrize("a_scaling", SCALINGS)
@pytest.mark.parametrize("b_scaling", SCALINGS)
def test_product_of_codes_and_scales_written_out(a_scaling, b_scaling):
    """Sums code·scale·code·scale one contracted index at a time, each scale found by the rule of its own scaling."""

    def scale_at(q, row, column):
        rows, columns = q.scale.shape
        return q.scale[min(row, rows - 1), column // 128 if q.scaling in SCALINGS[3:] else min(column, columns - 1)]

    a = quantize(torch.randn(3, 130), Format.E5M2, a_scaling)
    b = quantize(torch.randn(2, 130), Format.E4M3, b_scaling)
    expected = torch.zeros(3, 2, dtype=torch.float64)
    for m in range(3):
        for n in range(2):
            for k in range(130):
                a_value = a.codes[m, k].double() * scale_at(a, m, k).double()
                expected[m, n] += a_value * b.codes[n, k].double() * scale_at(b, n, k).double()
    torch.testing.assert_close(gemm(a, b), expected, rtol=1e-12, atol=1e-12)


def test_high_precision_operands_are_multiplied_as_they_are():
    a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[10.0, 1.0]], dtype=torch.bfloat16)
    assert gemm(a, b).tolist() == [[12.0], [34.0]]
    assert gemm(a, b).dtype is torch.float64


def test_rounded_once_from_float64_to_the_dtype_asked_for():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(6, 4096, generator=generator), torch.randn(5, 4096, generator=generator)
    sums = [[math.fsum((a_K * b_K).tolist()) for b_K in b.double()] for a_K in a.double()]  # each product fits float64
    exact = torch.tensor(sums, dtype=torch.float64)
    assert torch.equal(gemm(a, b, torch.float32), exact.float())
    assert not torch.equal(a @ b.t(), exact.float())  # sums in FP32 would be seen
    assert gemm(a, b, torch.bfloat16).dtype is torch.bfloat16


@pytest.mark.parametrize("format", [Format.E4M3, Format.E5M2, Format.INT8])
def test_a_value_that_is_not_finite_reaches_its_row_of_the_product(format):
    a = torch.ones(3, 4)
    a[1, 2] = float("inf")
    product = gemm(quantize(a, format, Scaling.ROWWISE), quantize(torch.ones(2, 4), format, Scaling.ROWWISE))
    assert product.isfinite().tolist() == [[True, True], [False, False], [True, True]]


def test_operands_that_do_not_fit_are_named():
    with pytest.raises(InvalidInput, match=r"got \(2, 3\) and \(3, 4\)"):
        gemm(torch.ones(2, 3), torch.ones(3, 4))
    with pytest.raises(InvalidInput, match=r"got \(3,\) and \(4, 3\)"):
        gemm(torch.ones(3), torch.ones(4, 3))
