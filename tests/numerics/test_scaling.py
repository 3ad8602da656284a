import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.core.errors import InvalidInput
from loka.core.recipe import Format, Scaling
from loka.numerics.formats import decode, info, torch_dtype
from loka.numerics.scaling import amax, dequantize, expand_scale, power_from_amax, quantize, scale_from_amax, transpose

EIGHT_BIT = [format for format in Format if format.is_8bit]
DYNAMIC = [scaling for scaling in Scaling if scaling not in (Scaling.NONE, Scaling.STATIC)]
SMALLEST_NORMAL = 2.0**-126

formats = st.sampled_from(EIGHT_BIT)
dynamic_scalings = st.sampled_from(DYNAMIC)
input_dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
sizes = st.one_of(st.integers(0, 5), st.sampled_from([127, 128, 129, 200, 257]))


def groups(scaling, shape):
    """For every value the coordinates of its scale, written out rather than computed from ``Scaling.block``."""
    row, column = np.indices(shape)
    zero = np.zeros(shape, dtype=int)
    return {
        Scaling.TENSORWISE: (zero, zero),
        Scaling.ROWWISE: (row, zero),
        Scaling.COLWISE: (zero, column),
        Scaling.BLOCK_1X128: (row, column // 128),
        Scaling.BLOCK_128X128: (row // 128, column // 128),
    }[scaling]


def scale_shape(scaling, shape):
    rows, columns = shape
    return {
        Scaling.TENSORWISE: (1, 1),
        Scaling.STATIC: (1, 1),
        Scaling.ROWWISE: (rows, 1),
        Scaling.COLWISE: (1, columns),
        Scaling.BLOCK_1X128: (rows, math.ceil(columns / 128)),
        Scaling.BLOCK_128X128: (math.ceil(rows / 128), math.ceil(columns / 128)),
    }[scaling]


def spread_randn(rows, columns, seed, dtype=torch.float32):
    """Normal values whose rows differ in scale by many binades, some exactly zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.exp2(torch.randint(-12, 6, (rows, 1), generator=generator))
    return torch.where(torch.rand(rows, columns, generator=generator) < 0.1, 0.0, x).to(dtype)


def quantize_any(x, format, scaling):
    return quantize(x, format, scaling, static_scale=0.01 if scaling is Scaling.STATIC else None)


@settings(max_examples=80, deadline=None)
@given(sizes, sizes, formats, dynamic_scalings, st.integers(0, 2**31), input_dtypes)
def test_codes_and_scales_equal_a_loop_over_groups(grids, rows, columns, format, scaling, seed, dtype):
    x = spread_randn(rows, columns, seed, dtype)
    at = groups(scaling, x.shape)
    x_f32 = x.float().numpy()
    expected_amax = np.zeros(scale_shape(scaling, x.shape), np.float32)
    np.maximum.at(expected_amax, at, np.abs(x_f32))
    expected_scale = np.where(expected_amax == 0, np.float32(1), expected_amax / np.float32(grids[format].max))

    q = quantize(x, format, scaling)

    assert (q.format, q.scaling, q.codes.dtype, q.codes.shape) == (format, scaling, torch_dtype(format), x.shape)
    np.testing.assert_array_equal(q.scale.numpy(), expected_scale, strict=True)
    np.testing.assert_array_equal(expand_scale(q.scale, scaling, x.shape).numpy(), expected_scale[at])
    expected_codes = grids[format].encode((x_f32 / expected_scale[at]).astype(np.float64))
    np.testing.assert_array_equal(q.codes.view(torch.uint8).numpy(), expected_codes)
    expected_values = grids[format].values[expected_codes] * expected_scale[at].astype(np.float64)
    np.testing.assert_array_equal(dequantize(q, torch.float64).numpy(), expected_values)
    np.testing.assert_array_equal(dequantize(q).numpy(), expected_values.astype(np.float32))


@settings(max_examples=60, deadline=None)
@given(sizes, sizes, formats, dynamic_scalings, st.integers(0, 2**31), st.floats(-100, 100))
def test_round_trip_error_is_within_half_a_step(rows, columns, format, scaling, seed, binades):
    x = spread_randn(rows, columns, seed) * 2.0**binades
    q = quantize(x, format, scaling)
    step = info(format).smallest_subnormal * expand_scale(q.scale, scaling, x.shape).double()
    relative = 0.0 if format is Format.INT8 else 2.0 ** -(info(format).mantissa_bits + 1)
    rounded_quotient = 2.0**-23  # x/scale is itself rounded to FP32, which can carry it across the middle of a step
    bound = 0.5 * step + (relative + rounded_quotient) * x.double().abs()
    assert ((dequantize(q, torch.float64) - x.double()).abs() <= bound).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), formats, dynamic_scalings, st.data())
def test_a_value_that_is_not_finite_poisons_exactly_its_own_scale(rows, columns, format, scaling, data):
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    x = torch.ones(rows, columns)
    x[row, column] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    at = groups(scaling, x.shape)
    shares_the_scale = (at[0] == at[0][row, column]) & (at[1] == at[1][row, column])
    values = dequantize(quantize(x, format, scaling)).numpy()
    np.testing.assert_array_equal(np.isnan(values), shares_the_scale)
    np.testing.assert_allclose(values[~shares_the_scale], 1, rtol=1e-6)


@pytest.mark.parametrize("format", EIGHT_BIT)
@pytest.mark.parametrize("scaling", DYNAMIC)
def test_zeros_have_scale_one_and_come_back_as_zeros(format, scaling):
    q = quantize(torch.zeros(130, 140), format, scaling)
    assert (q.scale == 1).all()
    assert (dequantize(q) == 0).all()


@pytest.mark.parametrize("scaling", [*DYNAMIC, Scaling.STATIC])
@pytest.mark.parametrize("format", [Format.E4M3, Format.E5M2])
def test_negative_zero_keeps_its_sign(format, scaling):
    q = quantize_any(torch.tensor([[-0.0, 1.0], [0.0, -0.0]]), format, scaling)
    assert dequantize(q).signbit().tolist() == [[True, False], [False, True]]


@pytest.mark.parametrize("format", EIGHT_BIT)
@pytest.mark.parametrize("scaling", [*DYNAMIC, Scaling.STATIC])
@pytest.mark.parametrize("shape", [(0, 0), (0, 130), (130, 0)])
def test_empty_tensors_have_empty_codes_and_scales_of_one(format, scaling, shape):
    q = quantize_any(torch.zeros(shape), format, scaling)
    assert (q.codes.shape, q.scale.shape) == (shape, scale_shape(scaling, shape))
    assert (q.scale == (torch.tensor(0.01) if scaling is Scaling.STATIC else 1)).all()
    assert dequantize(q).shape == shape


@pytest.mark.parametrize("format", EIGHT_BIT)
def test_scales_are_the_rounded_quotient_on_every_device(format, device):
    """One unit in the last place of a scale moves every value that lies between two codes: 1 % of a bf16 tensor's."""
    amaxes = torch.arange(128, 256).reshape(1, -1) / 32
    expected = (amaxes.double() / info(format).max).float()
    assert torch.equal(scale_from_amax(amaxes.to(device), format).cpu(), expected)


@pytest.mark.parametrize("format", EIGHT_BIT)
def test_scales_are_never_zero_or_subnormal(format):
    amaxes = torch.tensor([[2.0**-149, 2.0**-140, SMALLEST_NORMAL, 1e-37, 1.0]])
    scale = scale_from_amax(amaxes, format)
    assert (scale >= SMALLEST_NORMAL).all()
    assert scale[0, 0] == SMALLEST_NORMAL
    assert scale[0, 4] == torch.tensor(1.0) / info(format).max


@pytest.mark.parametrize("format", EIGHT_BIT)
def test_subnormal_inputs_are_rounded_on_the_smallest_scale_not_blown_up(format):
    x = torch.tensor([[2.0**-130, -(2.0**-149), 0.0]])
    values = dequantize(quantize(x, format, Scaling.TENSORWISE), torch.float64)
    half_step = 0.5 * info(format).smallest_subnormal * SMALLEST_NORMAL
    assert ((values - x.double()).abs() <= half_step).all()


@pytest.mark.parametrize("format", EIGHT_BIT)
def test_the_scale_of_what_is_not_finite_is_nan(format):
    scale = scale_from_amax(torch.tensor([[math.inf, math.nan, 0.0, 2.0]]), format)
    assert scale.isnan().tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("scaling", DYNAMIC)
@pytest.mark.parametrize("format", EIGHT_BIT)
def test_layout_in_memory_does_not_matter(format, scaling):
    x = spread_randn(300, 260, seed=0)
    for view in (x.t(), x[::2, 1::3], x[5:6].expand(140, 260)):
        assert not view.is_contiguous()
        got, expected = quantize(view, format, scaling), quantize(view.contiguous(), format, scaling)
        assert torch.equal(got.codes.view(torch.uint8), expected.codes.view(torch.uint8))
        assert torch.equal(got.scale, expected.scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_amax_is_the_exact_largest_magnitude_in_fp32(dtype):
    x = torch.tensor([[1.0, -3.0], [0.5, 2.0]], dtype=dtype)
    assert amax(x, Scaling.ROWWISE).tolist() == [[3.0], [2.0]]
    assert amax(x, Scaling.COLWISE).tolist() == [[1.0, 3.0]]
    assert amax(x, Scaling.TENSORWISE).tolist() == [[3.0]]
    assert amax(x, Scaling.TENSORWISE).dtype is torch.float32


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        (Format.E4M3, [2.0, -224.0, 224.0, 224.0, math.nan, math.nan]),
        (Format.E5M2, [2.0, -448.0, 28672.0, 28672.0, math.inf, math.nan]),
        (Format.INT8, [math.nan] * 6),
    ],
)
def test_static_scale_saturates_what_is_past_it_and_keeps_the_rest_visible(format, expected):
    x = torch.tensor([[2.0, -450.0, 1e9, 3e38, math.inf, math.nan]])  # 3e38 / 0.5 overflows FP32
    q = quantize(x, format, Scaling.STATIC, static_scale=0.5)
    np.testing.assert_array_equal(dequantize(q).numpy(), np.array([expected], np.float32))


def test_static_int8_saturates_finite_values():
    q = quantize(torch.tensor([[2.0, -450.0, 3e38, 0.74]]), Format.INT8, Scaling.STATIC, static_scale=0.5)
    assert dequantize(q).tolist() == [[2.0, -63.5, 63.5, 0.5]]


@pytest.mark.parametrize("format", EIGHT_BIT)
def test_static_scale_may_be_a_tensor_and_an_unusable_one_gives_nan(format):
    x = torch.tensor([[2.0, -1.0]])
    from_float = quantize(x, format, Scaling.STATIC, static_scale=0.25)
    from_tensor = quantize(x, format, Scaling.STATIC, static_scale=torch.tensor(0.25, dtype=torch.float64))
    assert torch.equal(decode(from_float.codes), decode(from_tensor.codes))
    assert torch.equal(from_float.scale, from_tensor.scale)
    for unusable in (0.0, -1.0, math.inf, math.nan):
        assert dequantize(quantize(x, format, Scaling.STATIC, static_scale=torch.tensor(unusable))).isnan().all()


@pytest.mark.parametrize("format", EIGHT_BIT)
@pytest.mark.parametrize("scaling", [scaling for scaling in [*DYNAMIC, Scaling.STATIC] if scaling is not Scaling.BLOCK_1X128])
def test_transpose_is_the_cast_of_the_transposed_tensor(format, scaling):
    x = spread_randn(200, 140, seed=1)
    got = transpose(quantize_any(x, format, scaling))
    swapped = {Scaling.ROWWISE: Scaling.COLWISE, Scaling.COLWISE: Scaling.ROWWISE}.get(scaling, scaling)
    expected = quantize_any(x.t(), format, swapped)
    assert got.scaling is swapped
    assert got.codes.is_contiguous()
    assert torch.equal(got.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(got.scale, expected.scale)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dequantize_gives_the_dtype_asked_for(dtype):
    q = quantize(torch.tensor([[1.0, 0.3]]), Format.E4M3, Scaling.TENSORWISE)
    exact = torch.tensor([[448.0, 128.0]], dtype=torch.float64) * float(q.scale)  # 0.3·448 = 134.4, in steps of 16
    assert torch.equal(dequantize(q, dtype), exact.to(dtype))


def test_bad_input_is_refused_with_the_way_out():
    x = torch.ones(4, 4)
    with pytest.raises(InvalidInput, match=r"got shape \(2, 4, 4\); flatten"):
        quantize(torch.ones(2, 4, 4), Format.E4M3, Scaling.ROWWISE)
    with pytest.raises(InvalidInput, match=r"got shape \(4,\)"):
        amax(torch.ones(4), Scaling.TENSORWISE)
    with pytest.raises(InvalidInput, match="cast to float32 first"):
        quantize(x.double(), Format.E4M3, Scaling.ROWWISE)
    with pytest.raises(InvalidInput, match="bf16 is not an 8-bit format"):
        quantize(x, Format.BF16, Scaling.ROWWISE)
    with pytest.raises(InvalidInput, match="scaling none has no scales"):
        quantize(x, Format.E4M3, Scaling.NONE)
    with pytest.raises(InvalidInput, match="without one"):
        quantize(x, Format.E4M3, Scaling.STATIC)
    with pytest.raises(InvalidInput, match="with rowwise scaling"):
        quantize(x, Format.E4M3, Scaling.ROWWISE, static_scale=1.0)
    with pytest.raises(InvalidInput, match=r"one value for the whole tensor, got shape \(4, 1\)"):
        quantize(x, Format.E4M3, Scaling.STATIC, static_scale=torch.ones(4, 1))
    with pytest.raises(InvalidInput, match=r"rowwise scales of a \(4, 4\) tensor have shape \(4, 1\), got \(1, 4\)"):
        expand_scale(torch.ones(1, 4), Scaling.ROWWISE, x.shape)
    with pytest.raises(InvalidInput, match="quantize the transposed tensor"):
        transpose(quantize(x, Format.E4M3, Scaling.BLOCK_1X128))


@pytest.mark.parametrize("unusable", [0.0, -1.0, math.inf, math.nan, 1e-40, 1e39])
def test_a_static_scale_that_fp32_cannot_hold_is_refused(unusable):
    with pytest.raises(InvalidInput, match="positive normal FP32 number"):
        quantize(torch.ones(2, 2), Format.E4M3, Scaling.STATIC, static_scale=unusable)


@given(st.floats(0, 2.0**127, width=32), st.sampled_from(EIGHT_BIT))
def test_powers_are_the_smallest_that_cover_an_amax(largest, format):
    powers = [2.0**n for n in range(-126, 128)]
    smallest = next(power for power in powers if largest <= info(format).max * power)
    assert float(power_from_amax(torch.tensor(largest), format)) == smallest


@pytest.mark.parametrize("format", EIGHT_BIT)
def test_a_power_takes_the_largest_code_to_itself_and_is_never_zero_or_subnormal(format):
    largest, smallest = info(format).max, torch.finfo(torch.float32).smallest_normal
    found = power_from_amax(torch.tensor([largest, 8 * largest, largest / 8, 1e-40, 1e-44, 0.0]), format)
    assert found.tolist() == [1.0, 8.0, 0.125, smallest, smallest, smallest]


@pytest.mark.parametrize("format", EIGHT_BIT)
def test_powers_of_values_that_are_not_finite_are_nan(format):
    assert power_from_amax(torch.tensor([math.inf, math.nan]), format).isnan().all()
    x = torch.tensor([[1.0, 3.0], [2.0, math.nan]])
    assert quantize(x, format, Scaling.ROWWISE, powers=True).scale.isnan().tolist() == [[False], [True]]
