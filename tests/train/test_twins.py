"""Two models beside each other: their losses on the same examples, and the time of a call by kind."""

import time
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from loka.core.comparison import WAITING
from loka.core.plan import Goal
from loka.data.batch import Batch
from loka.train.config import Precision
from loka.train.step_profile import TimedKernel
from loka.train.twins import Twin, compare_quality, compare_times, split_by_kind, time_in_a_row_us

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


def test_times_are_taken_in_turns_and_the_speed_up_is_the_mean_of_their_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two rounds compile and allocate."""
    clock_us, order = 0, []
    durations_us = {"high": iter([9000, 800, 300, 500, 400]), "planned": iter([9000, 9000, 100, 100, 100])}

    def run(name: str) -> None:
        nonlocal clock_us
        order.append(name)
        clock_us += next(durations_us[name])

    monkeypatch.setattr(time, "perf_counter", lambda: clock_us * 1e-6)
    monkeypatch.setattr("loka.train.twins._by_kind", lambda twin, total_us, compiled: {"GEMM": total_us})
    high, planned = (Twin(nn.Linear(1, 1), partial(run, name)) for name in ("high", "planned"))  # type: ignore[arg-type]
    pair = compare_times(Goal.TRAINING, 64, high, planned, rounds=3)
    assert order == ["high", "planned"] * 5
    assert (pair.high_us, pair.planned_us, pair.batch_size) == (pytest.approx(400), pytest.approx(100), 64)
    assert (pair.speedup.mean, pair.speedup.n) == (pytest.approx((3 + 5 + 4) / 3), 3)
    assert (pair.high_by_kind, pair.planned_by_kind) == ({"GEMM": pair.high_us}, {"GEMM": pair.planned_us})


class Logit(nn.Module):
    """Says the first dense feature, ``scale`` times."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, batch: Batch) -> Tensor:
        return self.scale * batch.dense_BD[:, 0]


def test_quality_is_of_all_examples_and_its_interval_of_batches_that_are_whole() -> None:
    """A last batch that is smaller weighs in the losses as its examples do, and in the spread of batches not at all."""
    torch.manual_seed(0)
    whole = Batch(2 * torch.randn(80, 1), torch.zeros(80, 1, dtype=torch.int64), torch.rand(80).round())
    batches = [whole[:32], whole[32:64], whole[64:]]
    pair = compare_quality(Goal.SERVING, Logit(1.0), Logit(1.5), batches, Precision.FP32)  # type: ignore[arg-type]

    def losses(scale: float) -> Tensor:
        return binary_cross_entropy_with_logits(scale * whole.dense_BD[:, 0].double(), whole.label_B.double(), reduction="none")

    high, planned = losses(1.0), losses(1.5)
    assert (pair.examples, pair.high_log_loss, pair.planned_log_loss) == (
        80, pytest.approx(float(high.mean())), pytest.approx(float(planned.mean())),
    )  # fmt: skip
    first, second = ((planned - high)[:64] / high.mean()).reshape(2, 32).mean(1).tolist()
    assert (pair.change.mean, pair.change.n) == (pytest.approx((first + second) / 2), 2)
