"""Casting by rows: each row by a power of two, the transpose by one for all, made from the codes of the rows."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from loka.core.recipe import Format, Scaling
from loka.kernels.triton import casts, share
from loka.kernels.triton.share import POWERS_FROM, cast_by_rows, rewriting_by_rows
from loka.numerics.formats import decode, encode
from loka.numerics.scaling import quantize

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy, of interpreted NaNs


def matrix(rows: int, cols: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """Rows of very unlike size, one of them zero."""
    torch.manual_seed(seed)
    x = torch.randn(rows, cols, device=device) * (3 * torch.randn(rows, 1, device=device)).exp()
    x[rows // 2] = 0
    return x.to(dtype)


def smallest_powers(amax: Tensor) -> Tensor:
    """That bring an amax to 448 or less, found by trying; 2⁻¹²⁶ for 0."""
    powers = (2.0 ** torch.arange(-126, 120, dtype=torch.float64)).to(amax.device)  # a GPU's are off by a last bit
    return powers[torch.searchsorted(448 * powers, amax.double())]


def check(x: Tensor) -> None:
    """Codes of rows are x rounded once. Those of the transpose are too, but where both scales are far apart: the row's code,
    rounded again among the smallest numbers of the format."""
    (rows, cols), values = x.shape, x.double()
    codes, scale, codes_t, scale_t = cast_by_rows(x)
    of_rows, of_all = smallest_powers(values.abs().amax(1, keepdim=True)), smallest_powers(values.abs().max())
    assert torch.equal(scale.double(), of_rows)
    assert torch.equal(scale_t.double(), of_all.reshape(1, 1))
    expected = encode((values / of_rows).float(), Format.E4M3)
    assert torch.equal(codes[:, :cols].view(torch.uint8), expected.view(torch.uint8))
    expected_t = encode((decode(expected, torch.float64) * of_rows / of_all).float(), Format.E4M3).t().contiguous()
    assert torch.equal(codes_t[:, :rows].view(torch.uint8), expected_t.view(torch.uint8))
    assert (codes[:, cols:].view(torch.uint8) == 0).all()
    assert (codes_t[:, rows:].view(torch.uint8) == 0).all()


@pytest.fixture
def of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows, which are interpreted in little time, by powers of two as well."""
    monkeypatch.setattr(share, "POWERS_FROM", 1)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 150), cols=st.integers(1, 300), fp32=st.booleans(), seed=st.integers(0, 99))
def test_interpreted(interpreter: None, of_any_length: None, rows: int, cols: int, fp32: bool, seed: int) -> None:
    check(matrix(rows, cols, torch.float32 if fp32 else torch.bfloat16, CPU, seed))


def test_from_what_length_on(where: torch.device) -> None:
    check(matrix(5, POWERS_FROM, torch.float32, where))
    with pytest.raises(AssertionError):
        check(matrix(5, POWERS_FROM - 1, torch.float32, where))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "cols"), [(2048, 4096), (4096, 16384), (300, 1000), (12288, 512), (1, 640)])
def test_compiled(gpu: torch.device, rows: int, cols: int, dtype: torch.dtype) -> None:
    check(matrix(rows, cols, dtype, gpu))


def test_the_oracle_writes_the_same(where: torch.device, of_any_length: None) -> None:
    x = matrix(20, 50, torch.float32, where)
    codes, scale, _, scale_t = cast_by_rows(x)
    rows, whole = (quantize(x, Format.E4M3, scaling, powers=True) for scaling in (Scaling.ROWWISE, Scaling.TENSORWISE))
    assert torch.equal(codes[:, :50].view(torch.uint8), rows.codes.view(torch.uint8))
    assert torch.equal(scale, rows.scale)
    assert torch.equal(scale_t, whole.scale)


def test_rows_with_gaps_between_them(where: torch.device, of_any_length: None) -> None:
    check(matrix(20, 80, torch.float32, where)[:, :50])


@pytest.mark.gpu
def test_compiled_rows_past_what_a_program_holds(gpu: torch.device) -> None:
    x = matrix(40, 20_000, torch.float32, gpu)
    codes, scale, codes_t, scale_t = cast_by_rows(x)
    for got, of_codes, expected in ((codes[:, :20_000], scale, x), (codes_t[:, :40], scale_t, x.t())):
        assert ((decode(got, torch.float32) * of_codes - expected).abs() <= expected.abs() / 16 + of_codes * 2.0**-10).all()


