"""The gradient of norm and activation as kernels write it, against autograd at float64."""

import pytest
import torch
from block_check import ACTIVATION, EPS, FEATURES, FP64, assert_codes, rounded_before
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loka.kernels.triton import tiles
from loka.kernels.triton.block import Wanted, norm_forward
from loka.kernels.triton.gradient import GradientCodes, block_gradient, norm_gradient
from loka.kernels.triton.tiles import Columns, NormBlocks, gradient_steps
from loka.nn.block_norm import block_sizes
from loka.numerics.formats import decode

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy, of interpreted NaNs

SAVED = Wanted(saved=torch.float8_e4m3fn)
X_FACTOR = 0.3


def dz_reference(dy: Tensor, normed: Tensor, rstd: Tensor, blocks: NormBlocks, activation: str) -> Tensor:
    """The gradient by autograd: through z = u/rstd, at float64."""
    sizes = block_sizes(blocks.features, blocks.block)
    rstd_MN = torch.repeat_interleave(rstd.t(), torch.tensor(sizes, device=dy.device), dim=1)
    z = (normed / rstd_MN).requires_grad_()
    # ε is what makes rstd the root of the mean square: solved for here, since the codes of u are rounded.
    parts = [
        (part * (part.square().mean(1) + (1 / r.square() - part.detach().square().mean(1))).rsqrt()[:, None])
        for part, r in zip(z.split(sizes, 1), rstd, strict=True)
    ]
    FP64[activation](torch.cat(parts, 1)).backward(dy)
    assert z.grad is not None
    return z.grad


def gradient_of(dy: Tensor, u: Tensor, rstd: Tensor, blocks: NormBlocks | None, activation: str) -> GradientCodes:
    return block_gradient(dy, u, rstd, blocks, activation, rows=True, transposed=True, bias=True, x_factor=X_FACTOR)


