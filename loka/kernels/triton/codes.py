"""What all of our kernels do to 8-bit values, as device functions: magnitudes, scales, and rounding to e4m3 or int8.

The rules are those of ``loka.numerics.scaling``: an amax of 0 gives a scale of 1, one that is not finite a scale of NaN. But
the power of two of an amax of 0 is FP32's smallest normal number, since several scales may be replaced by the largest of them.
"""

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

E4M3_MAX = tl.constexpr(448.0)
INT8_MAX = tl.constexpr(127.0)
TO_WHOLE = tl.constexpr(1.5 * 2.0**23)  # FP32 numbers of this size are whole: adding it rounds to nearest, ties to even
SMALLEST_SCALE = tl.constexpr(2.0**-126)  # FP32's smallest normal number
INFINITY_BITS = tl.constexpr(0x7F800000)
ONE_BITS, SMALLEST_SCALE_BITS, NAN_BITS = tl.constexpr(127 << 23), tl.constexpr(1 << 23), tl.constexpr(0x7FC00000)
TO_NEXT_POWER = tl.constexpr(0x1FFFFF)  # added to the bits of a number past 1.75·2ⁿ, makes its exponent n+1
SMALLEST_EXPONENT = tl.constexpr(121)  # of e4m3's normal numbers, as FP32 writes it
INTERPRETED = tl.constexpr(knobs.runtime.interpret)
# Triton's own down-cast makes pairs of codes. Where such a pair is both stored whole and taken apart, as for a tile and its
# transpose, ptxas 12.8 loses every fourth code: it reads a register that nothing has written. Fours have no such pairs.
FOUR_TO_E4M3 = tl.constexpr("""{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}""")


@triton.jit
def wait_for_kernels_before():
    """Our kernels are launched while the kernel before them still runs (``launch_pdl``), and get ready; from here on its
    results are there. Every kernel calls this before its first read or write (``cast_kernels`` says where a cast may read
    earlier): a kernel that has waited for the one before relies on that one having waited for all before it."""
    if not INTERPRETED:
        gdc_wait()


@triton.jit
def let_next_kernel_start():
    """Let the next kernel be launched, once every program of this one has come here. If the next one reads early what this one
    waits for, this one must call it after its own wait."""
    if not INTERPRETED:
        gdc_launch_dependents()


@triton.jit
def magnitude(x):
    """|x| as the bits of an FP32 number. They sort like the magnitudes, with inf and NaN above all: a maximum keeps both."""
    return tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)


@triton.jit
def largest_of(bits_ptr, count, AT_ONCE: tl.constexpr):
    """The largest of ``count`` magnitudes, 0 of none."""
    largest = tl.zeros((AT_ONCE,), tl.int32)
    for first in range(0, count, AT_ONCE):
        index = first + tl.arange(0, AT_ONCE)
        largest = tl.maximum(largest, tl.load(bits_ptr + index, mask=index < count, other=0))
    return tl.max(largest, axis=0)


@triton.jit
def scale_of(amax_bits, LARGEST: tl.constexpr = E4M3_MAX):
    """The scale that maps an amax, given as ``magnitude`` bits, onto the largest code."""
    scale = tl.maximum(tl.div_rn(amax_bits.to(tl.float32, bitcast=True), LARGEST), SMALLEST_SCALE)
    scale = tl.where(amax_bits == 0, 1.0, scale)
    return tl.where(amax_bits >= INFINITY_BITS, float("nan"), scale)


@triton.jit
def power_scale_of(amax_bits):
    """The bits of the smallest power of two that brings an amax, given as ``magnitude`` bits, to 448 = 1.75·2⁸ or less."""
    exponent = ((amax_bits + TO_NEXT_POWER) >> 23) - 8
    return tl.where(amax_bits >= INFINITY_BITS, NAN_BITS, tl.maximum(exponent << 23, SMALLEST_SCALE_BITS))


@triton.jit
def inverse_of_power(bits):
    """1/s of a power of two s, given as bits; 0 of NaN."""
    return tl.maximum(-bits + 2 * ONE_BITS, 0).to(tl.float32, bitcast=True)


@triton.jit
def power_over(bits, larger_bits):
    """The quotient of two powers of two, the second at least as large; 0 where it is too small for a number."""
    return tl.maximum(bits - larger_bits + ONE_BITS, 0).to(tl.float32, bitcast=True)


@triton.jit
def divide(x, scale, inverse):
    """x / scale rounded as the oracle's division is, at the price of a product: ``inverse`` is 1 / scale, rounded to nearest.

    Codes then agree even at ties, which bf16 values divided by a bf16 amax meet often.
    """
    if INTERPRETED:  # it has no fused multiply-add
        return x / scale
    far = 2 * E4M3_MAX  # as good as any value past the range, and does not overflow below
    quotient = tl.clamp(x * inverse, -far, far, propagate_nan=tl.PropagateNan.ALL)
    remainder = tl.fma(-quotient, scale, x)
    return tl.fma(remainder, inverse, quotient)


@triton.jit
def saturated_fma(x, slope, offset):
    """x·slope + offset, cut to [0, 1], in one instruction; 0 of NaN."""
    if INTERPRETED:
        return tl.clamp(tl.where(x == x, x * slope + offset, 0.0), 0.0, 1.0)
    return tl.inline_asm_elementwise("fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, slope, offset], tl.float32, True, 1)


@triton.jit
def to_e4m3(x):
    """Round FP32 to the nearest e4m3 value, ties to even; past the maximum saturate, NaN stays NaN."""
    if INTERPRETED:  # its own down-cast loses carries and NaNs, so the code is put together from its parts
        x = tl.clamp(x, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
        bits = x.to(tl.int32, bitcast=True)
        exponent = tl.maximum((bits >> 23) & 0xFF, SMALLEST_EXPONENT)
        steps_per_unit = ((254 + 3 - exponent) << 23).to(tl.float32, bitcast=True)  # 2^(3 − exponent)
        steps = (tl.abs(x) * steps_per_unit + TO_WHOLE) - TO_WHOLE
        code = (exponent - SMALLEST_EXPONENT) * 8 + steps.to(tl.int32)
        code = (tl.where(x == x, code, 0x7F) | tl.where(bits < 0, 0x80, 0)).to(tl.uint8)
    else:
        code = tl.inline_asm_elementwise(FOUR_TO_E4M3, "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4)
    return code.to(tl.float8e4nv, bitcast=True)


@triton.jit
def to_int8(x):
    """Round FP32 to the nearest int8, ties to even; past ±127 saturate. NaN, whose scale is NaN too, becomes 0."""
    x = tl.clamp(tl.where(x == x, x, 0.0), -INT8_MAX, INT8_MAX)
    return ((x + TO_WHOLE) - TO_WHOLE).to(tl.int8)


@triton.jit
def to_e4m3_words(a, b, c, d):
    """``to_e4m3`` of four tiles, element by element in one word, the first lowest: a transpose then moves words, not bytes."""
    if INTERPRETED:
        return _code(a) | (_code(b) << 8) | (_code(c) << 16) | (_code(d) << 24)
    return tl.inline_asm_elementwise(FOUR_TO_E4M3, "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _code(x):
    return to_e4m3(x).to(tl.uint8, bitcast=True).to(tl.int32)
