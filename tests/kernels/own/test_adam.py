"""A step of Adam that casts the weight: the step against FP64, the codes against those of a cast of the weight it leaves."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from loka.core.recipe import Format, Scaling
from loka.kernels.operand import OperandSpec
from loka.kernels.stepping import AdamStep, settings_of
from loka.kernels.triton import adam
from loka.kernels.triton.adam import launch_adam_by_rows
from loka.kernels.triton.casts import NOT_WRITTEN, SCALINGS, Codes, Target, cast_matrix
from loka.kernels.triton.recasts import can_step, remember_amax, rewrite_codes
from loka.kernels.triton.share import cast_by_rows, has_powers, rewriting_by_rows, steps_by_rows

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy, of interpreted NaNs

KINDS = [("tensorwise", "tensorwise"), ("tensorwise", NOT_WRITTEN), (NOT_WRITTEN, "tensorwise")]


@dataclass(frozen=True)
class Options:
    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.1


class Reference:
    """torch's own AdamW in FP64, from the same start."""

    def __init__(self, weight: Tensor, options: Options, steps: int = 0) -> None:
        self.weight = weight.detach().cpu().double().requires_grad_()
        self.adam = torch.optim.AdamW([self.weight], **vars(options), foreach=False)
        if steps:
            zeros = torch.zeros_like(self.weight, requires_grad=False)
            self.adam.state[self.weight] = {"step": torch.tensor(float(steps)), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}

    def step(self, gradient: Tensor) -> None:
        self.weight.grad = gradient.cpu().double()
        self.adam.step()


def adam_of(weight: Tensor, options: Options, *, steps: int = 0, found_inf: Tensor | None = None) -> AdamStep:
    values = torch.tensor(settings_of(**vars(options)), device=weight.device)
    step = torch.tensor(float(steps), device=weight.device)
    return AdamStep(torch.zeros_like(weight), torch.zeros_like(weight), torch.zeros_like(weight), step, values, found_inf)


def randn(rows: int, cols: int, seed: int, where: torch.device, size: float = 1.0) -> Tensor:
    return (size * torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))).to(where)


def targets_of(kinds: tuple[str, str], rows: int, cols: int) -> tuple[Target, Target]:
    plain, trans = (
        Target.none() if kind == NOT_WRITTEN else Target.of(OperandSpec(Format.E4M3, Scaling(kind), 16, 16), *shape)
        for kind, shape in zip(kinds, ((rows, cols), (cols, rows)), strict=True)
    )
    return plain, trans


def assert_same(got: Codes, expected: Codes) -> None:
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def assert_as_cast_by_rows(codes: Codes, weight: Tensor) -> None:
    """All but the transpose, which a cast makes from codes: here it is of the weight itself, rounded once."""
    made = cast_by_rows(weight)
    assert_same((*codes[:2], codes[3], codes[3]), (*made[:2], made[3], made[3]))
    rows, _ = weight.shape
    padded_CR = torch.zeros(codes[2].shape, device=weight.device)
    padded_CR[:, :rows] = weight.t() / codes[3]
    assert torch.equal(codes[2].float(), padded_CR.to(torch.float8_e4m3fn).float())


def assert_near(weight: Tensor, reference: Reference, options: Options, steps: int = 1) -> None:
    """Each step rounds the weight, and its own size, once or twice."""
    room = 2.0**-22 * steps * (reference.weight.abs() + 10 * options.lr)
    assert ((weight.cpu().double() - reference.weight).abs() <= room).all()


def check_one_scale(
    rows: int, cols: int, kinds: tuple[str, str], options: Options, seed: int, where: torch.device, found: bool = False
) -> None:
    """Three steps, and after each the codes of a weight that was stepped first and then cast by the same memory."""
    weight = randn(rows, cols, seed, where, 0.02)
    targets = targets_of(kinds, rows, cols)
    adam = adam_of(weight, options, found_inf=torch.zeros((), device=where) if found else None)
    reference, codes, memory = Reference(weight, options), cast_matrix(weight, *targets), remember_amax(weight, *targets)
    apart, apart_memory = cast_matrix(weight, *targets), memory.clone()
    for step in range(1, 4):
        adam.step.add_(1)
        adam.gradient.copy_(randn(rows, cols, seed + step, where, 10.0 ** (step - 2)))
        reference.step(adam.gradient)
        rewrite_codes(weight, *targets, codes, memory, adam)
        assert_near(weight, reference, options, step)
        rewrite_codes(weight, *targets, apart, apart_memory)
        assert_same(codes, apart)
        assert torch.equal(memory, apart_memory)


