"""Recipes: the formats and scalings of a GEMM's two operands, and how its products are accumulated."""

from dataclasses import dataclass
from enum import StrEnum


class Format(StrEnum):
    """Number formats an operand or an output can have."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    INT8 = "int8"
    BF16 = "bf16"
    FP16 = "fp16"
    TF32 = "tf32"  # stored as fp32, multiplied with 10 bits of mantissa
    FP32 = "fp32"

    @property
    def is_8bit(self) -> bool:
        return self in (Format.E4M3, Format.E5M2, Format.INT8)


class Scaling(StrEnum):
    """Which values of an operand (outer axis × contracted axis) share one scale."""

    NONE = "none"  # high precision: no scale
    TENSORWISE = "tensorwise"  # one scale for all
    ROWWISE = "rowwise"  # one for each row of the outer axis
    COLWISE = "colwise"  # one for each column
    BLOCK_1X128 = "1x128"  # one for each 128 consecutive values of a row
    BLOCK_128X128 = "128x128"  # one for each square tile; the same tile after a transpose
    STATIC = "static"  # one for all, known beforehand: no pass over the values to find it

    @property
    def block(self) -> tuple[int | None, int | None]:
        """Rows and columns that share a scale; None is the whole axis."""
        return _BLOCKS[self.value]  # by its text: torch.compile puts no guard on an enum used as a key


_BLOCKS: dict[str, tuple[int | None, int | None]] = {
    Scaling.NONE: (None, None),
    Scaling.TENSORWISE: (None, None),
    Scaling.ROWWISE: (1, None),
    Scaling.COLWISE: (None, 1),
    Scaling.BLOCK_1X128: (1, 128),
    Scaling.BLOCK_128X128: (128, 128),
    Scaling.STATIC: (None, None),
}


class Accumulation(StrEnum):
    """FULL sums products in FP32. FAST is the tensor core's own narrower sum (about 14 bits on Hopper)."""

    FULL = "full"
    FAST = "fast"


class Transform(StrEnum):
    """A change of a site's operands that exact arithmetic would not notice, and 8 bits do."""

    NONE = "none"
    CENTER = "center"  # y = (x−μ)·wᵀ + μ·wᵀ, the second term in high precision
    RESCALE = "rescale"  # y = (x/s)·(w·s)ᵀ, s a power of two for each feature


@dataclass(frozen=True)
class Recipe:
    """What a kernel does to numbers, whoever implements it: two recipes that are equal have the same expected error."""

    a_format: Format
    a_scaling: Scaling
    b_format: Format
    b_scaling: Scaling
    accumulation: Accumulation = Accumulation.FULL

    def __str__(self) -> str:
        formats = self.a_format if self.a_format == self.b_format else f"{self.a_format}·{self.b_format}"
        scalings = self.a_scaling if self.a_scaling == self.b_scaling else f"{self.a_scaling}·{self.b_scaling}"
        parts = [str(formats)] + ([str(scalings)] if scalings != Scaling.NONE else [])
        return " ".join(parts + ([self.accumulation] if self.accumulation is Accumulation.FAST else []))
