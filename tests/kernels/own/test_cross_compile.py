"""Every kernel compiled for Hopper without a GPU: FP8 tensor cores and TMA are used, and nothing spills in the tiles chosen."""

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from compile_cases import CASES
from cross_compile import halved_pairs

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs the package triton", allow_module_level=True)


@cache
def compiled() -> dict[str, Any]:
    """All cases, in a process that compiles: this one may interpret."""
    script = Path(__file__).parents[1] / "cross_compile.py"
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, script], input=json.dumps(CASES), env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", [name for name in CASES if name != "promoted 128x256"])
def test_nothing_spills(name: str) -> None:
    assert compiled()[name]["spilled_bytes"] == 0


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("step of Adam")])
def test_steps_of_adam_read_and_write_by_fours(name: str) -> None:
    """Weight and averages, by every thread; and looking for infinities does not make single numbers of them."""
    instructions, case = compiled()[name]["instructions"], CASES[name]
    fours = case["constants"]["ROWS"] * case["constants"]["COLS"] // (4 * 32 * case["warps"])
    assert instructions["load 16 bytes"] >= 4 * fours
    assert instructions["store 16 bytes"] >= 3 * fours


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("amaxes of one tile")])
def test_amaxes_of_columns_stay_in_their_threads(name: str) -> None:
    """No warps meet in shared memory, but to store one number a column; nothing is loaded ahead for tiles that do not come."""
    assert compiled()[name]["shared_bytes"] <= 4 * CASES[name]["constants"]["COLS"]
    assert compiled()[name]["instructions"]["load 16 bytes"] > 0


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(", columns summed")])
def test_warps_do_not_meet_to_sum_columns(name: str) -> None:
    """At most once more than without: to store whole lines."""
    without = compiled()[name.removesuffix(", columns summed")]
    assert compiled()[name]["instructions"]["barrier"] <= without["instructions"]["barrier"] + 1


@pytest.mark.parametrize("name", CASES)
def test_all_wait_for_the_kernel_before_and_only_early_ones_read_or_write_first(name: str) -> None:
    """Of early ones: a tile of four loads, and what needs no amaxes writes too."""
    early, before = name.endswith(", early"), compiled()[name]["before_waiting"]
    needs_amaxes = "tensorwise" in name or "rowwise" in name
    assert compiled()[name]["instructions"]["wait"] == 1
    assert before["loads"] >= 4 if early else before["loads"] == 0
    assert (before["stores"] > 0) == (early and not needs_amaxes)
    if early and needs_amaxes:
        assert compiled()[name]["instructions"]["load"] > before["loads"]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["constants"].get("MORE")])
def test_what_follows_may_start_only_when_the_matrix_is_there(name: str) -> None:
    """It reads the matrix without waiting, and relies on this one to have waited."""
    assert compiled()[name]["instructions"]["lets next start"] == 1
    assert compiled()[name]["before_waiting"]["lets next start"] == 0


def test_amaxes_of_several_tiles_are_loaded_ahead() -> None:
    assert compiled()["amaxes"]["shared_bytes"] > 32 << 10
    one, several = compiled()["amax of all, one tile"], compiled()["amax of all"]
    assert one["shared_bytes"] <= 1 << 10 < 32 << 10 < several["shared_bytes"]
    assert one["registers"] < 0.6 * several["registers"]


@pytest.mark.parametrize("name", CASES)
def test_shared_memory_suffices(name: str) -> None:
    """Of a multiprocessor, 1 KiB of which each program takes for itself; for two where tiles are made for several."""
    programs = 2 if "gemm" in name and " by " in name else 1
    assert programs * (compiled()[name]["shared_bytes"] + (1 << 10)) <= 228 << 10


def test_the_check_sees_spills() -> None:
    assert compiled()["promoted 128x256"]["spilled_bytes"] > 0


@pytest.mark.parametrize("name", CASES)
def test_no_pair_of_codes_is_both_kept_and_taken_apart(name: str) -> None:
    """See ``codes.FOUR_TO_E4M3``: ptxas 12.8 makes nonsense of the halves."""
    assert compiled()[name]["halved_pairs"] == 0


def test_the_check_sees_halved_pairs() -> None:
    cvt = "cvt.rn.satfinite.e4m3x2.f32 {pair}, %r2, %r1;\n"
    kept, halved = "mov.b32 %r9, {{{pair}, %rs7}};\n", "shr.u16 %rs5, {pair}, 8;\n"
    both = (cvt + kept + halved).format(pair="%rs1")
    either = (cvt + kept).format(pair="%rs2") + (cvt + halved).format(pair="%rs3")
    assert halved_pairs(both + either) == {"%rs1"}


@pytest.mark.parametrize("name", [name for name in CASES if "desc" in str(CASES[name])])
def test_products_run_on_fp8_tensor_cores_from_tma(name: str) -> None:
    instructions = compiled()[name]["instructions"]
    assert instructions["wgmma int8" if name.startswith("int8") else "wgmma e4m3"] > 0
    assert instructions["tma load"] > 0


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("cast", "block", "norm", "scales"))])
def test_memory_moves_sixteen_bytes_at_a_time(name: str) -> None:
    instructions = compiled()[name]["instructions"]
    assert instructions["load 16 bytes"] + instructions["tma load"] > 0
    assert instructions["store 16 bytes"] > 0


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("gradient")])
def test_gradients_move_no_tile_between_threads(name: str) -> None:
    """Loads of codes and of bf16, and the store, agree on which thread holds what: shared memory serves reductions alone."""
    instructions = compiled()[name]["instructions"]
    assert instructions["load 16 bytes"] > 0
    assert instructions["load 1 byte"] == instructions["store 1 byte"] == 0
    assert compiled()[name]["moved_tiles"] == 0
