"""BlockNorm: RMS normalization over fixed blocks of features, without parameters.

    y = x / √(mean(x²) + ε)        the mean over the features of x's own block

A block is narrow enough to lie whole in one tile of a GEMM, so the norm runs in that GEMM's epilogue, and an outlier spoils
its own block only. No mean is subtracted, so nothing cancels. No value leaves a block of n features larger than √n, which
makes the scale of the 8-bit operand behind it a constant.
"""

import math

import torch
from torch import Tensor, nn

from loka.core.errors import InvalidInput, require_count
from loka.kernels.written import written

BLOCK = 256  # the same in training and serving


def block_sizes(n_features: int, block: int = BLOCK) -> tuple[int, ...]:
    """The widths of ⌈n_features/block⌉ blocks that differ by at most one, the wider first: 1000 → 250, 250, 250, 250."""
    require_count("n_features", n_features)
    require_count("block", block)
    count = -(-n_features // block)
    width, wider = divmod(n_features, count)
    return (width + 1,) * wider + (width,) * (count - wider)


class BlockNorm(nn.Module):
    """RMS over blocks of the last axis. Statistics are float32 for narrower types; the output has the input's dtype.

    |y| ≤ ``bound`` = √(widest block), up to rounding; a row of zeros stays zero, NaN stays NaN. As in torch's own norms the
    squares are float32: a block with values beyond 1e19 overflows them and comes out as zeros.
    """

    def __init__(self, n_features: int, block: int = BLOCK, eps: float = 1e-5) -> None:
        super().__init__()
        if not eps > 0:
            raise InvalidInput(f"eps must be above 0, or a row of zeros would be 0/0; got {eps}")
        self.n_features = n_features
        self.block = block
        self.eps = eps
        self.sizes = block_sizes(n_features, block)
        self.bound = math.sqrt(self.sizes[0])

    def forward(self, x: Tensor | None = None, *, input: Tensor | None = None) -> Tensor:
        """``x`` may also be passed as ``input``: nn.LayerNorm names its argument so, and nn.RMSNorm names it x."""
        x = input if x is None else x
        if x is None:
            raise InvalidInput(f"expected floats of shape (..., {self.n_features}), got nothing")
        if x.ndim == 0 or x.shape[-1] != self.n_features or not x.is_floating_point():
            raise InvalidInput(f"expected floats of shape (..., {self.n_features}), got {x.dtype} of {tuple(x.shape)}")
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        n_wider = self.sizes.count(self.sizes[0])  # blocks of one width are normalized together: at most two widths occur
        split = n_wider * self.sizes[0]
        y = self._normalize(wide[..., :split], self.sizes[0])
        if split < self.n_features:
            y = torch.cat([y, self._normalize(wide[..., split:], self.sizes[-1])], dim=-1)
        return y.to(x.dtype)

    def over(self, n_features: int) -> "BlockNorm | None":
        """The norm that does the same to rows that hold several such vectors side by side; None where there is none."""
        if n_features == self.n_features:
            return self
        if n_features % self.n_features or len(set(self.sizes)) > 1:
            return None
        return BlockNorm(n_features, self.sizes[0], self.eps)

    def _normalize(self, x: Tensor, width: int) -> Tensor:
        blocks = x.unflatten(-1, (x.shape[-1] // width, width))
        rstd = torch.rsqrt(blocks.square().mean(-1, keepdim=True) + self.eps)
        if x.device.type == "cpu" and not torch.compiler.is_exporting():
            # An INT8 cast behind it, compiled with it, would make it anew for every 16 values, which took Wukong small 1.04
            # times as long (Xeon with VNNI, 2026-11-19). On a GPU it is in a register, and an exported program is for other
            # compilers too.
            rstd = written(rstd)
        return (blocks * rstd).flatten(-2)

    def extra_repr(self) -> str:
        return f"{self.n_features}, block={self.block}, eps={self.eps}"
