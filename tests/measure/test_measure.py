"""Timing side by side, and measuring a site: known errors, parts that add up, failures that are told."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch

from loka.core.gemm import Role, SiteShape, TensorName
from loka.core.recipe import Format, Scaling, Transform
from loka.kernels.contract import KERNELS
from loka.kernels.operand import Form, Operand
from loka.kernels.providers.reference import Reference
from loka.measure.error import OptionError
from loka.measure.gemm import measure_site
from loka.measure.oracle import Oracle
from loka.measure.parts import Option, SiteParts, SiteTensors, baseline_kernel
from loka.measure.timing import Timing, copies_past_cache, time_together, whole_rotations
from loka.numerics.metrics import measure_error

CPU = torch.device("cpu")


def test_times_what_a_call_takes() -> None:
    timings = time_together({"long": lambda _: time.sleep(4e-3), "short": lambda _: time.sleep(1e-3)}, CPU, turns=2, rounds=5)
    assert 4000 <= timings["long"].median_us < 12000
    assert 1000 <= timings["short"].median_us < timings["long"].median_us
    assert timings["long"].low_us <= timings["long"].median_us <= timings["long"].high_us
    assert timings["long"].rounds == 5


def test_candidates_take_every_round_in_turn() -> None:
    order = []
    time_together(
        {"a": lambda turn: order.append(("a", turn)), "b": lambda turn: order.append(("b", turn))}, CPU, turns=2, rounds=2
    )
    warm_up, rounds = order[:2], order[2:]
    assert warm_up == [("a", 0), ("b", 0)]
    assert rounds == 2 * [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_one_that_has_taken_its_time_drops_out_of_the_rounds_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls a round, of 10 ms and of 1 ms by a clock that they turn themselves: 50 ms are spent after three rounds."""
    clock = {"ms": 0}
    monkeypatch.setattr("loka.measure.timing.time.perf_counter", lambda: clock["ms"] / 1e3)

    def spend(ms: int) -> None:
        clock["ms"] += ms

    timings = time_together({"long": lambda _: spend(10), "short": lambda _: spend(1)}, CPU, turns=2, rounds=8, budget_s=0.05)
    assert {name: timing.rounds for name, timing in timings.items()} == {"long": 3, "short": 8}
    assert timings["long"].median_us == pytest.approx(10_000)


def test_copies_leave_the_cache_but_not_the_memory() -> None:
    assert copies_past_cache(1, CPU) == 64
    assert copies_past_cache(64 << 20, CPU) == 2


def test_every_copy_has_as_many_turns() -> None:
    assert [whole_rotations(copies) for copies in (1, 2, 3, 8, 9, 64)] == [8, 8, 9, 8, 9, 64]


@pytest.mark.gpu
def test_graph_timing_sees_the_device_not_the_host() -> None:
    """A kernel twice as long must take twice the time, though each launch from the host takes longer than both."""
    device = torch.device("cuda")
    small, large = torch.randn(1 << 26, device=device), torch.randn(1 << 27, device=device)
    timings = time_together({"small": lambda _: small.neg(), "large": lambda _: large.neg()}, device)
    assert 1.7 < timings["large"].median_us / timings["small"].median_us < 2.3


