"""What the fused block's Triton ops compute, by torch on a CPU: fast enough to test in CI all that is built on them.

The same signatures and layouts, the oracle's rounding. Where an op may leave rubbish, here is NaN: a reader of it is found.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from loka.core.recipe import Format, Scaling
from loka.kernels.operand import padded_size
from loka.kernels.stepping import AdamStep
from loka.kernels.triton.block import CODES_DTYPE, BlockOutputs, Wanted
from loka.kernels.triton.gradient import GradientCodes
from loka.kernels.triton.share import POWERS_FROM
from loka.kernels.triton.tiles import NormBlocks
from loka.nn.block_norm import block_sizes
from loka.numerics.formats import encode
from loka.numerics.scaling import quantize

ACTIVATE = {"none": lambda u: u, "relu": F.relu, "hard_swish": F.hardswish}


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run fused blocks on these functions, wherever they are."""
    for op in (block_forward, norm_forward, block_gradient, norm_gradient, gemm, cast_by_rows, rewriting_by_rows):
        monkeypatch.setattr(f"loka.nn.fused_steps.{op.__name__}", op)
    monkeypatch.setattr("loka.nn.fused_spec.missing_triton", lambda device: None)


def block_forward(
    x_MK: Tensor, x_scale_M: Tensor | None, x_factor: float, w_NK: Tensor, w_scale_N: Tensor, bias_N: Tensor | None,
    m: int, k: int, blocks: NormBlocks | None, eps: float, activation: str, wanted: Wanted,
) -> BlockOutputs:  # fmt: skip
    assert x_MK.shape[1] % 16 == 0
    x = x_MK[:m, :k].float() * x_factor * (1.0 if x_scale_M is None else x_scale_M.reshape(m, 1))
    z_MN = x @ (w_NK[:, :k].float() * w_scale_N.reshape(-1, 1)).t()
    z_MN = z_MN if bias_N is None else z_MN + bias_N
    if blocks is None:
        assert wanted.forms == 1 + (wanted.saved is not None)  # no codes
        return _written(z_MN, z_MN.new_empty(0), 1.0, activation, wanted)
    return norm_forward(z_MN, blocks, eps, activation, wanted)


def norm_forward(z_MN: Tensor, blocks: NormBlocks, eps: float, activation: str, wanted: Wanted) -> BlockOutputs:
    parts = z_MN.float().split(block_sizes(blocks.features, blocks.block), 1)
    rstd_BM = torch.stack([(part.square().mean(1) + eps).rsqrt() for part in parts])
    u_MN = torch.cat([part * rstd[:, None] for part, rstd in zip(parts, rstd_BM, strict=True)], 1)
    return _written(u_MN, rstd_BM, blocks.code_scale, activation, wanted)


def _written(u_MN: Tensor, rstd_BM: Tensor, code_scale: float, activation: str, wanted: Wanted) -> BlockOutputs:
    """The forms wanted."""
    y_MN = ACTIVATE[activation](u_MN)
    codes, u_codes = (encode(tensor / code_scale, Format.E4M3) for tensor in (y_MN, u_MN))
    nothing = u_MN.new_empty(0, dtype=CODES_DTYPE)
    u = u_codes if wanted.saved is CODES_DTYPE else u_MN.to(wanted.saved or u_MN.dtype)
    return BlockOutputs(
        u_MN.new_empty(0) if wanted.high is None else y_MN.to(wanted.high),
        _padded(codes) if wanted.codes else nothing,
        _padded(codes.t()) if wanted.transposed else nothing,
        _padded(u) if wanted.saved else nothing,
        rstd_BM if wanted.saved else u_MN.new_empty(0),
    )


def block_gradient(
    dy_MN: Tensor, u_MN: Tensor, rstd_BM: Tensor, blocks: NormBlocks | None, activation: str,
    *, rows: bool, transposed: bool, bias: bool, x_factor: float,
) -> GradientCodes:  # fmt: skip
    dz_MN = _gradient(dy_MN, u_MN, rstd_BM, blocks, activation)
    scale_M, scale = _power_scale(dz_MN.abs().amax(1)), _power_scale(dz_MN.abs().max())
    nothing = dz_MN.new_empty(0, dtype=CODES_DTYPE)
    return GradientCodes(
        _padded(encode(dz_MN / scale_M[:, None], Format.E4M3)) if rows else nothing,
        scale_M if rows else dz_MN.new_empty(0),
        _padded(encode(dz_MN.t() / scale, Format.E4M3)) if transposed else nothing,
        torch.stack([scale * x_factor, torch.ones_like(scale)])[:, None].expand(2, 4) if transposed else dz_MN.new_empty(0),
        dz_MN.sum(0),
    )


