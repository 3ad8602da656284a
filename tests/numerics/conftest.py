"""The formats written down a second time, from their bit layouts, in numpy and float64: nothing here comes from loka."""

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from loka.core.recipe import Format


@dataclass(frozen=True)
class Grid:
    """All 256 codes of a format, and rounding by search among its sorted values."""

    format: Format
    values: NDArray[np.float64]  # by code (for int8: by the code's unsigned bits)
    max: float

    def encode(self, x: NDArray[np.float64]) -> NDArray[np.uint8]:
        """Bits of the nearest code, ties to the even code; finite values past the maximum take the maximum's code."""
        n_finite = int(np.searchsorted(self.values[:128], self.max)) + 1  # codes 0…n_finite−1 ascend from 0 to max
        positive = self.values[:n_finite]
        magnitude = np.minimum(np.abs(np.nan_to_num(x, posinf=0.0, neginf=0.0)), self.max)
        above = np.searchsorted(positive, magnitude, side="left").clip(max=n_finite - 1)
        below = (above - 1).clip(min=0)
        to_above, to_below = positive[above] - magnitude, magnitude - positive[below]
        even = np.where(above % 2 == 0, above, below)
        code = np.where(to_above < to_below, above, np.where(to_below < to_above, below, even)).astype(np.uint8)
        if self.format is Format.INT8:
            signed = np.where(np.signbit(x), -code.astype(np.int8), code).astype(np.int8)
            return np.where(np.isfinite(x), signed, np.int8(0)).view(np.uint8)
        code = np.where(np.isinf(x), 0x7F if self.format is Format.E4M3 else 0x7C, code)
        code = np.where(np.isnan(x), 0x7F, code)
        return (code | (np.signbit(x).astype(np.uint8) << 7)).astype(np.uint8)


def _float8_value(code: int, exponent_bits: int, mantissa_bits: int, bias: int, *, ieee: bool) -> float:
    sign = -1.0 if code >> 7 else 1.0
    exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = code & (2**mantissa_bits - 1)
    if exponent == 2**exponent_bits - 1:
        if ieee:
            return np.nan if mantissa else sign * np.inf
        if mantissa == 2**mantissa_bits - 1:  # e4m3 gives up inf and all but one NaN for one more binade
            return np.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


@pytest.fixture(scope="session")
def grids() -> dict[Format, Grid]:
    e4m3 = np.array([_float8_value(code, 4, 3, 7, ieee=False) for code in range(256)])
    e5m2 = np.array([_float8_value(code, 5, 2, 15, ieee=True) for code in range(256)])
    int8 = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float64)
    return {
        Format.E4M3: Grid(Format.E4M3, e4m3, 448.0),
        Format.E5M2: Grid(Format.E5M2, e5m2, 57344.0),
        Format.INT8: Grid(Format.INT8, int8, 127.0),
    }