def gradients(m: int, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows of very unlike size, one of them zero, as those of examples that a model is sure of."""
    dy = 1e-4 * torch.randn(m, n, device=device) * (3 * torch.randn(m, 1, device=device)).exp()
    dy[m // 2] = 0
    return dy.to(dtype)


def check_backward(m: int, blocks: NormBlocks, activation: str, dtype: torch.dtype, device: torch.device) -> None:
    n = blocks.features
    z = (torch.randn(m, n, device=device) + 0.3) * torch.randn(n, device=device).exp()  # blocks of unlike size
    saved = norm_forward(z, blocks, EPS, activation, SAVED)
    dy, rstd = gradients(m, n, dtype, device), saved.rstd_BM.double()
    normed = decode(saved.u_MN[:, :n], torch.float64) * blocks.code_scale
    dz = dz_reference(dy.double(), normed, rstd, blocks, activation)
    slack = 1e-6 * dy.double().abs().amax(1, keepdim=True) * rstd.amax(0)[:, None]
    check_codes(gradient_of(dy, saved.u_MN, saved.rstd_BM, blocks, activation), dz, slack)
    if activation == "none":
        alone = norm_gradient(dy, saved.u_MN, saved.rstd_BM, blocks)
        assert alone.dtype is dtype
        assert ((alone.double() - dz).abs() <= torch.finfo(dtype).eps * dz.abs() + slack).all()


def check_backward_without_norm(
    m: int, n: int, activation: str, dtype: torch.dtype, u_dtype: torch.dtype, device: torch.device
) -> None:
    u = (3 * torch.randn(m, n + 5, device=device)).to(u_dtype)[:, :n]  # rows with gaps between them
    dy, z = gradients(m, n, dtype, device), u.double().requires_grad_()
    FP64[activation](z).backward(dy.double())
    assert z.grad is not None
    read = u.new_empty(0) if activation == "none" else u
    slack = 1e-6 * dy.double().abs().amax(1, keepdim=True)
    check_codes(gradient_of(dy, read, u.new_empty(0), None, activation), z.grad, slack)


def check_codes(got: GradientCodes, dz: Tensor, slack: Tensor) -> None:
    """Codes are dz rounded once, scales the smallest powers of two that keep them in the format."""
    (m, n), scale_M, (wgrad_scale, one) = dz.shape, got.scale_M.double(), got.wgrad_scales[:, 0].double()
    assert one == 1
    scale = 2.0 ** (wgrad_scale / X_FACTOR).log2().round()
    torch.testing.assert_close(wgrad_scale, scale * X_FACTOR, rtol=1e-6, atol=0.0)
    assert torch.equal(scale_M.frexp().mantissa, torch.full_like(scale_M, 0.5))
    for codes, of_codes in ((got.codes_MN[:, :n], scale_M[:, None]), (got.codes_NM[:, :m].t(), scale)):
        assert_codes(codes, of_codes, dz, slack + rounded_before(dz, of_codes))
    assert (got.codes_NM[:, m:].view(torch.uint8) == 0).all()
    amax = dz.abs().amax(1)
    assert (amax <= 448 * scale_M + slack[:, 0]).all()
    assert (2 * (amax + slack[:, 0]) >= 448 * scale_M * (amax > 0)).all()
    assert 2 * (amax + slack[:, 0]).max() >= 448 * scale * (amax.max() > 0)
    sums_error = m * (slack.max() + 1e-7 * dz.abs().max()) + 1e-5 * dz.sum(0).abs()
    assert ((got.bias_N.double() - dz.sum(0)).abs() <= sums_error).all()


@settings(max_examples=8)
@given(m=st.integers(1, 70), n=FEATURES, activation=ACTIVATION, fp32=st.booleans(), block=st.sampled_from([20, 256]))
def test_interpreted_backward(interpreter: None, m: int, n: int, activation: str, fp32: bool, block: int) -> None:
    torch.manual_seed(m)
    check_backward(m, NormBlocks(n, block), activation, torch.float32 if fp32 else torch.bfloat16, torch.device("cpu"))


@settings(max_examples=6)
@given(m=st.integers(1, 70), n=FEATURES, activation=ACTIVATION, fp32=st.booleans(), u_fp32=st.booleans())
def test_interpreted_backward_without_norm(
    interpreter: None, m: int, n: int, activation: str, fp32: bool, u_fp32: bool
) -> None:
    torch.manual_seed(m)
    dtype, u_dtype = (torch.float32 if wide else torch.bfloat16 for wide in (fp32, u_fp32))
    check_backward_without_norm(m, n, activation, dtype, u_dtype, torch.device("cpu"))


@pytest.mark.parametrize("most", [1, 3, 7])
def test_programs_that_go_down_several_tiles(interpreter: None, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "MOST_GRADIENT_PROGRAMS", most)
    torch.manual_seed(most)
    check_backward(150, NormBlocks(300, 256), "hard_swish", torch.float32, torch.device("cpu"))
    check_backward_without_norm(150, 300, "relu", torch.float32, torch.bfloat16, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "n", "activation"),
    [
        (2048, 768, "hard_swish"),
        (12288, 4096, "hard_swish"),
        (300, 1000, "relu"),
        (2048, 64, "none"),
    ],
)
def test_compiled_backward(gpu: torch.device, m: int, n: int, activation: str) -> None:
    torch.manual_seed(0)
    check_backward(m, NormBlocks(n, 256), activation, torch.bfloat16, gpu)
    check_backward_without_norm(m, n, activation, torch.bfloat16, torch.bfloat16, gpu)


def test_only_what_is_asked_for_is_written(where: torch.device) -> None:
    dy, nothing = gradients(20, 300, torch.float32, where), torch.empty(0, device=where)
    whole = gradient_of(dy, nothing, nothing, None, "none")
    for rows, transposed in ((True, False), (False, True), (False, False)):
        got = block_gradient(dy, nothing, nothing, None, "none", rows=rows, transposed=transposed, bias=True, x_factor=X_FACTOR)
        asked = (rows, rows, transposed, transposed, True)
        for tensor, expected, wanted in zip(got, whole, asked, strict=True):
            assert tensor.numel() == (expected.numel() if wanted else 0)
        assert torch.equal(got.bias_N, whole.bias_N)
        if rows:
            assert torch.equal(got.scale_M, whole.scale_M)
            assert torch.equal(got.codes_MN[:, :300].view(torch.uint8), whole.codes_MN[:, :300].view(torch.uint8))
        if transposed:
            assert torch.equal(got.wgrad_scales[:, 0], whole.wgrad_scales[:, 0])
            assert torch.equal(got.codes_NM.view(torch.uint8), whole.codes_NM.view(torch.uint8))


def test_what_backward_reads_may_be_wider_than_codes(where: torch.device) -> None:
    z, blocks = torch.randn(20, 300, device=where), NormBlocks(300, 256)
    out = norm_forward(z, blocks, EPS, "relu", Wanted(saved=torch.float32))
    dy = torch.randn(20, 300, device=where)
    got = gradient_of(dy, out.u_MN, out.rstd_BM, blocks, "relu")
    expected = dz_reference(dy.double(), out.u_MN[:, :300].double(), out.rstd_BM.double(), blocks, "relu")
    torch.testing.assert_close(got.bias_N.double(), expected.sum(0), rtol=1e-4, atol=1e-4)


def test_nonfinite_gradients_stay_visible(where: torch.device) -> None:
    """In the scale of their rows and in that of the transpose, so that both products show them; other rows are as they were."""
    dy, blocks = torch.ones(4, 300, device=where), NormBlocks(300, 256)
    out = norm_forward(torch.randn(4, 300, device=where), blocks, EPS, "none", SAVED)
    sound = gradient_of(dy, out.u_MN, out.rstd_BM, blocks, "none")
    for bad in (float("nan"), float("inf")):
        dy[0, 0] = bad
        got = gradient_of(dy, out.u_MN, out.rstd_BM, blocks, "none")
        assert got.scale_M[0].isnan()
        assert got.wgrad_scales[0, 0].isnan()
        assert torch.equal(got.scale_M[1:], sound.scale_M[1:])
        assert torch.equal(got.codes_MN[1:, :300].view(torch.uint8), sound.codes_MN[1:, :300].view(torch.uint8))


def test_programs_take_one_tile_unless_they_were_too_many() -> None:
    def steps(m: int, n: int) -> int:
        return gradient_steps(m, Columns.of(n, None, 256))

    assert steps(300, 768) == 1
    assert steps(12288, 2048) == 1
    assert steps(12288, 4096) == 2
    assert steps(100_000, 4096) == 13