def norm_gradient(dy_MN: Tensor, u_MN: Tensor, rstd_BM: Tensor, blocks: NormBlocks) -> Tensor:
    return _gradient(dy_MN, u_MN, rstd_BM, blocks, "none").to(dy_MN.dtype)


def _power_scale(amax: Tensor) -> Tensor:
    """The smallest power of two that brings it to 448 or less."""
    mantissa, exponent = torch.frexp(amax / 448)  # mantissa in [½, 1)
    return torch.where(amax > 0, torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).int()), 2.0**-126)


def gemm(
    a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor | None, m: int, n: int, k: int,
    *, out_dtype: torch.dtype, promoted: bool, b_factor: float = 1.0,
) -> Tensor:  # fmt: skip
    assert a_MK.stride(0) % 16 == b_NK.stride(0) % 16 == 0
    b = b_NK[:n, :k].float() * (b_factor if b_scale is None else b_factor * b_scale.reshape(-1, 1))
    return (a_MK[:m, :k].float() * a_scale.reshape(-1, 1) @ b.t()).to(out_dtype)


def cast_by_rows(x: Tensor, *, transposed: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = x.float()
    if x.shape[1] < POWERS_FROM:
        codes, scale_M1, *_ = quantize(x, Format.E4M3, Scaling.ROWWISE)
        codes_t, scale, *_ = quantize(x.t(), Format.E4M3, Scaling.TENSORWISE)
    else:
        scale_M1, scale = _power_scale(x.abs().amax(1, keepdim=True)), _power_scale(x.abs().max()).reshape(1, 1)
        codes, codes_t = encode(x / scale_M1, Format.E4M3), encode(x.t() / scale, Format.E4M3)
    if not transposed:
        return _padded_with_zeros(codes), scale_M1, x.new_empty(0, 0), x.new_empty(0, 0)
    return _padded_with_zeros(codes), scale_M1, _padded_with_zeros(codes_t), scale


def _padded_with_zeros(codes: Tensor) -> Tensor:
    missing = padded_size(codes.shape[1], 16) - codes.shape[1]
    return F.pad(codes.contiguous().view(torch.uint8), (0, missing)).view(codes.dtype)


def rewriting_by_rows(
    x: Tensor, codes: tuple[Tensor, Tensor, Tensor, Tensor], adam: AdamStep | None = None
) -> Callable[[], None]:
    assert adam is None, "weights here are too small to be stepped as they are cast"

    def run() -> None:
        for held, made in zip(codes, cast_by_rows(x), strict=True):
            held.copy_(made)

    return run


def _gradient(dy_MN: Tensor, u_MN: Tensor, rstd_BM: Tensor, blocks: NormBlocks | None, activation: str) -> Tensor:
    if blocks is None and activation == "none":
        return dy_MN.float()
    n = dy_MN.shape[1]
    u_MN = u_MN[:, :n].float() * (blocks.code_scale if blocks and u_MN.dtype is CODES_DTYPE else 1.0)
    slope = {"none": torch.ones_like(u_MN), "relu": (u_MN > 0).float()}.get(
        activation, torch.where(u_MN <= -3, 0, torch.where(u_MN >= 3, 1, u_MN / 3 + 0.5))
    )
    g_MN = dy_MN.float() * slope
    if blocks is None:
        return g_MN
    sizes = block_sizes(n, blocks.block)
    parts = zip(g_MN.split(sizes, 1), u_MN.split(sizes, 1), rstd_BM, strict=True)
    return torch.cat([rstd[:, None] * (g - u * (g * u).mean(1, keepdim=True)) for g, u, rstd in parts], 1)


def _padded(stored: Tensor) -> Tensor:
    """NaN behind what may be read, up to a multiple of 16 columns."""
    missing = padded_size(stored.shape[1], 16) - stored.shape[1]
    if stored.dtype is not CODES_DTYPE:
        return F.pad(stored, (0, missing), value=float("nan"))
    return F.pad(stored.contiguous().view(torch.uint8), (0, missing), value=0x7F).view(CODES_DTYPE)
