"""``loka bench block`` and ``loka bench casts``: every way computes the same block, and the tables say what was measured."""

import pickle
from functools import partial

import pytest
import torch
from emulated_block import emulate
from torch import Tensor

from loka.cli.shapes import BENCHMARK_SHAPES
from loka.core.gemm import SiteShape
from loka.measure import block_bench
from loka.measure.block_bench import BlockMeasurement, limits_us, measure_block, prepare_block
from loka.measure.block_tables import block_tables, cast_tables
from loka.measure.block_ways import ALONE, BASELINE, FUSED, WAYS, WEIGHT_CASTS, BlockInputs, Way
from loka.measure.cast_bench import BY_ROWS, COMPILED, COPY, FBGEMM, CastMeasurement, measure_casts
from loka.nn.block_norm import BlockNorm
from loka.numerics.metrics import relative_rms

CPU = torch.device("cpu")
SITE = SiteShape(96, 64, 300)


@pytest.fixture
def as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels emulated, what would be compiled eager, and the few questions to CUDA answered."""
    emulate(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")


def gradients(way: Way) -> tuple[Tensor, Tensor]:
    """Of x and of the weight of turn 1."""
    result = way.training(1)
    assert isinstance(result, tuple)
    dx_MK, dw_NK, *_ = result[0] if isinstance(result[0], tuple) else result
    return dx_MK, dw_NK


@pytest.mark.usefixtures("as_if_on_a_gpu")
class TestWays:
    def test_ours_alone_is_the_block_with_the_mods(self) -> None:
        inputs = BlockInputs(SITE, CPU)
        ours, theirs = WAYS[ALONE](inputs), WAYS["bf16 with the Mods"](inputs)
        assert ours.serving is not None
        assert theirs.serving is not None
        assert relative_rms(ours.serving(1), theirs.serving(1)) < 0.05
        for got, expected in zip(gradients(ours), gradients(theirs), strict=True):
            assert relative_rms(got, expected) < 0.07

    def test_ours_in_a_chain_is_the_block_behind_a_norm(self) -> None:
        inputs = BlockInputs(SITE, CPU)
        ours = WAYS[FUSED](inputs)
        inputs.x_MK = BlockNorm(SITE.k)(inputs.x_MK)
        for got, expected in zip(gradients(ours), gradients(WAYS["bf16 with the Mods"](inputs)), strict=True):
            assert relative_rms(got, expected) < 0.07

    def test_weights_take_turns(self) -> None:
        inputs = BlockInputs(SITE, CPU)
        serving = WAYS[BASELINE](inputs).serving
        assert serving is not None
        assert not torch.equal(serving(0), serving(1))
        assert torch.equal(serving(0), serving(len(inputs.weights)))

    def test_all_are_timed_or_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(block_bench, "time_together", lambda calls, device, turns: _pretend(calls))
        measured = measure_block(prepare_block(SITE, CPU))
        assert {BASELINE, FUSED, ALONE, "bf16 with the Mods"} <= set(measured.serving_us)
        assert WEIGHT_CASTS in set(measured.training_us) - set(measured.serving_us)
        assert set(measured.why_not) == set(WAYS) - set(measured.training_us)
        assert measured.why_not["fbgemm.rowwise_fast"].startswith(
            "failed: KernelUnavailable: kernel fbgemm.rowwise_fast cannot run"
        )

    def test_casts_that_cannot_run_are_told(self) -> None:
        measured = measure_casts(40, 48, CPU)
        assert set(measured.warm_us) == {COPY, COMPILED}
        assert measured.bytes == {COPY: 40 * 48 * 4, COMPILED: 40 * 48 * 3}
        assert measured.why_not[FBGEMM] == "needs an NVIDIA GPU"
        assert {"rowwise both", BY_ROWS} <= set(measured.why_not)


def test_what_travels_between_processes_can() -> None:
    prepare = pickle.loads(pickle.dumps(partial(prepare_block, device=CPU, ways=(BASELINE,))))
    assert prepare.func is prepare_block
    assert pickle.loads(pickle.dumps(measure_block)) is measure_block
    measured = BlockMeasurement(SITE, {BASELINE: 1.0}, {BASELINE: 2.0}, {}, {FUSED: "not here"})
    assert pickle.loads(pickle.dumps(measured)) == measured


def _pretend(calls: dict[str, object]) -> dict[str, object]:
    from loka.measure.timing import Timing

    return {name: Timing(10.0, 9.0, 11.0, 3) for name in calls}


def test_limits_are_flops_or_bytes() -> None:
    small, large = SiteShape(2048, 256, 768), SiteShape(12288, 4096, 4096)
    serving, training = limits_us(small, "NVIDIA H200")
    assert serving == pytest.approx((2048 * 256 + 768 * 256 + 2048 * 768) / 4.8e6)  # bytes, at 4.8 TB/s
    assert limits_us(large, "NVIDIA H200")[0] == pytest.approx(2 * 12288 * 4096 * 4096 / 1979e6)  # flops, at 1,979 TFLOP/s
    assert training == pytest.approx((4 * 2048 * 256 + 8 * 768 * 256 + 10 * 2048 * 768) / 4.8e6)  # all bytes, kernel by kernel
    assert limits_us(small, "some other GPU") == (None, None)


def test_tables_hold_means_and_leasts() -> None:
    rows = [
        BlockMeasurement(
            site,
            {BASELINE: 40.0, FUSED: us},
            {BASELINE: 100.0, FUSED: 50.0, WEIGHT_CASTS: 3.0},
            {BASELINE: 2 << 20, ALONE: 1 << 20},
            {"torchao.rowwise": "not installed"},
            serving_limit_us=5.0,
        )
        for site, us in zip(BENCHMARK_SHAPES, (10.0, 40.0), strict=False)
    ]
    text = block_tables(rows)
    assert "| 2048x256x768 | 40.0 | 4.00 | 8.00 |" in text
    assert "| **geometric mean** |  | 2.00 | 8.00 |" in text
    assert "| **least** |  | 1.00 | 8.00 |" in text
    assert "| **least** |  | 2.00 | – |" in text
    assert "| 2048x256x768 | 2.0 | 1.0 |" in text
    assert "3.0 to 3.0 µs a step" in text
    assert "- torchao.rowwise: not installed" in text


def test_cast_tables_compare_with_fbgemm_and_a_copy() -> None:
    rows, cols = 8192, 2048
    times = {COPY: 20.0, FBGEMM: 16.0, "rowwise plain": 10.0}
    sizes = {COPY: 4 * rows * cols, FBGEMM: 3 * rows * cols, "rowwise plain": 3 * rows * cols}
    smaller = {name: size // 4 for name, size in sizes.items()}  # 8 MiB: a copy moves 16
    text = cast_tables(
        [CastMeasurement(rows, cols, times, times, sizes), CastMeasurement(rows, cols // 4, times, times, smaller)]
    )
    assert "| rowwise plain | 1.60 | 2.00 |" in text
    assert "| 8192×2048 | 100 | 94 | 150 |" in text
    assert "| 8192×512 | 100 |" not in text