class TestMeasureSite:
    site = SiteShape(128, 128, 64)
    tensors = SiteTensors.random(site, torch.float32, CPU)

    def test_errors_are_those_of_the_format(self) -> None:
        rows = measure_site(self.site, self.tensors, ["torch.fp32", "reference.rowwise", "reference.int8_rowwise"], timed=False)
        for role in Role:
            error = {row.kernel: row.error.relative_rms for row in rows if row.role is role and row.error}
            assert error["torch.fp32"] < 1e-6
            assert error["reference.rowwise"] == pytest.approx(0.037, rel=0.05)  # e4m3's, on normal values
            assert error["reference.int8_rowwise"] == pytest.approx(0.01, rel=0.3)

    def test_parts_are_timed_apart(self) -> None:
        rows = measure_site(self.site, self.tensors, ["onednn.int8"])
        assert {row.role: set(row.cast_us) for row in rows} == {
            Role.FPROP: {TensorName.X, TensorName.W},
            Role.DGRAD: {TensorName.DY, TensorName.W},
            Role.WGRAD: {TensorName.DY, TensorName.X},
        }
        assert all(row.gemm and row.whole and row.gemm.median_us > 0 for row in rows)

    def test_the_whole_casts_what_a_call_casts_and_the_gemm_alone_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Weights are cast once a step, before either."""
        made: list[TensorName] = []
        cast = SiteParts.cast

        def counted(parts: SiteParts, name: TensorName, forms: Sequence[Form], turn: int) -> tuple[Operand, ...]:
            made.append(name)
            return cast(parts, name, forms, turn)

        def casts_of(calls: Mapping[str, Callable[[int], object]], device: torch.device, **_: object) -> dict[str, Timing]:
            counts = {}
            for key, call in calls.items():
                made.clear()
                call(0)
                counts[key] = Timing.of([len(made)])
            return counts

        monkeypatch.setattr(SiteParts, "cast", counted)
        monkeypatch.setattr("loka.measure.gemm.time_together", casts_of)
        rows = measure_site(self.site, self.tensors, ["onednn.int8"])
        casts = {row.role: (row.gemm.median_us, row.whole.median_us) for row in rows if row.gemm and row.whole}
        assert casts == {Role.FPROP: (0, 1), Role.DGRAD: (0, 1), Role.WGRAD: (0, 2)}

    def test_every_turn_multiplies_by_its_own_weight(self) -> None:
        """Else they would be read from the cache, where a model does not find them."""
        parts = SiteParts(self.tensors)
        for turn, weight_NK in enumerate([*self.tensors.weights, self.tensors.weights[0]]):
            exact = {Role.FPROP: self.tensors.x @ weight_NK.t(), Role.DGRAD: self.tensors.dy @ weight_NK}
            for transform, (role, expected) in itertools.product(Transform, exact.items()):
                product = parts.multiply(Option("reference.rowwise", role, transform), turn)
                assert measure_error(product, expected).relative_rms < 0.06

    @pytest.mark.parametrize("transform", Transform)
    def test_the_oracle_s_error_is_that_of_the_kernel_it_is_the_oracle_of(self, transform: Transform) -> None:
        """What is held to it, and is far worse, is called faulty: it must know what a transform adds behind the product."""
        shift_K, scale_K = torch.linspace(-3, 3, 128), 2.0 ** torch.arange(128).remainder(5)
        x_MK = (self.tensors.x + shift_K) * scale_K if transform is Transform.RESCALE else self.tensors.x + shift_K
        features = {Transform.CENTER: shift_K.bfloat16().float(), Transform.RESCALE: scale_K}
        parts = SiteParts(SiteTensors(x_MK, self.tensors.dy, self.tensors.weights[:1], features=features))
        for role in Role:
            option = Option("reference.rowwise", role, transform)
            assert Oracle(parts).relative_rms(option) == pytest.approx(parts.error(option).relative_rms, rel=1e-3)

    def test_what_casts_lose_is_what_the_operand_that_loses_more_does(self) -> None:
        """A quarter of the weights is too small for one scale of e4m3: fprop and dgrad read them, wgrad does not."""
        weight_NK = torch.ones(64, 128)
        weight_NK[:16] = 1e-6
        parts = SiteParts(SiteTensors(torch.ones(256, 128), torch.ones(256, 64), [weight_NK]))
        lost = {role: Oracle(parts).lost(Option("reference.tensorwise", role)) for role in Role}
        assert lost == {Role.FPROP: (0.25, 0.0), Role.DGRAD: (0.25, 0.0), Role.WGRAD: (0.0, 0.0)}

    def test_same_tensors_from_the_same_seed(self) -> None:
        again = SiteTensors.random(self.site, torch.float32, CPU)
        assert torch.equal(again.x, self.tensors.x)
        assert torch.equal(again.weights[1], self.tensors.weights[1])
        assert not torch.equal(again.weights[0], again.weights[1])

    def test_a_kernel_that_raises_is_told_and_the_rest_goes_on(self) -> None:
        @dataclass(frozen=True)
        class Raises(Reference):
            def multiply(self, a, b, out_dtype, bias):  # type: ignore[no-untyped-def]
                raise RuntimeError("cutlass cannot implement\nand a long trace")

        kernel = Raises("raises", Format.E4M3, Scaling.ROWWISE, Scaling.ROWWISE, Format.E4M3)
        KERNELS.add(kernel.name, kernel)
        try:
            rows = measure_site(
                self.site, self.tensors, ["torch.fp32", kernel.name, "reference.rowwise"], [Role.FPROP], timed=False
            )
        finally:
            KERNELS.remove(kernel.name)
        assert [row.why_not for row in rows] == [None, "failed: RuntimeError: cutlass cannot implement", None]

    def test_refusals_carry_their_reason(self) -> None:
        (row,) = measure_site(self.site, self.tensors, ["torch.rowwise"], [Role.FPROP])
        assert row.why_not == "needs an NVIDIA GPU"
        assert row.gemm is row.error is None

    def test_baseline_is_the_models_own_precision(self) -> None:
        assert baseline_kernel(Format.BF16) == "torch.bf16"
        assert baseline_kernel(Format.FP32) == "torch.fp32"


def test_a_weight_s_cast_is_timed_as_it_is_made_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a caster rewrites copies in place, the call that is timed does so; x is cast anew every time."""
    rewritten: list[int] = []

    class Rewriter:
        def remember(self, tensor: torch.Tensor, forms: Sequence[Form]) -> torch.Tensor:
            return torch.zeros(len(forms))

        def rewriting(self, tensor: torch.Tensor, operands: Mapping[Form, Operand], memory: torch.Tensor) -> Callable[[], None]:
            return lambda: rewritten.append(len(operands) * len(memory))

    monkeypatch.setattr("loka.measure.parts.rewriter_of", lambda name, tensor, forms: Rewriter())
    parts = SiteParts(SiteTensors.random(SiteShape(32, 48, 64), torch.float32, torch.device("cpu"), copies=2))
    forms = [Option("reference.rowwise", role).form_of(TensorName.W) for role in (Role.FPROP, Role.DGRAD)]
    made = [parts.cast(TensorName.W, forms, turn) for turn in (0, 1, 2)]
    assert rewritten == [4, 4, 4]
    assert made[0][0].codes is made[2][0].codes
    assert made[0][0].codes is not made[1][0].codes
    parts.cast(TensorName.X, [Option("reference.rowwise", Role.FPROP).form_of(TensorName.X)], 0)
    assert len(rewritten) == 3


def test_shares_that_casts_lose_are_means_over_the_samples() -> None:
    error, report = OptionError(), measure_error(torch.ones(4, 4), 2 * torch.ones(4, 4), Role.FPROP)
    for flushed in (0.4, 0.0, 0.2):
        error.add_lost(flushed, 0.0, 3 * flushed)
        error.samples.add(report)
    assert error.flushed == pytest.approx(0.2)
    assert error.silenced == pytest.approx(0.6)