def check_by_rows(rows: int, cols: int, options: Options, seed: int, where: torch.device, found: bool = False) -> None:
    weight = randn(rows, cols, seed, where, 0.02)
    adam = adam_of(weight, options, found_inf=torch.zeros((), device=where) if found else None)
    reference, codes = Reference(weight, options), cast_by_rows(weight)
    rewrite = rewriting_by_rows(weight, codes, adam)
    for step in range(1, 3):
        adam.step.add_(1)
        adam.gradient.copy_(randn(rows, cols, seed + step, where, 10.0 ** (step - 2)))
        reference.step(adam.gradient)
        versions = [tensor._version for tensor in (weight, *codes)]
        rewrite()
        assert_near(weight, reference, options, step)
        assert_as_cast_by_rows(codes, weight)
        assert all(now._version > before for now, before in zip((weight, *codes), versions, strict=True))


SIZES = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 130]))
OPTIONS = st.builds(
    Options,
    lr=st.sampled_from([0.0, 1e-5, 1e-2]),
    betas=st.sampled_from([(0.9, 0.999), (0.0, 0.999), (0.95, 0.9), (0.99, 0.99999), (0.0, 0.0)]),
    eps=st.sampled_from([1e-8, 1e-3]),
    weight_decay=st.sampled_from([0.0, 0.1]),
)


@settings(max_examples=5)
@given(rows=SIZES, cols=SIZES, kinds=st.sampled_from(KINDS), options=OPTIONS, seed=st.integers(0, 2**20), found=st.booleans())
def test_interpreted_steps_with_one_scale(
    interpreter: None, rows: int, cols: int, kinds: tuple[str, str], options: Options, seed: int, found: bool
) -> None:
    check_one_scale(rows, cols, kinds, options, seed, torch.device("cpu"), found)


@settings(max_examples=1)
@example(rows=2, cols=4097, options=Options(), seed=0, found=True)  # one column past the last whole tile
@given(
    rows=st.integers(1, 4),
    cols=st.sampled_from([512, 513, 1000]),
    options=OPTIONS,
    seed=st.integers(0, 99),
    found=st.booleans(),
)
def test_interpreted_steps_by_rows(interpreter: None, rows: int, cols: int, options: Options, seed: int, found: bool) -> None:
    check_by_rows(rows, cols, options, seed, torch.device("cpu"), found)


