"""Our 8-bit GEMMs against float64 sums of the very values their operands stand for; and the tiles they are cut into."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loka.kernels.operand import padded_size
from loka.kernels.triton.gemm import gemm
from loka.kernels.triton.tiles import LONGEST_FAST, SHORTEST_SPLIT, Tiles, choose_tiles, count, grid, is_promoted

KINDS = ("promoted", "fast", "int8")
SIZES = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129]))
SUM_ERROR = {"cpu": 2.0**-18, "cuda": 32 * 2.0**-14}  # of Σ|a||b|: the interpreter sums in FP32, the tensor core in 14 bits


def codes(rows: int, cols: int, seed: int, device: torch.device, room: int | None = None) -> Tensor:
    """Random e4m3 codes with NaN in the padding, which nothing may read."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.full((rows, room or padded_size(cols, 16)), float("nan"))
    x[:, :cols] = 20 * torch.randn(rows, cols, generator=generator)
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(device)


def int8_codes(rows: int, cols: int, seed: int, device: torch.device) -> Tensor:
    """Random int8 codes, both ends among them, with others in the padding, which nothing may read."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, (rows, padded_size(cols, 16)), generator=generator, dtype=torch.int8).to(device)


def scales(*shape: int, seed: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).exp().to(device)


def assert_product(out: Tensor, a_MK: Tensor, b_NK: Tensor, bias: Tensor | None = None) -> None:
    """``a_MK`` and ``b_NK`` at float64, scales applied."""
    expected = a_MK @ b_NK.t() + (0 if bias is None else bias.double())
    allowed = SUM_ERROR[out.device.type] * (a_MK.abs() @ b_NK.abs().t()) + 2.0**-7 * expected.abs() * (
        out.dtype is torch.bfloat16
    )
    wrong = ~((out.double() - expected).abs() <= allowed + 2.0**-20 * expected.abs())
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} values are off"


def check_gemm(
    m: int, n: int, k: int, a_rowwise: bool, b_rowwise: bool, has_bias: bool, dtype: torch.dtype, device: torch.device,
    *, promoted: bool = True, int8: bool = False,
) -> None:  # fmt: skip
    make = int8_codes if int8 else codes
    a, b = make(m, k, 1, device), make(n, k, 2, device)
    a_scale = scales(m if a_rowwise else 1, 1, seed=3, device=device)
    b_scale = scales(n, 1, seed=4, device=device) if b_rowwise else None
    b_factor = 0.25
    bias = torch.randn(n, device=device) if has_bias else None
    out = gemm(a, b, a_scale, b_scale, m, n, k, out_dtype=dtype, bias=bias, promoted=promoted, b_factor=b_factor)
    assert out.dtype == dtype
    assert_product(
        out,
        a[:, :k].double() * a_scale.double(),
        b[:, :k].double() * b_factor * (1 if b_scale is None else b_scale.double()),
        bias,
    )


@settings(max_examples=25)
@given(
    m=SIZES, n=SIZES, k=st.one_of(SIZES, st.just(300)), a=st.booleans(), b=st.booleans(), bias=st.booleans(),
    fp32=st.booleans(), int8=st.booleans(),
)  # fmt: skip
def test_interpreted_products_are_exact(
    interpreter: None, m: int, n: int, k: int, a: bool, b: bool, bias: bool, fp32: bool, int8: bool
) -> None:
    check_gemm(
        m, n, k, a, b, bias, torch.float32 if fp32 else torch.bfloat16, torch.device("cpu"), promoted=not int8, int8=int8
    )


def test_sums_of_int8_are_exact_where_fp32_would_round(where: torch.device) -> None:
    """127² · 12,000 is past 2²⁴, from where FP32 counts in twos."""
    m, n, k = 3, 2, 12_001
    a = torch.full((m, padded_size(k, 16)), 127, dtype=torch.int8)
    b = torch.full((n, padded_size(k, 16)), 127, dtype=torch.int8)
    b[0, ::2] = -127
    out = gemm(a.to(where), b.to(where), torch.ones(m, 1, device=where), None, m, n, k, out_dtype=torch.float32, promoted=False)
    assert out.cpu()[:, 0].tolist() == [-(127.0**2)] * m


def test_split_contractions_add_up(where: torch.device) -> None:
    m, n, k = 40, 50, 4 * SHORTEST_SPLIT + 100
    assert choose_tiles(m, n, k, 4, promoted=True).splits == 4
    check_gemm(m, n, k, True, True, True, torch.float32, where)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "n", "k"), [(2048, 768, 256), (12288, 4096, 1024), (300, 200, 100), (130, 64, 12288), (1, 1, 16)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_products(gpu: torch.device, m: int, n: int, k: int, kind: str) -> None:
    check_gemm(m, n, k, True, True, False, torch.bfloat16, gpu, promoted=kind == "promoted", int8=kind == "int8")


class TestTiles:
    SMS = 132

    @given(m=st.integers(1, 20000), n=st.integers(1, 8192), k=st.integers(1, 200000), kind=st.sampled_from(KINDS))
    def test_fit_the_machine(self, m: int, n: int, k: int, kind: str) -> None:
        tiles = self.chosen(m, n, k, kind)
        assert tiles.per_sm * tiles.stages * (tiles.rows + tiles.cols) * tiles.depth <= 220 << 10  # of shared memory
        assert not (kind == "promoted" and tiles.rows * tiles.cols > 128 * 128)  # sums twice in registers
        if tiles.splits > 1:
            assert k // tiles.splits >= SHORTEST_SPLIT
            assert count(tiles, m, n) * tiles.splits <= tiles.per_sm * self.SMS

    def test_what_was_fastest_on_an_h200(self) -> None:
        def shape(m: int, n: int, k: int, kind: str = "fast") -> tuple[int, int, int]:
            tiles = self.chosen(m, n, k, kind)
            return tiles.rows, tiles.cols, tiles.per_sm

        assert shape(12288, 1024, 4096) == (128, 256, 1)
        assert shape(6144, 1024, 2048) == shape(2048, 1024, 4096) == (128, 128, 1)
        assert shape(2048, 4096, 1024) == shape(12288, 768, 256) == shape(12288, 768, 1024) == (128, 128, 2)
        assert shape(6144, 512, 512) == (64, 128, 3)
        assert shape(2048, 256, 768) == shape(512, 512, 512) == (64, 64, 4)
        assert shape(12288, 4096, 4096, "int8") == shape(2048, 2048, 2048, "int8") == (128, 128, 2)
        assert shape(6144, 1024, 4096, "int8") == shape(2048, 1024, 1024, "int8") == (64, 128, 2)
        assert shape(4096, 4096, 2048, "promoted") == (64, 128, 2)
        assert shape(1024, 1024, 12288) == (64, 128, 1)
        assert self.chosen(768, 256, 6144) == Tiles(64, 128, 128, warps=4, stages=6, splits=5)

    def test_small_products_fill_the_machine(self) -> None:
        assert count(self.chosen(2048, 512, 512), 2048, 512) > self.SMS // 2

    def chosen(self, m: int, n: int, k: int, kind: str = "fast") -> Tiles:
        return choose_tiles(m, n, k, self.SMS, promoted=kind == "promoted", int8=kind == "int8")

    def test_programs_persist_where_each_has_more_than_one_tile(self) -> None:
        tiles = Tiles(64, 128, 128, warps=4, stages=4, per_sm=2)
        assert grid(2 * self.SMS, tiles, self.SMS) == (2 * self.SMS, False)
        assert grid(2 * self.SMS + 1, tiles, self.SMS) == (2 * self.SMS, True)
        assert grid(1000, replace(tiles, splits=2), self.SMS) == (1000, False)  # whose parts are launched side by side

    def test_long_contractions_into_small_outputs_are_split(self) -> None:
        """But only where adding up the parts is the smaller cost: at 2048×1024×4096 an H200 took half as long again for it."""
        assert choose_tiles(256, 768, 12288, self.SMS, promoted=True).splits > 1
        assert choose_tiles(2048, 1024, 4096, self.SMS, promoted=False).splits == 1
        assert choose_tiles(4096, 4096, 12288, self.SMS, promoted=True).splits == 1


def test_long_contractions_are_promoted() -> None:
    """The tensor core's sums lose bits with their length; up to the longest that was measured they are let run."""
    assert [is_promoted(k) for k in (1, LONGEST_FAST, LONGEST_FAST + 1)] == [False, False, True]
