"""Blocks in a Survey: error of every role against float64, and times without the cast of the input."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated_block import emulate
from live_bytes import LiveBytes
from stand_in_records import record_of, site_record
from torch import nn

import loka
from loka.core.gemm import Role
from loka.core.recipe import Format
from loka.core.survey import BlockCandidate
from loka.kernels.device import device_of
from loka.measure.block import Blocks, _Exact, block_shape
from loka.measure.block_parts import build_block
from loka.measure.survey import measure
from loka.measure.timing import Timing
from loka.nn.block_norm import BlockNorm
from loka.nn.fused_block import FusedBlock
from loka.numerics import metrics

WITHOUT_NORM = {"activation": "act", "activation_kind": "ReLU"}
BEHIND = {"norm": "norm", "norm_kind": "BlockNorm", "activation": "act", "activation_kind": "Hardswish"}
TIMED = (
    *("input_cast", "training_cast", "forward", "training", "weight_cast"),
    *("baseline_forward", "baseline_training", "epilogue_forward", "epilogue_training"),
)


def weight(n: int, k: int) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(0)) / k**0.5


def without_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference path runs where no cast has led it, and so the exact gradients are to be taken there."""
    monkeypatch.setattr(_Exact, "_cast_product", lambda self, x_MK: self._product(x_MK.double()).detach())


@pytest.mark.parametrize("behind", [BEHIND, WITHOUT_NORM], ids=["norm", "no norm"])
def test_numbers_of_a_block_that_runs_by_reference(behind: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the block computes in FP32: its errors are FP32's in every role, and each time is of its own call."""
    calls: dict[str, Callable[[int], object]] = {}

    def times(candidates: dict[str, Callable[[int], object]], *_: Any, **__: Any) -> dict[str, Timing]:
        for call in candidates.values():
            call(0)
        calls.update(candidates)
        return {name: Timing(10.0 * (1 + index), 0, 0, 1) for index, name in enumerate(candidates)}

    monkeypatch.setattr(Blocks, "_why_not", lambda self, block, shapes: None)
    monkeypatch.setattr("loka.measure.block.time_together", times)
    without_casts(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    site = site_record("a", weight(96, 64), **behind, has_bias=True, bias_N=torch.ones(96))
    blocks = Blocks(Format.FP32, torch.device("cpu"))
    (block,) = blocks.survey(site, [32, 64])
    assert (block.kernel, block.norm, block.activation, block.why_not) == ("triton.block", behind.get("norm"), "act", None)
    assert {role: block.error[role]["relative_rms"].high < 1e-5 for role in Role} == dict.fromkeys(Role, True)
    assert tuple(calls) == TIMED
    expected = {"input_cast_us": 10, "training_cast_us": 20, "forward_us": 20, "training_us": 20, "weight_cast_us": 50}
    expected |= {"baseline_forward_us": 60, "baseline_training_us": 70, "epilogue_forward_us": 80, "epilogue_training_us": 90}
    assert {name: getattr(block, name) for name in expected} == {name: {32: us, 64: us} for name, us in expected.items()}
    calls.clear()
    blocks.survey(site, [32, 64])
    assert not calls  # equal shapes are timed once
    (first,) = blocks.survey(dataclasses.replace(site, needs_dx=False), [32])
    assert set(first.error) == {Role.FPROP, Role.WGRAD}
    assert calls  # another training step
    assert [gradient.shape for gradient in calls["training"](0)] == [(96, 64), (96,)]


def test_a_block_is_measured_with_the_settings_of_its_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 96), BlockNorm(96, block=32, eps=0.5), nn.Hardswish(), nn.Linear(96, 1))
    probe = loka.Probe(model, every=1)
    with probe.step():
        model(torch.randn(16, 24)).sum().backward()
    site = probe.record().sites["0"]
    block = build_block(block_shape(site, 16, Format.FP32), site.weight_NK, site.bias_N, torch.device("cpu"))
    assert isinstance(block, FusedBlock)
    x = torch.randn(16, 24)
    assert torch.equal(block.reference(x), model[:3](x))
    assert site.alone().norm_block is None
    by_default = block_shape(dataclasses.replace(site, norm_block=None, norm_eps=None), 16, Format.FP32)  # an older Record's
    older = build_block(by_default, site.weight_NK, site.bias_N, torch.device("cpu"))
    assert isinstance(older, FusedBlock)
    assert (older.norm.block, older.norm.eps) == (256, 1e-5)


