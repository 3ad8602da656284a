"""The fused block's forward kernels against float64 of the same mathematics, on the very values their operands stand for."""

import math

import pytest
import torch
from block_check import ACTIVATION, EPS, FEATURES, FP64, assert_codes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loka.kernels.operand import padded_size
from loka.kernels.triton.block import BlockOutputs, Wanted, block_forward, norm_forward
from loka.kernels.triton.tiles import GEMM_TILES, PROMOTED_TILES, Columns, NormBlocks, choose_block_tiles
from loka.nn.block_norm import block_sizes
from loka.numerics.formats import decode

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy, of interpreted NaNs

ALL = Wanted(torch.float32, codes=True, transposed=True, saved=torch.float8_e4m3fn)
SUM_ERROR = {"cpu": 2.0**-20, "cuda": 2.0**-8}  # of Σ|x||w|: FP32 here, about 14 bits for each of many sums in a tensor core


def codes(rows: int, cols: int, seed: int, device: torch.device) -> Tensor:
    x = torch.zeros(rows, padded_size(cols, 16))
    x[:, :cols] = 20 * torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    return x.to(torch.float8_e4m3fn).to(device)


def norm(z: Tensor, blocks: NormBlocks) -> tuple[Tensor, Tensor]:
    """u and rstd, block by block."""
    parts = z.split(block_sizes(blocks.features, blocks.block), dim=1)
    rstd = [(part.square().mean(1) + EPS).rsqrt() for part in parts]
    return torch.cat([part * r[:, None] for part, r in zip(parts, rstd, strict=True)], 1), torch.stack(rstd)


def check_outputs(out: BlockOutputs, z: Tensor, z_error: Tensor, blocks: NormBlocks, activation: str) -> None:
    """``z_error`` bounds what z was off by before the norm; where a row's sums cancel, the norm enlarges it."""
    m, n = z.shape
    u, rstd = norm(z, blocks)
    y = FP64[activation](u)
    sizes = block_sizes(blocks.features, blocks.block)
    rms_error = torch.stack([part.square().mean(1).sqrt() for part in z_error.split(sizes, dim=1)])
    rstd_error = rstd * (1e-5 + rms_error * rstd)  # relative to the root mean square, which is 1/rstd
    rstd_MN, rstd_error_MN = (
        torch.repeat_interleave(t.t(), torch.tensor(sizes, device=z.device), dim=1) for t in (rstd, rstd_error)
    )
    slack = 1e-5 * (1 + u.abs()) + 2 * (z_error * rstd_MN + z.abs() * rstd_error_MN)  # 1.5 is the steepest activation
    assert ((out.rstd_BM.double() - rstd).abs() <= rstd_error).all()
    assert ((out.y_MN.double() - y).abs() <= slack).all()
    for got, expected in ((out.codes_MN[:, :n], y), (out.u_MN[:, :n], u), (out.codes_NM[:, :m].t(), y)):
        assert_codes(got, blocks.code_scale, expected, slack)


def check_forward(
    m: int, k: int, n: int, blocks: NormBlocks | None, activation: str, rowwise: bool, bias: bool, device: torch.device,
    high: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    torch.manual_seed(m + k)
    x, w = codes(m, k, 1, device), codes(n, k, 2, device)
    w_scale = torch.rand(n, 1, device=device) + 0.5
    x_scale = torch.rand(m, 1, device=device) + 0.5 if rowwise else None
    bias_N = 100 * torch.randn(n, device=device) if bias else torch.zeros(n, device=device)
    wanted = Wanted(high, saved=torch.float32) if blocks is None else ALL
    out = block_forward(x, x_scale, 0.25, w, w_scale, bias_N if bias else None, m, k, blocks, EPS, activation, wanted)
    x_values = decode(x[:, :k], torch.float64) * 0.25 * (1 if x_scale is None else x_scale.double())
    w_values = decode(w[:, :k], torch.float64) * w_scale.double()
    z = x_values @ w_values.t() + bias_N.double()
    z_error = SUM_ERROR[device.type] * (x_values.abs() @ w_values.abs().t() + bias_N.double().abs())
    if blocks is None:
        check_outputs_without_norm(out, z, z_error, activation)
    else:
        check_outputs(out, z, z_error, blocks, activation)


def check_outputs_without_norm(out: BlockOutputs, z: Tensor, z_error: Tensor, activation: str) -> None:
    y = FP64[activation](z)
    assert ((out.u_MN[:, : z.shape[1]].double() - z).abs() <= z_error + 1e-6 * z.abs()).all()
    rounding = torch.finfo(out.y_MN.dtype).eps * y.abs()
    assert ((out.y_MN.double() - y).abs() <= 1.5 * z_error + 1e-5 * z.abs() + rounding).all()  # 1.5: the steepest activation
    assert out.codes_MN.numel() == out.codes_NM.numel() == out.rstd_BM.numel() == 0


@settings(max_examples=25)
@given(
    m=st.integers(1, 70), k=st.integers(1, 300), n=FEATURES, activation=ACTIVATION, rowwise=st.booleans(), bias=st.booleans()
)
def test_interpreted_forward(interpreter: None, m: int, k: int, n: int, activation: str, rowwise: bool, bias: bool) -> None:
    check_forward(m, k, n, NormBlocks(n, 256), activation, rowwise, bias, torch.device("cpu"))


@settings(max_examples=20)
@given(
    m=st.integers(1, 70), k=st.integers(1, 300), n=FEATURES, activation=ACTIVATION, rowwise=st.booleans(), bias=st.booleans(),
    high=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_interpreted_forward_without_norm(
    interpreter: None, m: int, k: int, n: int, activation: str, rowwise: bool, bias: bool, high: torch.dtype
) -> None:
    check_forward(m, k, n, None, activation, rowwise, bias, torch.device("cpu"), high)


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "k", "n", "activation"), [
    (2048, 256, 768, "hard_swish"), (12288, 1024, 1024, "hard_swish"), (300, 100, 1000, "relu"), (77, 12288, 257, "none"),
])  # fmt: skip
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no norm"])
def test_compiled_forward(gpu: torch.device, m: int, k: int, n: int, activation: str, norm: bool) -> None:
    check_forward(m, k, n, NormBlocks(n, 256) if norm else None, activation, True, not norm, gpu, torch.bfloat16)


