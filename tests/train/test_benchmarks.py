"""The benchmark scripts run, write what they say, and do not repeat what is there."""

import json
import math
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


def test_mods_quality_trains_each_variant_once(tmp_path):
    words = [
        "--device",
        "cpu",
        "--data",
        "synthetic",
        "--models",
        "dcnv2",
        "--preset",
        "tiny",
        "--steps",
        "2",
        "--batch-size",
        "64",
        "--seeds",
        "0",
        "1",
    ]
    words += ["--parallel", "2", "--results", str(tmp_path / "results.json")]
    assert "synthetic/dcnv2/tiny/2x64/all four/1: log-loss" in run("mods_quality.py", *words)
    rows = {row["key"]: row for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
    loss = {(row["variant"], row["seed"]): row["test"]["log_loss"] for row in rows.values() if "test" in row}
    assert {variant for variant, _ in loss} == {"none", "no_bias", "insert_norm", "all four"}
    changes = [100 * (loss["no_bias", seed] / loss["none", seed] - 1) for seed in (0, 1)]
    table = (tmp_path / "results.md").read_text()
    assert f"| {sum(changes) / 2:+.3f} % ± " in table
    assert "| hard_swish |  |  | the same model as none |" in table
    assert rows["speed/dcnv2/tiny/2048/training/none"]["speedup"] == 1
    assert "log-loss 0" not in run("mods_quality.py", *words)


def test_scaling_fits_a_slope(tmp_path):
    words = ["--device", "cpu", "--sites", "2", "4", "--widths", "16", "--results", str(tmp_path / "results.json")]
    output = run("scaling.py", *words)
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    times = {row["size"]: row["seconds"]["measure"] for row in rows if row["axis"] == "sites"}
    assert f"**{math.log2(times[4] / times[2]):.2f}**" in output  # through two points the line is exact


def test_fidelity_studies_each_case_once(tmp_path):
    words = ["--models", "dlrm", "--mods", "without", "--stages", "init", "--batches", "8", "--batch-size", "32"]
    words += ["--results", str(tmp_path / "results.json")]
    assert "synthetic/dlrm-tiny/plain/init: " in run("fidelity.py", *words)
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {"fprop", "dgrad", "wgrad"} == {option.split()[0] for option in rows[-1]["sites"]["top.0"]}
    table = (tmp_path / "results.md").read_text()
    assert "| synthetic/dlrm-tiny/plain/init |" in table
    assert "| correlated x and dy | wgrad |" in table
    assert "init: " not in run("fidelity.py", *words)
