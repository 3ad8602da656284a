"""Our casts against the oracle: every scaling, both orders of axes, padding, hostile values."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loka.core.recipe import Format, Scaling
from loka.kernels.operand import OperandSpec, padded_size
from loka.kernels.triton import casts, recasts
from loka.kernels.triton.casts import (
    AMAXES_AT_ONCE,
    NOT_WRITTEN,
    SCALINGS,
    Target,
    amax_tile,
    cast_and_sum,
    cast_int8_rows,
    cast_matrix,
    cast_tile,
    rows_at_once,
    tiles_down,
)
from loka.kernels.triton.recasts import remember_amax, rewrite_codes, rewriting
from loka.kernels.triton.tiles import ceil_div
from loka.numerics.formats import decode
from loka.numerics.scaling import quantize

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy, of interpreted NaNs

KINDS = [NOT_WRITTEN, *(scaling.value for scaling in SCALINGS)]
STATIC = 0.05
ON_GPU = [
    ("rowwise", "none"),
    ("rowwise", "rowwise"),
    ("rowwise", "tensorwise"),
    ("tensorwise", "tensorwise"),
    ("static", "static"),
    ("rowwise", "1x128"),
    ("1x128", "1x128"),
    ("128x128", "128x128"),
    ("none", "rowwise"),
]


def target(kind: str, outer: int, contraction: int, multiple: int = 16) -> Target:
    if kind == NOT_WRITTEN:
        return Target.none()
    static = STATIC if kind == Scaling.STATIC else None
    return Target.of(OperandSpec(Format.E4M3, Scaling(kind), multiple, multiple, static_scale=static), outer, contraction)


def hostile(rows: int, cols: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows of different scales, a dead row, a dead column, exact zeros, tiny values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * (2 * torch.randn(rows, 1, generator=generator)).exp()
    x *= torch.rand(rows, cols, generator=generator) > 0.2
    x[rows // 2], x[:, cols // 2], x[0, 0] = 0, 0, 1e-30
    return x.to(dtype)


def assert_is_the_oracles(kind: str, codes: Tensor, scale: Tensor, oriented: Tensor) -> None:
    """The same scales and the same codes, bit for bit, NaN for NaN; the oracle's on a CPU, since CUDA's division is inexact."""
    codes, scale, oriented = codes.cpu(), scale.cpu(), oriented.cpu()
    padded = oriented.new_zeros(codes.shape)
    padded[: oriented.shape[0], : oriented.shape[1]] = oriented
    expected = quantize(padded, Format.E4M3, Scaling(kind), static_scale=STATIC if kind == Scaling.STATIC else None)
    torch.testing.assert_close(scale, expected.scale, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(decode(codes), decode(expected.codes), rtol=0, atol=0, equal_nan=True)


def bits(x: Tensor) -> Tensor:
    return x.reshape(-1).contiguous().view(torch.uint8)


def check(x: Tensor, plain: str, trans: str, multiple: int) -> None:
    rows, cols = x.shape
    targets = target(plain, rows, cols, multiple), target(trans, cols, rows, multiple)
    codes, scale, codes_t, scale_t = cast_matrix(x, *targets)
    with_sum, sum_C = cast_and_sum(x, *targets)
    assert all(torch.equal(*map(bits, pair)) for pair in zip(with_sum, (codes, scale, codes_t, scale_t), strict=True))
    expected, room = x.double().sum(0), 2.0**-20 * x.double().abs().sum(0)
    is_off = ((sum_C.double() - expected).abs() > room) & expected.isfinite()
    assert not is_off.any()
    assert torch.equal(sum_C.isfinite(), expected.isfinite())
    assert sum_C.dtype is torch.float32
    for kind, got, got_scale, oriented in ((plain, codes, scale, x), (trans, codes_t, scale_t, x.t())):
        if kind == NOT_WRITTEN:
            assert got.numel() == got_scale.numel() == 0
        else:
            assert_is_the_oracles(kind, got, got_scale, oriented)


@settings(max_examples=14)
@given(
    rows=st.one_of(st.integers(1, 40), st.sampled_from([127, 128, 129, 200])),
    cols=st.one_of(st.integers(1, 40), st.sampled_from([127, 128, 129, 200])),
    kinds=st.sampled_from([pair for pair in itertools.product(KINDS, KINDS) if set(pair) != {NOT_WRITTEN}]),
    multiple=st.sampled_from([4, 16, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**20),
)
def test_interpreted_casts_are_the_oracles(
    interpreter: None, rows: int, cols: int, kinds: tuple[str, str], multiple: int, dtype: torch.dtype, seed: int
) -> None:
    check(hostile(rows, cols, dtype, seed), *kinds, multiple)


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", ON_GPU, ids="-".join)
@pytest.mark.parametrize(("rows", "cols"), [(2050, 520), (300, 129), (8200, 4096)])
def test_compiled_casts_are_the_oracles(gpu: torch.device, kinds: tuple[str, str], rows: int, cols: int) -> None:
    check(hostile(rows, cols, torch.bfloat16, 0).to(gpu), *kinds, multiple=16)


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", ON_GPU, ids="-".join)
def test_a_cast_waits_for_what_it_reads(gpu: torch.device, kinds: tuple[str, str]) -> None:
    """Its kernels start while the one before still writes the matrix: another in every turn, in eager and in a graph."""
    matrices = [hostile(2048, 1024, torch.bfloat16, seed).to(gpu) for seed in range(4)]
    targets = target(kinds[0], 2048, 1024), target(kinds[1], 1024, 2048)
    expected = []
    for matrix in matrices:
        expected.append(cast_matrix(matrix, *targets))
        torch.cuda.synchronize()
    x = torch.zeros_like(matrices[0])

    def turns() -> list[tuple[Tensor, ...]]:
        return [cast_matrix(x.copy_(matrices[turn % 4]), *targets) for turn in range(40)]

    def check_turns(found: list[tuple[Tensor, ...]]) -> None:
        torch.cuda.synchronize()
        for turn, codes in enumerate(found):
            for part, right in zip(codes, expected[turn % 4], strict=True):
                assert torch.equal(bits(part), bits(right)), f"turn {turn}"

    check_turns(turns())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = turns()
    for _ in range(3):
        graph.replay()
        check_turns(captured)


def test_two_static_scales_are_two(where: torch.device) -> None:
    x = hostile(40, 70, torch.bfloat16, 0).to(where)
    plain, trans = (
        Target.of(OperandSpec(Format.E4M3, Scaling.STATIC, 16, 16, static_scale=scale), *shape)
        for scale, shape in ((0.05, (40, 70)), (0.1, (70, 40)))
    )
    codes, _, codes_t, _ = cast_matrix(x, plain, trans)
    for got, oriented, scale in ((codes, x, 0.05), (codes_t, x.t(), 0.1)):
        expected = quantize(oriented.cpu(), Format.E4M3, Scaling.STATIC, static_scale=scale)
        rows, cols = oriented.shape
        torch.testing.assert_close(decode(got.cpu())[:rows, :cols], decode(expected.codes), rtol=0, atol=0)


class TestRewriting:
    """A weight cast again after every step, in one read, with scales from twice the amaxes of the step before; row scales of
    both layouts apart, those of the matrix as it is from its own."""

    KINDS = (("rowwise", "rowwise"), ("tensorwise", "tensorwise"), ("none", "rowwise"))
    BY_THEIR_OWN = (
        ("rowwise", "none"),
        ("128x128", "128x128"),
        ("static", "static"),
        ("rowwise", "static"),
        ("rowwise", "tensorwise"),
    )

    @pytest.mark.parametrize("kinds", KINDS, ids="-".join)
    @pytest.mark.parametrize(("rows", "cols"), [(40, 150), (129, 64)])
    def test_scales_are_of_the_step_before(self, where: torch.device, kinds: tuple[str, str], rows: int, cols: int) -> None:
        targets = target(kinds[0], rows, cols), target(kinds[1], cols, rows)
        last, *steps = (size * hostile(rows, cols, torch.float32, 0).to(where) for size in (1.1, 1.0, 1.5, 1.2, 1.2))
        codes, memory = cast_matrix(last, *targets), remember_amax(last, *targets)
        for x in steps:
            rewrite_codes(x, *targets, codes, memory)
            for kind, got, scale, now, before in (
                (kinds[0], *codes[:2], x, x / 2 if kinds == ("rowwise", "rowwise") else last),
                (kinds[1], *codes[2:], x.t(), last.t()),
            ):
                if kind == NOT_WRITTEN:
                    continue
                outer, contraction = now.shape
                expected = quantize(2 * before.cpu(), Format.E4M3, Scaling(kind)).scale
                held = scale.cpu()[:outer] if kind == "rowwise" else scale.cpu()
                torch.testing.assert_close(held, expected, rtol=0, atol=0)
                # Half the range is used: an exact code's error, and no more than a subnormal's where values are tiny.
                value = decode(got.cpu())[:outer, :contraction] * held
                error, now = (value - now.cpu()).abs(), now.cpu().abs()
                assert (error <= now / 16 + held * 2.0**-10).all()
            last = x

    @pytest.mark.parametrize("kinds", KINDS, ids="-".join)
    @pytest.mark.parametrize("few", [False, True], ids=["", "fewer places and programs than tiles"])
    def test_what_more_than_doubles_is_written_by_what_it_is_now(
        self, where: torch.device, kinds: tuple[str, str], few: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if few:
            monkeypatch.setattr(recasts, "SEEN_PLACES", 2)
            monkeypatch.setattr(casts, "IF_OUTGROWN_PROGRAMS", 2)
        x = hostile(40, 300, torch.float32, 0).to(where)
        targets = target(kinds[0], 40, 300), target(kinds[1], 300, 40)
        codes, memory = cast_matrix(x, *targets), remember_amax(x, *targets)
        x[7, 3], x[20] = 1e3, 60.0  # one value, and a row that was dead
        rewrite_codes(x, *targets, codes, memory)
        assert memory[2].any(), "nothing outgrew what it was"
        expected_codes = list(cast_matrix(2 * x, *targets))
        if kinds == ("rowwise", "rowwise"):
            assert all(torch.equal(*pair) for pair in zip(codes[:2], cast_matrix(x, *targets)[:2], strict=True))
            codes, expected_codes = codes[2:], expected_codes[2:]
        for got, expected in zip(codes, expected_codes, strict=True):
            if got.dtype is torch.float8_e4m3fn:  # half the codes, but for what rounds otherwise near zero
                torch.testing.assert_close(2 * decode(got.cpu()), decode(expected.cpu()), rtol=0, atol=2.0**-8)
            else:
                assert torch.equal(got, expected)

    @pytest.mark.parametrize("kinds", [*KINDS, *BY_THEIR_OWN], ids="-".join)
    @pytest.mark.parametrize("rows", [40, 64], ids=str)
    def test_launches_made_again_write_what_a_call_writes(
        self, where: torch.device, kinds: tuple[str, str], rows: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of the values that the matrix has then, growth and all, and without the Python in front of them."""
        x = hostile(rows, 150, torch.float32, 0).to(where)
        targets = target(kinds[0], rows, 150), target(kinds[1], 150, rows)
        once, again = ((cast_matrix(x, *targets), remember_amax(x, *targets)) for _ in range(2))
        rewrite = rewriting(x, *targets, *again)
        for index, step in enumerate((1.1, 0.8, 7.0, 1.0)):
            x.mul_(step)
            rewrite_codes(x, *targets, *once)
            versions = [codes._version for codes in again[0]]
            with monkeypatch.context() as patch:
                if index:
                    patch.setattr(recasts, "rewrite_codes", None)
                rewrite()
            for got, expected, version in zip(again[0], once[0], versions, strict=True):
                assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
                assert got._version > version

    def test_a_matrix_that_must_be_copied_is_copied_every_time(self, where: torch.device) -> None:
        x = torch.randn(64, 40, generator=torch.Generator().manual_seed(0)).to(where).t()
        targets = target("rowwise", 40, 64), target("none", 64, 40)
        codes = cast_matrix(x, *targets)
        rewrite = rewriting(x, *targets, codes, remember_amax(x, *targets))
        for _ in range(3):
            x.mul_(-1)
            rewrite()
            torch.testing.assert_close(decode(codes[0].cpu())[:40] * codes[1].cpu()[:40], x.cpu(), rtol=0.07, atol=1e-3)

    def test_what_shrinks_to_little_is_written_by_what_it_is_now(self, where: torch.device) -> None:
        x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)).to(where)
        targets = target("rowwise", 40, 64), target("rowwise", 64, 40)
        codes, memory = cast_matrix(x, *targets), remember_amax(x, *targets)
        rewrite_codes(1e-6 * x, *targets, codes, memory)
        value = decode(codes[0].cpu())[:40] * codes[1].cpu()[:40]
        assert ((value - 1e-6 * x.cpu()).abs() <= 1e-6 * x.cpu().abs() / 15 + codes[1].cpu()[:40] * 2.0**-9).all()

    def test_any_stride_and_the_largest_numbers(self, where: torch.device) -> None:
        x = (2e38 * torch.rand(64, 40, generator=torch.Generator().manual_seed(0))).to(where).t()
        targets = target("rowwise", 40, 64), target("rowwise", 64, 40)
        codes, memory = cast_matrix(x, *targets), remember_amax(x, *targets)
        for _ in range(2):
            rewrite_codes(x, *targets, codes, memory)
            value = decode(codes[0].cpu())[:40] * codes[1].cpu()[:40]
            torch.testing.assert_close(value, x.cpu(), rtol=0.07, atol=1e36)

    def test_a_graph_that_saved_the_codes_before_is_refused(self, where: torch.device) -> None:
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).to(where)
        targets = target("rowwise", 16, 32), target("rowwise", 32, 16)
        codes, memory = cast_matrix(x, *targets), remember_amax(x, *targets)
        before = [tensor._version for tensor in codes]
        rewrite_codes(x, *targets, codes, memory)
        assert all(tensor._version > version for tensor, version in zip(codes, before, strict=True))

    @pytest.mark.parametrize("kinds", BY_THEIR_OWN, ids="-".join)
    def test_what_needs_no_memory_is_cast_as_ever(self, where: torch.device, kinds: tuple[str, str]) -> None:
        x = hostile(40, 150, torch.float32, 0).to(where)
        targets = target(kinds[0], 40, 150), target(kinds[1], 150, 40)
        codes, memory = cast_matrix(3 * x, *targets), remember_amax(3 * x, *targets)
        rewrite_codes(x, *targets, codes, memory)
        for got, expected in zip(codes, cast_matrix(x, *targets), strict=True):
            assert torch.equal(got.float(), expected.float())

    def test_without_a_memory_all_is_cast_as_ever(self, where: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rows too long for a program, as of a wide weight."""
        monkeypatch.setattr(casts, "WIDEST_ROW", 64)
        x = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)).to(where)
        targets = target("rowwise", *x.shape), target("tensorwise", x.shape[1], 4)
        codes = cast_matrix(3 * x, *targets)
        rewrite = rewriting(x, *targets, codes)
        for _ in range(2):  # as it shrinks, too
            rewrite()
            for got, expected in zip(codes, cast_matrix(x, *targets), strict=True):
                assert torch.equal(got.float(), expected.float())
            x.mul_(0.1)

    def test_bad_values_stay_visible_and_do_not_stay(self, where: torch.device) -> None:
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).to(where)
        targets = target("rowwise", 16, 32), target("rowwise", 32, 16)
        codes, memory = cast_matrix(x, *targets), remember_amax(x, *targets)
        bad = x.clone()
        bad[3, 5] = float("inf")
        rewrite_codes(bad, *targets, codes, memory)
        assert decode(codes[0].cpu())[3, 5].isnan()
        rewrite_codes(x, *targets, codes, memory)
        assert decode(codes[0].cpu()).isfinite().all()


@pytest.mark.parametrize("kinds", [("rowwise", "rowwise"), ("tensorwise", "none"), ("1x128", "128x128"), ("rowwise", "none")])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_value_poisons_what_shares_its_scale(where: torch.device, kinds: tuple[str, str], poison: float) -> None:
    x = hostile(40, 150, torch.bfloat16, 3)
    x[5, 140] = poison
    check(x.to(where), *kinds, multiple=16)


def test_static_scale_saturates_but_keeps_nonfinite_values_visible(where: torch.device) -> None:
    x = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 1.0]], device=where)
    codes, *_ = cast_matrix(x, Target("static", 1, 6, 2.0**-20), Target.none())
    assert decode(codes).cpu()[0, :3].isnan().all()
    assert decode(codes).cpu()[0, 3:].tolist() == [448.0, -448.0, 448.0]


@pytest.mark.parametrize("kind", ["rowwise", "tensorwise", "static"])
def test_codes_round_to_nearest_even(where: torch.device, kind: str) -> None:
    """Ties, carries into the next binade, subnormals and both signs, at a scale of exactly 1 (an amax of 448)."""
    positive = torch.tensor([448.0, 17.0, 19.0, 15.75, 2.0**-10, 3 * 2.0**-10, 2.0**-9, 0.0, 432.0, 1.0625, 1.9375, 500 / 512])
    x = torch.cat([positive, -positive])[None].to(where)
    codes, *_ = cast_matrix(x, Target(kind, 1, 24, 1.0), Target.none())
    expected = [448.0, 16.0, 20.0, 16.0, 0.0, 2.0**-8, 2.0**-9, 0.0, 416.0 + 32, 1.0, 2.0, 1.0]
    assert decode(codes).cpu()[0].tolist() == expected + [-value for value in expected]


def test_rows_with_gaps_between_them_and_columns_first(where: torch.device) -> None:
    wide = hostile(33, 80, torch.float32, 5).to(where)
    check(wide[:, 8:49], "rowwise", "rowwise", 16)
    check(wide.t(), "rowwise", "static", 16)
    check(wide[:1].expand(20, 80), "tensorwise", "1x128", 16)


class TestInt8:
    @given(rows=st.integers(1, 40), cols=st.integers(1, 300), seed=st.integers(0, 2**16), half=st.booleans())
    def test_interpreted_rows_are_the_oracles(self, interpreter: None, rows: int, cols: int, seed: int, half: bool) -> None:
        self.check(hostile(rows, cols, torch.bfloat16 if half else torch.float32, seed))

    @pytest.mark.gpu
    @pytest.mark.parametrize(("rows", "cols"), [(2048, 4096), (300, 200), (1, 16384)])
    def test_compiled_rows_are_the_oracles(self, gpu: torch.device, rows: int, cols: int) -> None:
        self.check(hostile(rows, cols, torch.bfloat16, 1).to(gpu))

    def test_a_bad_value_poisons_its_row(self, where: torch.device) -> None:
        x = hostile(20, 50, torch.float32, 2)
        x[3, 7], x[5, 9] = float("nan"), float("inf")
        _, scale = cast_int8_rows(x.to(where), 32, 64)
        assert scale.isnan().flatten().nonzero().flatten().tolist() == [3, 5]

    def check(self, x: Tensor) -> None:
        """Codes and scales of every row, zeros and a scale of 1 in the padding."""
        (rows, cols), expected = x.shape, quantize(x, Format.INT8, Scaling.ROWWISE)
        codes, scale = cast_int8_rows(x, padded_size(rows, 16), padded_size(cols, 16))
        assert torch.equal(codes[:rows, :cols], expected.codes)
        assert torch.equal(scale[:rows], expected.scale)
        assert not codes[rows:].any()
        assert not codes[:, cols:].any()
        assert (scale[rows:] == 1).all()


def test_tiles_hold_what_shares_a_scale() -> None:
    assert cast_tile("rowwise", "1x128")[:2] == cast_tile("128x128", "none")[:2] == (128, 128)
    assert cast_tile("1x128", "none")[:2] == (64, 128)
    assert cast_tile("none", "1x128")[:2] == (128, 64)
    assert cast_tile("rowwise", "rowwise")[:2] == (64, 128)
    assert cast_tile("static", "tensorwise")[:2] == (64, 64)
    assert cast_tile("tensorwise", "tensorwise")[:2] == (64, 64)
    assert cast_tile("tensorwise", "tensorwise", small=True)[:2] == (32, 64)
    assert cast_tile("none", "tensorwise", small=True)[:2] == (32, 128)
    assert cast_tile("tensorwise", "none", small=True) == cast_tile("tensorwise", "none")


def test_work_of_a_program_is_bounded() -> None:
    assert [rows_at_once(cols) for cols in (16, 256, 1000, 4096, 16384)] == [16, 16, 4, 1, 1]


@given(st.integers(1, 100_000), st.integers(1, 100_000), st.booleans())
def test_amaxes_of_strips_are_few(rows: int, cols: int, of_cols: bool) -> None:
    tile = amax_tile(rows, cols, of_cols=of_cols)
    down = tiles_down(rows, cols, tile)
    across = ceil_div(cols, tile.cols)
    assert ceil_div(rows, down * tile.rows) * across <= AMAXES_AT_ONCE
    assert down == 1 or ceil_div(rows, (down - 1) * tile.rows) * across > AMAXES_AT_ONCE  # and no fewer than that


def test_more_strips_than_amaxes_that_are_read_at_once(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of the gradient of half a million outputs."""
    monkeypatch.setattr(casts, "FEW_AMAXES", 2)
    monkeypatch.setattr(casts, "AMAXES_AT_ONCE", 4)
    check(hostile(3, 6 * 512, torch.float32, 0), "tensorwise", "none", 16)