@settings(max_examples=12)
@given(m=st.integers(1, 70), n=FEATURES, activation=ACTIVATION, block=st.sampled_from([64, 256]))
def test_interpreted_norm_to_fp8(interpreter: None, m: int, n: int, activation: str, block: int) -> None:
    torch.manual_seed(m + n)
    z = torch.randn(m, n + 3).exp()[:, :n] - 1  # rows with gaps between them
    blocks = NormBlocks(n, block)
    check_outputs(norm_forward(z, blocks, EPS, activation, ALL), z.double(), torch.zeros(m, n), blocks, activation)


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n"), [(2048, 1024), (100, 1000)])
def test_compiled_norm_to_fp8(gpu: torch.device, m: int, n: int) -> None:
    z, blocks = torch.randn(m, n, device=gpu, dtype=torch.bfloat16), NormBlocks(n, 256)
    check_outputs(norm_forward(z, blocks, EPS, "none", ALL), z.double(), torch.zeros(m, n, device=gpu), blocks, "none")


def test_nonfinite_rows_stay_visible(where: torch.device) -> None:
    z = torch.randn(4, 300, device=where)
    z[1, 5], z[2, 299] = float("nan"), float("inf")
    blocks = NormBlocks(300, 256)
    out = norm_forward(z, blocks, EPS, "relu", ALL)
    for got in (out.y_MN, decode(out.codes_MN)[:, :300], decode(out.codes_NM)[:, :4].t(), decode(out.u_MN)[:, :300]):
        assert got[1, :150].isnan().all()
        assert got[2, 299].isnan()
        assert got[[0, 3]].isfinite().all()


@given(n=st.integers(1, 5000), block=st.integers(1, 256))
def test_blocks_are_those_of_the_norm(n: int, block: int) -> None:
    blocks = NormBlocks(n, block)
    sizes = block_sizes(n, block)
    assert (blocks.width + 1,) * blocks.wider + (blocks.width,) * (blocks.count - blocks.wider) == sizes
    assert blocks.room >= max(sizes)
    assert blocks.code_scale * 448 == pytest.approx(math.sqrt(max(sizes)))


def test_tiles_hold_a_block_and_finish_first() -> None:
    def chosen(m: int, k: int, n: int, *, forms: int = 1, only_codes: bool = True) -> tuple[int, int, int, int]:
        tiles = choose_block_tiles(m, n, k, NormBlocks(n, 256), 132, forms=forms, only_codes=only_codes)
        return tiles.rows, tiles.cols, tiles.warps, tiles.per_sm

    # What was fastest on an H200.
    assert chosen(2048, 512, 512) == chosen(2048, 4096, 1024) == chosen(6144, 2048, 1024) == (64, 256, 4, 1)
    assert chosen(6144, 256, 768) == chosen(6144, 512, 512) == chosen(12288, 256, 768) == (64, 256, 4, 2)
    assert chosen(2048, 2048, 2048) == chosen(12288, 1024, 1024) == chosen(12288, 4096, 4096) == (128, 256, 8, 1)
    assert chosen(2048, 2048, 1024, forms=3) == chosen(12288, 512, 512, forms=3) == (64, 256, 8, 1)
    assert chosen(2048, 1024, 4096, forms=3) == chosen(12288, 4096, 4096, forms=3) == (128, 256, 8, 1)
    # What has room for a wide form among several, and for promoted sums.
    assert chosen(12288, 4096, 4096, forms=3, only_codes=False) == chosen(12288, 32768, 4096) == (64, 256, 8, 1)
    assert chosen(12288, 4096, 4096, only_codes=False) == (128, 256, 8, 1)
    assert chosen(2048, 256, 100)[:2] == (64, 128)


def test_without_a_norm_tiles_are_those_of_a_product_and_cover_it() -> None:
    assert choose_block_tiles(12288, 4096, 4096, None, 132, forms=1, only_codes=False) == GEMM_TILES[0]
    assert choose_block_tiles(12288, 4096, 4096, None, 132, forms=2, only_codes=False) in PROMOTED_TILES
    assert choose_block_tiles(256, 256, 8192, None, 132, forms=1, only_codes=False).splits == 1
    assert Columns.of(1000, None, 128) == (8, 128, 0)
    assert Columns.of(1000, NormBlocks(1000, 256), 256) == (4, 250, 0)
    assert Columns.of(257, NormBlocks(257, 256), 256) == (2, 128, 1)
