"""``loka kernels`` and ``loka bench gemm`` as a user runs them, and what importing costs."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from int8_here import needs

from loka.cli import app
from loka.core.gemm import SiteShape
from loka.measure import gemm as gemm_module

Loka = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("statement", ["import loka", "import loka.cli", "import loka.core.gemm, loka.core.results"])
def test_importing_loads_neither_torch_nor_numpy(statement: str) -> None:
    probe = f"{statement}; import sys; sys.exit(bool({{'torch', 'numpy', 'triton'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", probe], check=True)


@pytest.mark.parametrize("arguments", [["--help"], ["kernels", "--help"], ["bench", "gemm", "--help"], ["--version"]])
def test_help_loads_no_torch(arguments: list[str]) -> None:
    probe = (
        "import sys\nfrom loka.cli import app\n"
        f"try:\n    app({arguments!r})\nexcept SystemExit as done:\n    assert not done.code\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_load_on_first_use() -> None:
    import loka as package

    assert set(package.__all__) <= set(dir(package))
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018


def test_type_checkers_see_every_public_name() -> None:
    """They do not run ``__getattr__``: a name that is not imported for them is an ``object`` that cannot be called."""
    import loka as package

    tree = ast.parse(Path(package.__file__).read_text())
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {(name.name, node.module) for node in checked.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert seen == set(package._HOMES.items())
    assert {name for name, _ in seen} | {"__version__"} == set(package.__all__)


def test_listing_loads_no_vendor_library() -> None:
    probe = (
        "import sys\nfrom loka.kernels.contract import KERNELS\nfrom loka.core.gemm import Device\n"
        "for _, kernel in KERNELS.items():\n    kernel.missing(Device('cuda', 'NVIDIA H200', (9, 0)))\n"
        "sys.exit(bool({'fbgemm_gpu', 'triton', 'torchao'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", probe], check=True)


def test_lists_every_kernel_or_says_why_not(loka: Loka) -> None:
    rows = msgspec.json.decode(loka("kernels", "--device", "cpu", "--json").stdout)["kernels"]
    assert {row["kernel"] for row in rows} >= {"torch.fp32", "torch.rowwise", "fbgemm.rowwise", "onednn.int8"}
    assert all(bool(row["roles"]) != bool(row["why_not"]) for row in rows)
    text = loka("kernels", "--device", "cpu").stdout
    assert "needs an NVIDIA GPU" in text
    assert all(row["kernel"] in text for row in rows)


def test_measures_at_a_shape(loka: Loka) -> None:
    rows = msgspec.json.decode(loka("kernels", "--device", "cpu", "--shape", "64x128x32", "--json").stdout)
    measured = {(row["kernel"], row["role"]): row for row in rows if not row.get("why_not")}
    assert 0.005 < measured["onednn.int8", "fprop"]["error"]["relative_rms"] < 0.02
    assert measured["torch.fp32", "wgrad"]["error"]["relative_rms"] < 1e-6
    assert all(row["whole"]["median_us"] > 0 for row in measured.values())
    assert {row["role"] for row in rows if row["kernel"] == "torch.bf16"} == {"fprop", "dgrad", "wgrad"}
    text = loka("kernels", "--device", "cpu", "--shape", "64x128x32").stdout
    assert "× torch.fp32" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernels", "--shape", "3x3"], "a shape is ROWSxINxOUT"),
        (["kernels", "--shape", "0x3x3"], "a shape is ROWSxINxOUT"),
        (["kernels", "--shape", "8x1000000x1000000"], "8x1000000x1000000 needs about 22,352 GiB, but only"),
        (["kernels", "--device", "tpu"], "no device is called 'tpu'"),
        (["kernels", "--device", "meta"], "LoKA runs on cpu and cuda devices"),
        (["bench", "gemm", "--kernels", "torch.roww"], "no kernel is called 'torch.roww'. Did you mean 'torch.rowwise'"),
    ],
)
def test_a_mistake_is_one_message_and_no_traceback(loka: Loka, arguments: list[str], message: str) -> None:
    assert message in loka(*arguments, code=1).stderr


def test_bench_gemm_writes_its_table(loka: Loka, tmp_path: Path) -> None:
    done = loka("bench", "gemm", "--shapes", "32x64x48", "--kernels", "onednn.int8", "--device", "cpu", "--out", str(tmp_path))
    (json_path,) = tmp_path.glob("*-gemm.json")
    document = msgspec.json.decode(json_path.read_bytes())
    assert {row["kernel"] for row in document["rows"]} == {"torch.fp32", "onednn.int8"}
    assert document["command"].startswith("loka bench gemm")
    text = json_path.with_suffix(".md").read_text()
    assert "| onednn.int8 | fprop | 1 |" in text
    assert "32x64x48" in text
    assert str(json_path) in done.stdout


@needs("onednn.int8_dynamic")
def test_bench_gemm_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    measured, measure_site = [], gemm_module.measure_site

    def measure(site: SiteShape, *args: object) -> object:
        if site.n == 16:
            raise KeyboardInterrupt
        measured.append((str(site), *args[1]))
        return measure_site(site, *args)

    monkeypatch.setattr(gemm_module, "measure_site", measure)
    bench = f"bench gemm --device cpu --out {tmp_path} --kernels"
    with pytest.raises(KeyboardInterrupt):
        app(f"{bench} onednn.int8 --shapes 8x32x8 8x32x16", exit_on_error=False)
    app(f"{bench} onednn.int8 --shapes 8x32x8 8x32x24", exit_on_error=False, result_action="return_value")
    (results,) = tmp_path.glob("*.json")
    results.write_text(re.sub(r'"sqnr_db":[^}]*', '"sqnr_db":null', results.read_text()))  # of a product without any error
    app(f"{bench} onednn.int8_dynamic --shapes 8x32x24", exit_on_error=False, result_action="return_value")
    both, dynamic = ("torch.fp32", "onednn.int8"), ("torch.fp32", "onednn.int8_dynamic")
    assert measured == [("8x32x8", *both), ("8x32x24", *both), ("8x32x24", *dynamic)]
    assert "| onednn.int8 | fprop | 2 |" in capsys.readouterr().out
    (table,) = tmp_path.glob("*.md")
    fprop, *_ = [line for line in table.read_text().splitlines() if line.startswith("| 8x32x8 |") and line.count("→") == 2]
    assert fprop.endswith("| – |")  # the third kernel is not there
