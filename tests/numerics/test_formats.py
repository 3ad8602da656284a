import math

import numpy as np
import pytest
import torch

from loka.core.errors import InvalidInput
from loka.core.recipe import Format
from loka.numerics.formats import decode, encode, format_of, info, torch_dtype

EIGHT_BIT = [format for format in Format if format.is_8bit]
INF, NAN = math.inf, math.nan


def bits(codes):
    return codes.view(torch.uint8).numpy()


def assert_same_codes(codes, expected_bits, grid):
    """Bit for bit, −0 included, except that any NaN is as good as another."""
    got = bits(codes)
    both_nan = np.isnan(grid.values[got]) & np.isnan(grid.values[expected_bits])
    wrong = (got != expected_bits) & ~both_nan
    assert not wrong.any(), f"{wrong.sum()} codes differ, first at {np.flatnonzero(wrong)[:5]}"


@pytest.mark.parametrize("format", EIGHT_BIT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_rounds_to_nearest_even(format, dtype, grids):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    assert_same_codes(encode(x, format), grids[format].encode(x.double().numpy()), grids[format])


@pytest.mark.parametrize("format", EIGHT_BIT)
def test_fp32_rounds_right_at_every_tie_and_one_ulp_beside_it(format, grids):
    positive = np.sort(grids[format].values[np.isfinite(grids[format].values) & (grids[format].values >= 0)])
    ties = ((positive[1:] + positive[:-1]) / 2).astype(np.float32)
    x = np.concatenate([np.nextafter(ties, np.float32(0)), ties, np.nextafter(ties, np.float32(INF))])
    x = np.concatenate([x, -x])
    assert_same_codes(encode(torch.from_numpy(x), format), grids[format].encode(x.astype(np.float64)), grids[format])


@pytest.mark.parametrize("format", EIGHT_BIT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_all_256_codes_decode_to_the_value_of_their_bits(format, dtype, grids):
    codes = torch.arange(256, dtype=torch.uint8).view(torch_dtype(format))
    values = decode(codes, dtype)
    assert values.dtype is dtype
    np.testing.assert_array_equal(values.double().numpy(), grids[format].values)
    not_nan = ~np.isnan(grids[format].values)
    np.testing.assert_array_equal(values.signbit().numpy()[not_nan], np.signbit(grids[format].values)[not_nan])


@pytest.mark.parametrize("format", EIGHT_BIT)
def test_every_finite_value_of_the_format_is_its_own_code(format, grids):
    codes = torch.arange(256, dtype=torch.uint8).view(torch_dtype(format))
    values = decode(codes)
    kept = values.isfinite() & (values.abs() <= info(format).max)  # leaves out int8's −128
    np.testing.assert_array_equal(bits(encode(values, format)[kept]), bits(codes[kept]))


@pytest.mark.parametrize("format", EIGHT_BIT)
def test_info_agrees_with_the_bit_layout(format, grids):
    values = grids[format].values[np.isfinite(grids[format].values)]
    numbers = info(format)
    assert numbers.max == (127 if format is Format.INT8 else values.max())
    assert numbers.smallest_subnormal == values[values > 0].min()
    assert numbers.dtype is torch_dtype(format)
    if format is not Format.INT8:
        assert numbers.smallest_normal == numbers.smallest_subnormal * 2**numbers.mantissa_bits
        steps_in_a_binade = ((values >= 1) & (values < 2)).sum()
        assert steps_in_a_binade == 2**numbers.mantissa_bits


@pytest.mark.parametrize(
    ("format", "x", "expected"),
    [
        (Format.E4M3, [449.0, -465.0, 1e38, INF, -INF, NAN], [448.0, -448.0, 448.0, NAN, NAN, NAN]),
        (Format.E5M2, [57345.0, -65536.0, 1e38, INF, -INF, NAN], [57344.0, -57344.0, 57344.0, INF, -INF, NAN]),
        (Format.INT8, [127.4, -128.0, 1e38, INF, -INF, NAN], [127.0, -127.0, 127.0, 0.0, 0.0, 0.0]),
    ],
)
def test_finite_values_saturate_and_others_stay_visible(format, x, expected):
    np.testing.assert_array_equal(decode(encode(torch.tensor(x), format)).numpy(), np.array(expected, np.float32))


@pytest.mark.parametrize("format", [Format.E4M3, Format.E5M2])
def test_zeros_keep_their_sign_and_the_smallest_subnormal_its_neighbourhood(format):
    tiny = info(format).smallest_subnormal
    x = torch.tensor([0.0, -0.0, tiny, tiny / 2, math.nextafter(tiny / 2, 1) * (1 + 1e-6), -tiny / 4])
    got = decode(encode(x, format))
    assert got.tolist() == [0, 0, tiny, 0, tiny, 0]  # tiny/2 is a tie: to the even code, 0
    assert got.signbit().tolist() == [False, True, False, False, False, True]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_encode_refuses_dtypes_that_fp32_does_not_hold(dtype):
    with pytest.raises(InvalidInput, match=r"cast to float32 first"):
        encode(torch.zeros(2, 2).to(dtype), Format.E4M3)


def test_high_precision_formats_have_dtypes_but_no_codes():
    assert torch_dtype(Format.TF32) is torch.float32
    for format in Format:
        assert format_of(torch_dtype(format)) is (Format.FP32 if format is Format.TF32 else format)
    with pytest.raises(InvalidInput, match="bf16 is not an 8-bit format"):
        encode(torch.zeros(2), Format.BF16)
    with pytest.raises(InvalidInput, match="fp32 is not an 8-bit format"):
        decode(torch.zeros(2))
    with pytest.raises(InvalidInput, match=r"torch\.int64 is none of LoKA's formats"):
        format_of(torch.int64)
