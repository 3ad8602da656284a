"""Time of a call by kind: a GPU's kernels take their own time, and what is left it waits."""

import time

import pytest

from loka.core.comparison import WAITING
from loka.train.step_profile import TimedKernel
from loka.train.twins import split_by_kind, time_in_a_row_us

KERNELS = [
    TimedKernel("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", ("aten::mm", "CompiledFunction"), 600.0),
    TimedKernel("cast_kernel", ("Optimizer.step#AdamW.step",), 150.0),
    TimedKernel("multi_tensor_apply_kernel", ("aten::_fused_adamw_", "Optimizer.step#AdamW.step"), 50.0),
]


def test_a_gpu_that_waits_is_told_beside_its_kernels_own_times() -> None:
    split = split_by_kind(KERNELS, 1000.0, compiled=True, on_gpu=True)
    assert split == pytest.approx({"GEMM": 600.0, "cast": 150.0, "optimizer": 50.0, WAITING: 200.0})
    assert list(split)[-1] == WAITING


def test_kernels_that_took_longer_under_the_profiler_than_the_call_are_scaled_to_it() -> None:
    split = split_by_kind(KERNELS, 400.0, compiled=True, on_gpu=True)
    assert split == pytest.approx({"GEMM": 300.0, "cast": 75.0, "optimizer": 25.0})


@pytest.mark.parametrize("total_us", [400.0, 1600.0])
def test_operators_of_the_cpu_share_the_whole_call(total_us: float) -> None:
    operators = [
        TimedKernel("aten::addmm", ("aten::linear", "loka.model"), 600.0),
        TimedKernel("aten::silu", ("loka.model",), 200.0),
    ]
    split = split_by_kind(operators, total_us, compiled=False, on_gpu=False)
    assert split == pytest.approx({"GEMM": 0.75 * total_us, "norm, activation": 0.25 * total_us})


def test_a_device_is_waited_for_around_the_calls_and_not_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call queues 100 µs of work in 10, and the wait at the end is for all of it."""
    done: list[str] = []
    clock_us, queued_us = 0, 70  # something is still running: it is waited for, and not counted

    def run() -> None:
        nonlocal clock_us, queued_us
        done.append("run")
        clock_us, queued_us = clock_us + 10, queued_us + 90

    def wait() -> None:
        nonlocal clock_us, queued_us
        done.append("wait")
        clock_us, queued_us = clock_us + queued_us, 0

    monkeypatch.setattr(time, "perf_counter", lambda: clock_us * 1e-6)
    assert time_in_a_row_us(run, 4, wait) == pytest.approx(100)
    assert done == ["wait", *["run"] * 4, "wait"]