def test_a_layer_with_nothing_behind_it_may_end_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a block that feeds it alone, and not as a head. It has no epilogue, whose time is 0."""
    emulate(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    timed: list[str] = []

    def times(candidates: dict[str, Callable[[int], object]], *_: Any, **__: Any) -> dict[str, Timing]:
        for call in candidates.values():
            call(0)
        timed.extend(candidates)
        return {name: Timing(10.0 * (1 + index), 0, 0, 1) for index, name in enumerate(candidates)}

    monkeypatch.setattr("loka.measure.block.time_together", times)
    blocks = Blocks(Format.FP32, torch.device("cpu"))
    site = site_record("a", weight(96, 64))
    assert blocks.survey(site, [32]) == ()
    assert blocks.survey(dataclasses.replace(site, producer="front", is_head=True), [32]) == ()
    (tail,) = blocks.survey(dataclasses.replace(site, producer="front"), [32])
    assert (tail.norm, tail.activation, tail.why_not) == (None, None, None)
    assert tuple(timed) == TIMED[:7]
    assert tail.epilogue_training_us == tail.epilogue_forward_us == {32: 0.0}
    assert all(0.03 < tail.error[role]["mere_floored"].mean < 0.1 for role in Role)  # healthy e4m3


@pytest.mark.parametrize(("cast_in_step", "can_step"), [(True, True), (True, False), (False, True)])
def test_a_cast_in_the_step_costs_what_it_adds_to_one(
    cast_in_step: bool, can_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    ran: list[str] = []
    monkeypatch.setattr(FusedBlock, "can_step", lambda self: can_step)
    monkeypatch.setattr(FusedBlock, "step_and_recast", lambda self, adam: ran.append(f"step {tuple(adam.gradient.shape)}"))
    monkeypatch.setattr(FusedBlock, "recast_after_step", lambda self: ran.append("behind"))
    planted = {"training": 1000.0, "training_cast": 200.0, "weight_cast": 70.0, "step_without_cast": 60.0}

    def times(candidates: dict[str, Callable[[int], object]], *_: Any, **__: Any) -> dict[str, Timing]:
        for call in candidates.values():
            call(0)
        return {name: Timing(planted.get(name, 1.0), 0, 0, 1) for name in candidates}

    monkeypatch.setattr("loka.measure.block.time_together", times)
    site = site_record("a", weight(96, 64), **BEHIND, cast_in_step=cast_in_step)
    (block,) = Blocks(Format.FP32, torch.device("cpu")).survey(site, [32])
    is_ours = cast_in_step and can_step
    assert ran == ["step (96, 64)" if is_ours else "behind"]
    assert block.training_us == {32: 800.0}
    assert block.weight_cast_us == {32: 10.0 if is_ours else 70.0}


@pytest.mark.parametrize("cast_in_step", [True, False])
def test_casts_of_a_block_rotate_over_its_copies_and_their_states(cast_in_step: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    ran: list[tuple[int, int]] = []
    by_torch: list[int] = []
    monkeypatch.setattr("loka.measure.block.copies_past_cache", lambda *_: 3)
    monkeypatch.setattr(FusedBlock, "can_step", lambda self: True)
    monkeypatch.setattr(FusedBlock, "step_and_recast", lambda self, adam: ran.append((id(self), id(adam.gradient))))
    monkeypatch.setattr(FusedBlock, "recast_after_step", lambda self: ran.append((id(self), 0)))
    monkeypatch.setattr(torch, "_fused_adamw_", lambda weights, *_, **__: by_torch.append(len(weights)))

    def times(candidates: dict[str, Callable[[int], object]], *_: Any, turns: int, **__: Any) -> dict[str, Timing]:
        for turn in range(turns):
            for name in {"weight_cast", "step_without_cast"} & candidates.keys():
                candidates[name](turn)
        return dict.fromkeys(candidates, Timing(1.0, 1, 1, 1))

    monkeypatch.setattr("loka.measure.block.time_together", times)
    Blocks(Format.FP32, torch.device("cpu")).survey(site_record("a", weight(96, 64), **BEHIND, cast_in_step=cast_in_step), [32])
    assert len(ran) == 9
    assert ran == 3 * ran[:3]
    assert [len(set(of_all)) for of_all in zip(*ran, strict=True)] == [3, 3 if cast_in_step else 1]
    assert by_torch == ([3, 3, 3] if cast_in_step else [])  # all of them, as often as each was cast


@pytest.mark.parametrize(("failure", "is_told"), [(torch.OutOfMemoryError("6 GiB"), False), (ValueError("no step"), True)])
def test_a_block_whose_steps_do_not_fit_is_cast_behind_them(
    failure: Exception, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise failure

    emulate(monkeypatch)
    monkeypatch.setattr("loka.measure.block_parts.AdamSteps", fails)
    monkeypatch.setattr(FusedBlock, "can_step", lambda self: True)
    monkeypatch.setattr("loka.measure.block.time_together", lambda calls, *_, **__: dict.fromkeys(calls, Timing(7.0, 7, 7, 1)))
    site = site_record("a", weight(96, 64), **BEHIND, cast_in_step=True)
    (block,) = Blocks(Format.FP32, torch.device("cpu")).survey(site, [32])
    assert block.why_not == ("failed: ValueError: no step" if is_told else None)
    assert block.weight_cast_us == ({} if is_told else {32: 7.0})


def test_what_backward_misreads_is_the_most_of_any_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    monkeypatch.setattr("loka.measure.block.time_together", lambda calls, *_, **__: dict.fromkeys(calls, Timing(1.0, 1, 1, 1)))
    shares = itertools.chain([0.1, 0.3], itertools.repeat(0.2))
    monkeypatch.setattr(_Exact, "misread_backward", lambda *_: next(shares))
    (block,) = Blocks(Format.FP32, torch.device("cpu")).survey(site_record("a", weight(96, 64), **BEHIND), [32])
    assert block.misread_backward == 0.3


@pytest.mark.parametrize("needs", [{}, {"needs_dx": False}, {"needs_dw": False}])
def test_a_norm_in_front_is_timed_into_fp8_and_compiled(needs: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    calls: dict[str, Callable[[int], Any]] = {}

    def times(candidates: dict[str, Callable[[int], Any]], *_: Any, **__: Any) -> dict[str, Timing]:
        calls.update(candidates)
        return {name: Timing(10.0 * (1 + index), 0, 0, 1) for index, name in enumerate(candidates)}

    monkeypatch.setattr("loka.measure.block.time_together", times)
    site = site_record("a", weight(96, 64), **BEHIND, **needs)
    (plain,) = Blocks(Format.FP32, torch.device("cpu")).survey(site, [32])
    assert (plain.entry, plain.entry_forward_us, tuple(calls)) == (None, {}, TIMED)
    (block,) = Blocks(Format.FP32, torch.device("cpu")).survey(
        dataclasses.replace(site, entry="norm_in_front", entry_block=32), [32]
    )
    names = ("entry_forward", "entry_training", "entry_baseline_forward", "entry_baseline_training")
    assert tuple(calls) == (*TIMED, *names)
    assert block.entry == "norm_in_front"
    assert [getattr(block, f"{name}_us") for name in names] == [{32: 100}, {32: 110}, {32: 120}, {32: 130}]
    codes, saved = calls["entry_forward"](0)
    expected = calls["entry_baseline_forward"](0)
    torch.testing.assert_close(codes.codes_MK.float() * codes.factor, expected, rtol=0.07, atol=0.02)
    assert codes.codes_KM.numel() == saved.u_MN.numel() == 0
    if needs.get("needs_dx", True):
        (dx,) = calls["entry_baseline_training"](0)
        assert float((calls["entry_training"](0) - dx).norm()) < 0.1 * float(dx.norm())
    else:
        codes = calls["entry_training"](0)
        torch.testing.assert_close(codes.codes_KM[:, :32].float().t() * codes.factor, expected, rtol=0.07, atol=0.02)


def test_a_norm_in_front_that_no_kernel_computes_leaves_the_block_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    timed: list[str] = []

    def times(candidates: dict[str, Callable[[int], Any]], *_: Any, **__: Any) -> dict[str, Timing]:
        timed.extend(candidates)
        return dict.fromkeys(candidates, Timing(10.0, 0, 0, 1))

    monkeypatch.setattr("loka.measure.block.time_together", times)
    site = site_record("a", weight(32, 512), **BEHIND, entry="wide", entry_block=512)
    (block,) = Blocks(Format.FP32, torch.device("cpu")).survey(site, [32])
    assert (block.why_not, block.entry, tuple(timed)) == (None, None, TIMED)
    assert "BlockNorm(block=512) → linear" in str(block_shape(site, 32, Format.FP32))


@pytest.mark.parametrize("k", [64, 512], ids=["rows by their amaxes", "rows by powers of two"])
def test_gradients_are_exact_where_the_forward_casts_led(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts move inputs of relu across 0: beside the gradients at the exact point those of any FP8 block look unsafe."""
    emulate(monkeypatch)
    monkeypatch.setattr(Blocks, "_time", lambda *_: dict.fromkeys(TIMED, 1.0))
    site = site_record("a", weight(96, k), **WITHOUT_NORM)
    (block,) = Blocks(Format.FP32, torch.device("cpu")).survey(site, [256])
    assert all(0.03 < block.error[role]["mere_floored"].mean < 0.1 for role in Role)  # healthy e4m3
    without_casts(monkeypatch)
    (block,) = Blocks(Format.FP32, torch.device("cpu")).survey(site, [256])
    assert block.error[Role.FPROP]["mere_floored"].mean < 0.1
    assert all(block.error[role]["mere_floored"].mean > 0.2 for role in (Role.DGRAD, Role.WGRAD))


