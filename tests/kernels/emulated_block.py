"""What the fused block's Triton ops compute, by torch on a CPU: fast enough to test in CI all that is built on them.

The same signatures and layouts, the oracle's rounding. Where an op may leave rubbish, here is NaN: a reader of it is found.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from loka.core.recipe import Format, Scaling
from loka.kernels.operand import padded_size
from loka.kernels.triton.block import BlockOutputs, NormGradient, Wanted
from loka.kernels.triton.casts import NOT_WRITTEN, Target
from loka.kernels.triton.tiles import NormBlocks
from loka.nn.block_norm import block_sizes
from loka.numerics.formats import encode
from loka.numerics.scaling import quantize

ACTIVATE = {"none": lambda u: u, "relu": F.relu, "hard_swish": F.hardswish}


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run fused blocks on these functions, wherever they are."""
    for op in (block_forward, norm_forward, norm_backward, gemm, cast_matrix, write_codes):
        monkeypatch.setattr(f"loka.nn.fused_steps.{op.__name__}", op)
    monkeypatch.setattr("loka.nn.fused_spec.missing_triton", lambda device: None)


def block_forward(
    x_MK: Tensor, x_scale_M: Tensor | None, x_factor: float, w_NK: Tensor, w_scale_N: Tensor, bias_N: Tensor | None,
    m: int, k: int, blocks: NormBlocks, eps: float, activation: str, wanted: Wanted,
) -> BlockOutputs:  # fmt: skip
    assert x_MK.shape[1] % 16 == 0
    x = x_MK[:m, :k].float() * x_factor * (1.0 if x_scale_M is None else x_scale_M.reshape(m, 1))
    z_MN = x @ (w_NK[:, :k].float() * w_scale_N.reshape(-1, 1)).t()
    return norm_forward(z_MN if bias_N is None else z_MN + bias_N, blocks, eps, activation, wanted)


def norm_forward(z_MN: Tensor, blocks: NormBlocks, eps: float, activation: str, wanted: Wanted) -> BlockOutputs:
    parts = z_MN.float().split(block_sizes(blocks.features, blocks.block), 1)
    rstd_BM = torch.stack([(part.square().mean(1) + eps).rsqrt() for part in parts])
    u_MN = torch.cat([part * rstd[:, None] for part, rstd in zip(parts, rstd_BM, strict=True)], 1)
    y_MN = ACTIVATE[activation](u_MN)
    codes, normed = (encode(tensor / blocks.code_scale, Format.E4M3) for tensor in (y_MN, u_MN))
    nothing = z_MN.new_empty(0, dtype=torch.float8_e4m3fn)
    return BlockOutputs(
        z_MN.new_empty(0) if wanted.high is None else y_MN.to(wanted.high),
        _padded(codes) if wanted.codes else nothing,
        _padded(codes.t()) if wanted.transposed else nothing,
        _padded(normed) if wanted.saved else nothing,
        rstd_BM if wanted.saved else z_MN.new_empty(0),
    )


def norm_backward(
    dy_MN: Tensor, normed_MN: Tensor, rstd_BM: Tensor, blocks: NormBlocks, activation: str, *, bias: bool
) -> NormGradient:
    """Without the amaxes, which nothing here reads."""
    dz_MN = _gradient(dy_MN, normed_MN, rstd_BM, blocks, activation)
    return NormGradient(dz_MN.to(dy_MN.dtype), dz_MN.new_empty(0, dtype=torch.int32), dz_MN.sum(0))


def gemm(
    a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor | None, m: int, n: int, k: int,
    *, out_dtype: torch.dtype, promoted: bool, b_factor: float = 1.0,
) -> Tensor:  # fmt: skip
    assert a_MK.stride(0) % 16 == b_NK.stride(0) % 16 == 0
    b = b_NK[:n, :k].float() * (b_factor if b_scale is None else b_factor * b_scale.reshape(n, 1))
    return (a_MK[:m, :k].float() * a_scale.reshape(m, 1) @ b.t()).to(out_dtype)


def cast_matrix(x: Tensor, plain: Target, trans: Target, amax: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def written(matrix: Tensor, target: Target) -> tuple[Tensor, Tensor]:
        if target.scaling == NOT_WRITTEN:
            return x.new_empty(0, 0), x.new_empty(0, 0)
        assert (target.scaling, target.outer) == (Scaling.ROWWISE, len(matrix))
        codes, scale, *_ = quantize(matrix, Format.E4M3, Scaling.ROWWISE)
        return F.pad(codes.view(torch.uint8), (0, target.contraction - codes.shape[1])).view(codes.dtype), scale

    return *written(x, plain), *written(x.t(), trans)


def write_codes(x: Tensor, plain: Target, trans: Target, codes: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    for held, made in zip(codes, cast_matrix(x, plain, trans), strict=True):
        held.copy_(made)


def _gradient(dy_MN: Tensor, normed_MN: Tensor, rstd_BM: Tensor, blocks: NormBlocks, activation: str) -> Tensor:
    n, sizes = blocks.features, block_sizes(blocks.features, blocks.block)
    u_MN = normed_MN[:, :n].float() * blocks.code_scale
    slope = {"none": torch.ones_like(u_MN), "relu": (u_MN > 0).float()}.get(
        activation, torch.where(u_MN <= -3, 0, torch.where(u_MN >= 3, 1, u_MN / 3 + 0.5))
    )
    parts = zip((dy_MN.float() * slope).split(sizes, 1), u_MN.split(sizes, 1), rstd_BM, strict=True)
    return torch.cat([rstd[:, None] * (g - u * (g * u).mean(1, keepdim=True)) for g, u, rstd in parts], 1)


def _padded(codes: Tensor) -> Tensor:
    missing = padded_size(codes.shape[1], 16) - codes.shape[1]
    return F.pad(codes.contiguous().view(torch.uint8), (0, missing), value=0x7F).view(torch.float8_e4m3fn)
