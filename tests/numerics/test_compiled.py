"""The oracle gives the same numbers compiled as eager, and the same on a GPU as on the CPU."""

import shutil

import pytest
import torch

from loka.core.recipe import Format, Scaling
from loka.numerics.formats import decode, encode, info
from loka.numerics.scaling import dequantize, expand_scale, quantize

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),  # raised by inductor itself
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]

EIGHT_BIT = [format for format in Format if format.is_8bit]
SCALINGS = [scaling for scaling in Scaling if scaling is not Scaling.NONE]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def round_trip(x, format, scaling):
    q = quantize(x, format, scaling, static_scale=0.01 if scaling is Scaling.STATIC else None)
    return q, dequantize(q)


def hostile(device="cpu"):
    """Not a multiple of any block, with zeros, −0, subnormals, and groups poisoned by inf and NaN."""
    x = torch.randn(150, 200, generator=torch.Generator().manual_seed(0))
    x[0, :5] = torch.tensor([0.0, -0.0, 1e-40, -1e-45, 1e-20])
    x[2] = 0
    x[140, 3], x[141, 199] = float("inf"), float("nan")
    return x.to(device)


def assert_same(got, expected):
    torch.testing.assert_close(decode(got[0].codes), decode(expected[0].codes), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got[0].scale, expected[0].scale, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got[1], expected[1], rtol=0, atol=0, equal_nan=True)
    assert got[0][2:] == expected[0][2:]


def assert_same_but_for_division(got, expected):
    """CUDA divides by a scalar by its reciprocal, Triton to within 2 ulp: a value on the edge between two codes may move."""
    (got_q, got_values), (expected_q, values) = got, expected
    format, scaling = expected_q.format, expected_q.scaling
    torch.testing.assert_close(got_q.scale.cpu(), expected_q.scale, rtol=3e-7, atol=0, equal_nan=True)
    assert torch.equal(got_values.isnan().cpu(), values.isnan())
    finite = values.isfinite()
    step = info(format).smallest_subnormal * expand_scale(expected_q.scale, scaling, values.shape)
    if format is not Format.INT8:
        step = torch.maximum(step, values.abs() * 2.0 ** -info(format).mantissa_bits)
    assert ((got_values.cpu() - values).abs() <= step * (1 + 1e-5))[finite].all()
    moved = (decode(got_q.codes).cpu() != decode(expected_q.codes))[finite]
    assert moved.sum() <= 0.001 * moved.numel()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_one_compiled_function_serves_every_format_in_turn(scaling):
    """Without a guard on the format, the second one would run the first one's graph."""
    compiled = torch.compile(round_trip, fullgraph=True, backend="aot_eager")
    for format in EIGHT_BIT:
        assert_same(compiled(hostile(), format, scaling), round_trip(hostile(), format, scaling))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("format", EIGHT_BIT)
def test_inductor_on_the_cpu_gives_the_same_numbers(format, scaling):
    compiled = torch.compile(round_trip, fullgraph=True)
    assert_same(compiled(hostile(), format, scaling), round_trip(hostile(), format, scaling))


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("format", EIGHT_BIT)
def test_every_bf16_value_is_encoded_on_the_gpu_as_on_the_cpu(format, compile):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    on_gpu = torch.compile(encode, fullgraph=True) if compile else encode
    got, expected = decode(on_gpu(x.cuda(), format)).cpu(), decode(encode(x, format))
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit()[~got.isnan()], expected.signbit()[~expected.isnan()])


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("format", EIGHT_BIT)
def test_eager_on_the_gpu_waits_for_nothing(format, scaling):
    x = hostile("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = round_trip(x, format, scaling)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same_but_for_division(got, round_trip(hostile(), format, scaling))


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("format", EIGHT_BIT)
def test_inductor_on_the_gpu_differs_only_where_its_division_does(format, scaling):
    got = torch.compile(round_trip, fullgraph=True)(hostile("cuda"), format, scaling)
    assert_same_but_for_division(got, round_trip(hostile(), format, scaling))