def test_the_largest_of_many_rows_is_found_beforehand(
    where: torch.device, of_any_length: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(casts, "AMAXES_AT_ONCE", 4)
    check(matrix(37, 50, torch.float32, where))


def test_rounding_twice_is_rounding_once_within_the_normal_numbers(where: torch.device, of_any_length: None) -> None:
    """A transpose that reads the matrix again, as other casts do, writes the same codes there."""
    x = torch.randn(64, 96, device=where)
    _, _, codes_t, scale_t = cast_by_rows(x)
    once = encode((x.t().double() / scale_t.double()).float(), Format.E4M3)
    normal = decode(once, torch.float64).abs() >= 2.0**-6
    assert normal.float().mean() > 0.95
    assert torch.equal(codes_t[:, :64].view(torch.uint8)[normal], once.view(torch.uint8)[normal])


def test_bad_values_stay_visible_in_their_row_and_in_the_transpose(where: torch.device, of_any_length: None) -> None:
    x = matrix(8, 40, torch.float32, where)
    sound = cast_by_rows(x)
    for bad in (float("nan"), float("inf")):
        x[3, 5] = bad
        codes, scale, _, scale_t = cast_by_rows(x)
        assert scale[3].isnan()
        assert scale_t.isnan()
        others = [0, 1, 2, 4, 5, 6, 7]
        assert torch.equal(scale[others], sound[1][others])
        assert torch.equal(codes[others].view(torch.uint8), sound[0][others].view(torch.uint8))


@pytest.mark.parametrize("kept", ["short", "wide"])
def test_other_rows_have_the_scales_of_their_amaxes(where: torch.device, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones, and those that fit no program."""
    if kept == "wide":
        for module in (casts, share):
            monkeypatch.setattr(module, "WIDEST_ROW", 32)
        monkeypatch.setattr(share, "POWERS_FROM", 1)
    x = matrix(20, 50, torch.float32, where)
    codes, scale, codes_t, scale_t = cast_by_rows(x)
    assert torch.allclose(scale[:, 0], torch.where(x.abs().amax(1) > 0, x.abs().amax(1) / 448, 1.0))
    assert torch.allclose(scale_t, x.abs().max() / 448)
    for got, of_codes, expected in ((codes[:, :50], scale, x), (codes_t[:, :20], scale_t, x.t())):
        assert ((decode(got, torch.float32) * of_codes - expected).abs() <= expected.abs() / 16 + of_codes * 2.0**-10).all()
    rewriting_by_rows(2 * x, (codes, scale, codes_t, scale_t))()
    assert torch.allclose(scale_t, 2 * x.abs().max() / 448)


@pytest.mark.parametrize("powers_from", [1, 512])
def test_rows_alone_are_what_they_are_beside_the_transpose(
    where: torch.device, powers_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share, "POWERS_FROM", powers_from)
    x = matrix(20, 50, torch.bfloat16, where)
    codes, scale, codes_t, scale_t = cast_by_rows(x, transposed=False)
    both = cast_by_rows(x)
    assert torch.equal(codes.view(torch.uint8), both[0].view(torch.uint8))
    assert torch.equal(scale, both[1])
    assert codes_t.numel() == scale_t.numel() == 0


@pytest.mark.parametrize("transposed", [False, True])
def test_written_again_into_the_codes_that_are_there(where: torch.device, of_any_length: None, transposed: bool) -> None:
    """The first time and every time after, whatever the values are by then; a graph that saved the codes is refused."""
    x = matrix(30, 50, torch.float32, where)
    x = x.t().contiguous().t() if transposed else x
    held = cast_by_rows(torch.zeros_like(x))
    rewrite = rewriting_by_rows(x, held)
    for factor in (1.0, 3.0, 0.01):
        versions = [tensor._version for tensor in held]
        x *= factor
        rewrite()
        assert all(torch.equal(got.float(), expected.float()) for got, expected in zip(held, cast_by_rows(x), strict=True))
        assert all(tensor._version > before for tensor, before in zip(held, versions, strict=True))