def test_interpreted_steps_by_rows_of_several_tiles(interpreter: None) -> None:
    check_by_rows(130, 516, Options(), 0, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("found", [False, True])
@pytest.mark.parametrize(("rows", "cols"), [(1, 3), (129, 65), (640, 1000), (2048, 4096)])
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_compiled_steps_with_one_scale(gpu: torch.device, rows: int, cols: int, kinds: tuple[str, str], found: bool) -> None:
    check_one_scale(rows, cols, kinds, Options(), 0, gpu, found)


@pytest.mark.gpu
@pytest.mark.parametrize("found", [False, True])
@pytest.mark.parametrize(("rows", "cols"), [(1, 512), (129, 513), (640, 4097), (256, 16384), (4096, 1024)])
def test_compiled_steps_by_rows(gpu: torch.device, rows: int, cols: int, found: bool) -> None:
    check_by_rows(rows, cols, Options(), 0, gpu, found)


class TestBothKinds:
    """What holds with one scale for all and with one a row."""

    @pytest.fixture(params=["one scale", "by rows"])
    def by_rows(self, request: pytest.FixtureRequest) -> bool:
        return request.param == "by rows"

    def made(self, by_rows: bool, weight: Tensor, adam: AdamStep) -> tuple[Codes, Callable[[], None]]:
        if by_rows:
            codes = cast_by_rows(weight)
            return codes, rewriting_by_rows(weight, codes, adam)
        targets = targets_of(("tensorwise", "tensorwise"), *weight.shape)
        codes, memory = cast_matrix(weight, *targets), remember_amax(weight, *targets)
        return codes, lambda: rewrite_codes(weight, *targets, codes, memory, adam)

    @pytest.mark.parametrize("steps", [0, 9, 12_345, 10**6])
    def test_corrections_hold_at_any_step(self, where: torch.device, by_rows: bool, steps: int) -> None:
        options = Options(lr=1.0, weight_decay=0.0, eps=0.0, betas=(0.99, 0.9999))
        weight = torch.zeros(4, 512, device=where)
        reference, adam = Reference(weight, options, steps), adam_of(weight, options, steps=steps + 1)
        adam.gradient.copy_(randn(4, 512, 1, where))
        reference.step(adam.gradient)
        self.made(by_rows, weight, adam)[1]()
        torch.testing.assert_close(weight.cpu().double(), reference.weight.detach(), rtol=2e-6, atol=0)

    def test_without_an_epsilon_nothing_comes_from_past_the_edge(self, where: torch.device, by_rows: bool) -> None:
        weight = randn(17, 516, 0, where, 0.02)
        adam = adam_of(weight, Options(eps=0.0), steps=1)
        adam.gradient.copy_(randn(17, 516, 1, where))
        codes, run = self.made(by_rows, weight, adam)
        run()
        assert weight.isfinite().all()
        assert all(tensor.float().isfinite().all() for tensor in codes)
        assert not codes[0].float()[:, 516:].any()
        assert not codes[2].float()[:, 17:].any()

    def test_where_an_infinity_was_found_nothing_moves(self, where: torch.device, by_rows: bool) -> None:
        weight = randn(40, 520, 0, where)
        adam = adam_of(weight, Options(), steps=3, found_inf=torch.ones((), device=where))
        adam.gradient.fill_(float("nan"))
        before, (codes, run) = weight.clone(), self.made(by_rows, weight, adam)
        expected = [tensor.float() for tensor in codes]
        run()
        assert torch.equal(weight, before)
        assert not adam.average.any()
        assert not adam.square.any()
        factor = 1.0 if by_rows else 0.5  # by amaxes twice as large
        torch.testing.assert_close(codes[0].float(), factor * expected[0], rtol=0, atol=2.0**-9)

    def test_a_bad_gradient_shows_in_weight_and_codes(self, where: torch.device, by_rows: bool) -> None:
        weight = randn(40, 520, 0, where)
        adam = adam_of(weight, Options(), steps=1)
        adam.gradient[7, 3] = float("nan")
        codes, run = self.made(by_rows, weight, adam)
        run()
        assert weight.isnan().nonzero().tolist() == [[7, 3]]
        plain, transposed = codes[0].float() * codes[1], codes[2].float() * codes[3]
        assert plain[7].isnan().all()
        assert transposed[:, 7].isnan().all()

    def test_what_more_than_doubles_is_written_by_what_it_is_now(self, where: torch.device, by_rows: bool) -> None:
        options = Options(lr=10.0, weight_decay=0.0)
        weight = randn(40, 520, 0, where, 0.01)
        adam = adam_of(weight, options, steps=1)
        adam.gradient.copy_(randn(40, 520, 1, where))
        codes, run = self.made(by_rows, weight, adam)
        run()
        value = codes[0].float()[:40, :520] * (codes[1] if len(codes[1]) == 1 else codes[1][:40])
        assert weight.abs().min() > 1.0
        assert ((value - weight).abs() <= weight.abs() / 16).all()


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # NumPy's, where codes saturate
class TestPowers:
    """Those that rows have, and the one for all of the transpose, where a step finds them."""

    @pytest.fixture
    def weight(self, where: torch.device) -> Tensor:
        return randn(70, 520, 0, where, 0.02)

    def test_only_what_has_another_is_written_twice(self, weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
        codes, launch = cast_by_rows(weight), adam.launch
        monkeypatch.setattr(adam, "RETRANSPOSED_BY", 5)  # programs for 18 tiles

        def spoiling(kernel: Any, *given: Any, **named: Any) -> None:
            launch(kernel, *given, **named)
            if "square_ptr" in kernel.arg_names:
                codes[0].view(torch.uint8).fill_(7)
                codes[2].view(torch.uint8).fill_(7)

        monkeypatch.setattr(adam, "launch", spoiling)
        stays = adam_of(weight, Options(lr=0.0), steps=1)
        launch_adam_by_rows(weight, codes, stays)
        assert all((codes[index].view(torch.uint8) == 7).all() for index in (0, 2))
        weight[66] /= 64
        launch_adam_by_rows(weight, codes, stays)
        assert (codes[0].view(torch.uint8) != 7).any(dim=1).nonzero().tolist() == [[66]]
        assert (codes[2].view(torch.uint8) == 7).all()
        weight[3] *= 64
        launch_adam_by_rows(weight, codes, stays)
        assert (codes[0].view(torch.uint8) != 7).any(dim=1).nonzero().tolist() == [[3]]
        padded_CR = torch.zeros(codes[2].shape, device=weight.device)
        padded_CR[:, :70] = weight.t() / codes[3]
        assert torch.equal(codes[2].float(), padded_CR.to(torch.float8_e4m3fn).float())

    def test_the_largest_of_a_row_is_found_wherever_it_lies(self, where: torch.device) -> None:
        weight = randn(3, 2052, 0, where)
        codes = cast_by_rows(weight)
        weight[1, 1000], weight[2, 2051] = 50.0, 100.0
        launch_adam_by_rows(weight, codes, adam_of(weight, Options(), steps=1))
        assert_as_cast_by_rows(codes, weight)

    @pytest.mark.parametrize("value", [3e38, float("nan")])
    def test_a_row_of_any_values_is_written_and_so_is_what_it_becomes(self, weight: Tensor, value: float) -> None:
        codes, before = cast_by_rows(weight), weight.clone()
        adam = adam_of(weight, Options(lr=0.0), steps=1)  # held here: launches made again borrow its gradient
        run = rewriting_by_rows(weight, codes, adam)
        for row, of_row in ((3, 0.0), (4, 1e-45), (5, 1e-39), (66, value)):
            weight[row] = of_row
        run()
        for one, other in zip((*codes[:2], codes[3]), itertools.compress(cast_by_rows(weight), (1, 1, 0, 1)), strict=True):
            torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0, equal_nan=True)
        weight.copy_(before)
        run()
        assert_as_cast_by_rows(codes, weight)

    @pytest.mark.parametrize("value", [0.0, -float("nan")])
    def test_scales_may_be_any(self, weight: Tensor, value: float) -> None:
        codes = cast_by_rows(weight)
        codes[1][::3], codes[1][1::3], codes[1][2::3], codes[3][:] = float("inf"), value, -1.0, value
        launch_adam_by_rows(weight, codes, adam_of(weight, Options(), steps=1))
        assert_as_cast_by_rows(codes, weight)


def test_other_scalings_are_cast_apart() -> None:
    def able(plain: str, trans: str, cols: int = 520) -> bool:
        return can_step(torch.zeros(40, cols), Target(plain, 40, 528, 1.0), Target(trans, cols, 48, 1.0))

    kinds = [NOT_WRITTEN, *(scaling.value for scaling in SCALINGS)]
    assert {pair for pair in itertools.product(kinds, kinds) if able(*pair)} == set(KINDS)
    assert not any(able(*pair, cols=518) for pair in KINDS)  # rows that begin anywhere


def test_rows_of_other_lengths_are_cast_apart() -> None:
    assert [has_powers(cols) for cols in (511, 512, 16384, 16385)] == [False, True, True, False]
    assert [steps_by_rows(cols) for cols in (508, 512, 513, 516, 16384, 16388)] == [False, True, False, True, True, False]
