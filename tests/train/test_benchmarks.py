"""The benchmark scripts run, write what they say, and do not repeat what is there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *words: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def test_throughput_measures_each_cell_once(tmp_path):
    results = tmp_path / "results.json"
    words = ["--device", "cpu", "--models", "dlrm", "--presets", "tiny", "--batch-sizes", "64", "--results", str(results)]
    assert "dlrm/tiny/64 after" in run("train_throughput.py", *words)
    (row,) = json.loads(results.read_text())["rows"]
    assert abs(sum(row["shares"].values()) - 1) < 1e-9
    table = results.with_suffix(".md").read_text()
    assert f"| dlrm | tiny | 64 | {row['samples_per_s']:,.0f} |" in table
    assert str(tmp_path) not in table
    assert "after" not in run("train_throughput.py", *words)


def test_quality_trains_each_seed_once(tmp_path):
    line = "\t".join(["1", *["3"] * 13, *["a1b2c3d4"] * 26]) + "\n"
    (tmp_path / "rows.txt").write_text((line + "0" + line[1:]) * 100)
    words = ["--criteo", str(tmp_path / "rows.txt"), "--device", "cpu", "--models", "dlrm", "--seeds", "0", "1"]
    words += ["--results", str(tmp_path / "results.json")]
    assert "criteo/dlrm/1: log-loss" in run("train_quality.py", *words)
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["test"]["examples"] for row in rows] == [40, 40]
    mean = sum(row["test"]["log_loss"] for row in rows) / 2
    assert f"{mean:.4f} ±" in (tmp_path / "results.md").read_text()
    assert "log-loss 0" not in run("train_quality.py", *words)