def test_what_its_casts_lose_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """One feature 2¹⁶ times as large as the other seven takes e4m3's whole range: every value of those becomes zero."""
    monkeypatch.setattr(Blocks, "_why_not", lambda self, block, shapes: None)
    monkeypatch.setattr(Blocks, "_time", lambda *_: dict.fromkeys(TIMED, 1.0))

    def draw(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.ones(rows, 8)
        x[:, 0] = 2.0**20
        return x, torch.randn(rows, 8, generator=generator)

    (block,) = Blocks(Format.FP32, torch.device("cpu")).survey(site_record("a", torch.ones(8, 8), draw, **WITHOUT_NORM), [32])
    assert (block.flushed, block.silenced) == (pytest.approx(7 / 8), pytest.approx(7 / 8))


@pytest.mark.parametrize("lost", ["input", "gradient", "weight", "small rows of the gradient", "nothing"])
def test_features_that_backward_would_misread_are_counted(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of x and dz has one scale, and all of the transposed weight: three features of four, 2⁻²⁴ times as large as the last,
    are gone from dw, or from dx, and the error of the whole does not show it. A sum over rows loses nothing with small ones."""
    emulate(monkeypatch)
    monkeypatch.setattr(Blocks, "_time", lambda *_: dict.fromkeys(TIMED, 1.0))
    small = torch.ones(32).masked_fill_(torch.arange(32) % 4 > 0, 2.0**-24)

    def draw(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x, dy = (torch.randn(rows, 32, generator=generator) for _ in range(2))
        x = x * small if lost == "input" else x
        if lost == "small rows of the gradient":
            dy[rows // 4 :] *= 2.0**-24
        return x, dy * small if lost == "gradient" else dy

    w = weight(32, 32) * (small if lost == "weight" else 1.0)
    (block,) = Blocks(Format.FP32, torch.device("cpu")).survey(site_record("a", w, draw, **WITHOUT_NORM), [256])
    assert block.misread_backward == (0.75 if lost in ("input", "gradient", "weight") else 0.0)
    assert lost == "input" or block.error[Role.WGRAD]["mere_floored"].mean < 0.1


@pytest.mark.parametrize(("lost", "needed"), [("input", {"needs_dx": False}), ("weight", {"needs_dw": False})])
def test_only_what_backward_reads_is_judged(lost: str, needed: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """x by wgrad and w by dgrad: where the weight does not learn, or nothing in front does, what it loses is lost to nobody."""
    emulate(monkeypatch)
    monkeypatch.setattr(Blocks, "_time", lambda *_: dict.fromkeys(TIMED, 1.0))
    small = torch.ones(32).masked_fill_(torch.arange(32) % 4 > 0, 2.0**-24)

    def draw(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x, dy = (torch.randn(rows, 32, generator=generator) for _ in range(2))
        return x * small if lost == "input" else x, dy

    def misread(**needs: bool) -> float:
        site = site_record("a", weight(32, 32) * (small if lost == "weight" else 1.0), draw, **WITHOUT_NORM)
        (block,) = Blocks(Format.FP32, torch.device("cpu")).survey(dataclasses.replace(site, **needs), [256])
        return block.misread_backward

    assert misread() == misread(**needed) == 0.75
    other = {"needs_dw": False} if lost == "input" else {"needs_dx": False}
    assert misread(**other) == 0


def test_what_powers_of_two_flush_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An amax a little over 448 has a scale of 1, and 2 is the power above it: 0.7 of e4m3's smallest is gone by the latter,
    which rows of 512 have."""
    emulate(monkeypatch)
    monkeypatch.setattr(Blocks, "_time", lambda *_: dict.fromkeys(TIMED, 1.0))

    def draw(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((rows, 512), 0.7 * 2.0**-9)
        x[:, 0] = 448 * 1.01
        return x, torch.randn(rows, 8, generator=generator)

    (block,) = Blocks(Format.FP32, torch.device("cpu")).survey(site_record("a", torch.ones(8, 512), draw, **WITHOUT_NORM), [32])
    assert (block.flushed, block.silenced) == (pytest.approx(511 / 512), pytest.approx(511 / 512))


def test_a_failure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Blocks, "_why_not", lambda self, block, shapes: None)
    monkeypatch.setattr(Blocks, "_error", lambda self, site, block, budget_s: 1 / 0)
    (block,) = Blocks(Format.FP32, torch.device("cpu")).survey(site_record("a", weight(8, 8), **BEHIND), [32])
    assert block == BlockCandidate("triton.block", "norm", "act", why_not="failed: ZeroDivisionError: division by zero")


@pytest.mark.gpu
def test_every_gpu_kernel_and_block_is_surveyed() -> None:
    """Every kernel able on this GPU is within its format's error and timed, and so is the block."""
    calls = {2048: 1.0}
    plain = site_record("plain", weight(512, 512), calls=calls, has_bias=True, bias_N=torch.zeros(512))
    block = site_record("block", weight(512, 512), calls=calls, **BEHIND)
    relu = site_record("relu", weight(512, 512), calls=calls, **WITHOUT_NORM, has_bias=True, bias_N=torch.zeros(512))
    survey = measure(record_of(plain, block, relu, dtype=Format.BF16), device="cuda")
    device = device_of(torch.device("cuda"))
    for site in survey.sites:
        assert not [c.why_not for c in site.candidates if c.fault]
        fp8 = [c for c in site.candidates if c.recipe.startswith("e4m3") and c.error]
        assert len({c.kernel for c in fp8}) >= 4, device
        assert all(0.02 < c.error["relative_rms"].mean < 0.06 for c in fp8)
        assert all(set(c.gemm_us) == {2048} for c in fp8)
        assert site.casts
    for (surveyed,) in (site.blocks for site in survey.sites[1:]):
        assert surveyed.why_not is None
        assert all(surveyed.error[role]["mere_floored"].high < 0.2 for role in Role)
        assert 0 < surveyed.forward_us[2048] < surveyed.baseline_training_us[2048]


def test_the_error_of_a_wide_block_takes_few_copies_of_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 38,912 by 38,912 ten bytes a weight are 15 GB. float64 takes 8 for the weight and 8 for its gradient, casts some."""
    size = 768
    monkeypatch.setattr(metrics, "AT_ONCE", size * size // 16)
    site = site_record("a", weight(size, size), **BEHIND, calls={8: 1.0})
    block = build_block(block_shape(site, 8, Format.FP32), site.weight_NK, None, torch.device("cpu"))
    assert isinstance(block, FusedBlock)
    site.sample(8, torch.Generator().manual_seed(0))  # what a sampler is made of is another matter
    with LiveBytes() as live:
        Blocks(Format.FP32, torch.device("cpu"))._error(site, block, budget_s=0.0)
    assert live.peak < 32 * size * size
