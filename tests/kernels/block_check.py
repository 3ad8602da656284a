"""What tests of the fused block's kernels share: shapes to range over, its mathematics, and when a code is right."""

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from loka.numerics.formats import decode

EPS = 1e-5
FEATURES = st.sampled_from([1, 17, 32, 64, 100, 250, 256, 257, 300, 520])
ACTIVATION = st.sampled_from(["none", "relu", "hard_swish"])
FP64 = {"none": lambda u: u, "relu": F.relu, "hard_swish": F.hardswish}


def assert_codes(codes_MN: Tensor, scale: Tensor | float, expected: Tensor, slack: Tensor | float) -> None:
    """Rounded to e4m3: half a step of the value's binade or of the subnormals, and ``slack`` for the sum before it."""
    scale = torch.as_tensor(scale, dtype=torch.float64, device=expected.device)
    error = (decode(codes_MN, torch.float64) * scale - expected).abs()
    allowed = (expected.abs() * 2.0**-4).clamp(min=2.0**-10 * scale) * (1 + 1e-6) + slack
    assert (error <= allowed).all(), f"{int((error > allowed).sum())} of {error.numel()} codes are off"


def rounded_before(value: Tensor, scale: Tensor) -> Tensor:
    """The error of a code that had a smaller scale, at most half, before it got this one: it shows below e4m3's smallest normal
    number alone, where it is rounded again. Before, it may have been below it, too."""
    return torch.where(value.abs() < 2.0**-6 * scale, (2.0**-4 * value.abs()).clamp(min=2.0**-11 * scale), 0.0)
