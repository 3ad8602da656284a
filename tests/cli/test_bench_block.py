"""``loka bench block`` and ``loka bench casts`` without the GPU they are about: what they ask for, write down and refuse."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loka.cli import bench_block
from loka.cli.shapes import BENCHMARK_LAYERS, BENCHMARK_ROWS
from loka.measure.block_bench import BlockMeasurement
from loka.measure.block_ways import BASELINE, FUSED
from loka.measure.cast_bench import COPY, CastMeasurement


@pytest.mark.skipif(torch.cuda.is_available(), reason="refuses only where there is no GPU")
@pytest.mark.parametrize("command", ["block", "casts"])
def test_refused_on_a_cpu_with_the_reason(command: str) -> None:
    done = subprocess.run([sys.executable, "-m", "loka", "bench", command], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "loka: this measures our Triton kernels, and on cpu they cannot run: needs an NVIDIA GPU\n"


@pytest.fixture
def gpu_in_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(bench_block, "_required_gpu", lambda _: torch.device("cpu"))
    return tmp_path


def test_casts_are_of_the_benchmarks_rows_and_widths(gpu_in_name: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(rows: int, cols: int, _: torch.device) -> CastMeasurement:
        asked.append((rows, cols))
        return CastMeasurement(rows, cols, {COPY: 1.0}, {COPY: 1.0}, {COPY: 4 * rows * cols})

    monkeypatch.setattr("loka.measure.cast_bench.measure_casts", measure)
    bench_block.casts(out=str(gpu_in_name))
    assert asked == [(rows, cols) for rows in BENCHMARK_ROWS for cols in sorted({k for k, _ in BENCHMARK_LAYERS})]
    (path,) = gpu_in_name.glob("*casts.json")
    assert [row["key"] for row in json.loads(path.read_text())["rows"]] == [f"{rows}x{cols}" for rows, cols in asked]


def test_a_block_of_which_nothing_was_measured_is_told_and_not_written(
    gpu_in_name: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def measure(sites, *_, **__):  # type: ignore[no-untyped-def]
        whole = BlockMeasurement(sites[0], {BASELINE: 2.0, FUSED: 1.0}, {BASELINE: 3.0, FUSED: 1.0}, {})
        yield whole
        yield BlockMeasurement(sites[1], {}, {}, {}, {BASELINE: "out of memory"})

    monkeypatch.setattr("loka.measure.block_bench.measure_blocks", measure)
    bench_block.block(shapes=["16x32x48", "64x32x48"], out=str(gpu_in_name))
    (path,) = gpu_in_name.glob("*block.json")
    assert [row["key"] for row in json.loads(path.read_text())["rows"]] == ["16x32x48"]
    said = capsys.readouterr().out
    assert "16x32x48: serving 2.0 µs" in said
    assert "64x32x48: nothing could be measured, out of memory" in said
