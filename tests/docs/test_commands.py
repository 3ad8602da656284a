"""Every command in README and docs is understood by the command line as it is, and run, the large ones made smaller."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import loka
from loka.cli import app
from loka.core.errors import InvalidInput

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
SMALL_TRAINING = "--preset tiny --steps 2 --batch-size 64 --device cpu --data-options.test_examples 64 --out trained"

# What is run in its place, where the command as documented takes long or writes elsewhere.
SMALLER = {
    "loka kernels": "loka kernels --device cpu",
    "loka kernels --shape 2048x1024x1024": "loka kernels --shape 32x64x48 --device cpu",
    "loka bench gemm": "loka bench gemm --shapes 32x64x48 --kernels onednn.int8 --device cpu --out results",
    "loka train --model wukong --preset small --data synthetic --steps 500": f"loka train --model wukong {SMALL_TRAINING}",
    "loka plan run --max-error 0.1 --site dense_part.top.0": "loka plan run --max-error 0.1 --site 0",
    "loka measure run": "loka measure run --kernels onednn.int8 --device cpu",
}
# Run elsewhere, or asking for what is not here.
NOT_HERE = {
    "make demo": "sets up an environment; test_demo.py runs what it calls",
    "make test": "is what runs this",
    "loka train --model dlrm --data movielens --data-path ml-1m": "real data stays outside",
    "loka train --model dcnv2 --data criteo --data-path train.txt --data-options.dense raw --skip-bad-rows": "real data",
    "loka train --model wukong --plan run --steps 500": "needs a plan of that model; tests/cli makes one",
    "loka probe wukong-small@synthetic -o run": "probes a model of ours; tests/cli does it with a smaller one",
    "loka measure run --kernels torch.rowwise triton.rowwise --device cuda": "needs an NVIDIA GPU",
}


def documented(page: Path) -> Iterator[str]:
    """Commands that stand on a line of their own in a block of code, without the remark behind them."""
    for line in page.read_text().splitlines():
        found = re.match(r"(?: {4}|\t)?((?:loka|make|python) \S.*)", line)
        if found:
            yield re.split(r"\s{2,}#|\s+#\s", found[1])[0].strip()


def commands() -> list[tuple[str, str]]:
    return [(page.name, command) for page in PAGES for command in documented(page)]


def understand(words: list[str]) -> None:
    """Bind the words to the command's function, as running it would; a name or option it does not have raises."""
    app.parse_args(words, exit_on_error=False, print_error=False)


@pytest.mark.parametrize(("page", "command"), [pair for pair in commands() if pair[1].startswith("loka ")])
def test_the_command_line_understands_it(page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        understand(shlex.split(command)[1:])
    except InvalidInput as missing:
        assert re.search("there is (nothing|no plan) at", str(missing))  # noqa: PT017  (what is named and not here)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_inline_commands_exist(page: Path) -> None:
    for command in re.findall(r"`loka ([a-z][^`]*)`", page.read_text()):
        name = command.split()[0]
        assert name in app, f"{page.name} speaks of `loka {command}`, but there is no loka {name}"


def test_every_command_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One after another in one folder, as a reader would."""
    example = re.search(r"```python\n# my_model.py\n(.*?)```", (ROOT / "docs/bring-your-own-model.md").read_text(), re.DOTALL)
    assert example
    (tmp_path / "my_model.py").write_text(example[1])
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    done = set()
    for page, command in sorted(commands(), key=lambda pair: pair[0] != "bring-your-own-model.md"):  # it makes the run
        if command in NOT_HERE or command in done or command.startswith("python benchmarks/"):
            continue
        done.add(command)
        words = shlex.split(SMALLER.get(command, command))
        if words[0] == "python":
            continue  # test_examples.py
        app(words[1:], exit_on_error=False, result_action="return_value")
        assert capsys.readouterr().out, f"{page}: {command} says nothing"
    assert (tmp_path / "run" / "report.html").exists()


def test_the_example_runs(tmp_path: Path) -> None:
    script = ROOT / "examples" / "own_model.py"
    done = subprocess.run([sys.executable, script, str(tmp_path / "run")], capture_output=True, text=True, check=True)
    assert "sites in low precision" in done.stdout
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {
        "record.safetensors",
        "survey.json",
        "plan.json",
        "report.html",
    }


def headings(page: Path) -> set[str]:
    """As links name them: lower case, without punctuation, spaces as hyphens."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in found}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target, heading in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            if target.startswith("http"):
                continue
            there = page.parent / target if target else page
            assert there.exists(), f"{page.name} links to {target}"
            assert not heading or heading in headings(there), f"{page.name} links to {target}#{heading}"


def test_every_public_name_is_explained() -> None:
    page = (ROOT / "docs/how-it-works.md").read_text()
    names = re.search(r"^\*\*Names\.\*\*.*?\n\n(.*?)\n\n", page, re.DOTALL | re.MULTILINE)
    assert names
    explained = [name for row in names[1].splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(explained) == sorted(set(loka.__all__) - {"__version__"})


def test_make_demo_runs_the_demo() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^demo: install\n\t\$\(BIN\)/loka demo$", makefile, re.MULTILINE)
