"""The words: roles and their axes, recipes, registries, files, results."""

import errno
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch

import loka
from loka.core.environment import Environment, current_command, current_environment
from loka.core.errors import InvalidFile, InvalidInput, UnknownName
from loka.core.files import atomic_path, atomic_write, file_in, require_folder
from loka.core.gemm import SOURCES, Device, GemmProblem, Role, SiteShape, TensorName, by_frequency, stand_in
from loka.core.recipe import Accumulation, Format, Recipe, Scaling
from loka.core.registry import Registry
from loka.core.results import GatheredResults, markdown_table, write_results
from loka.core.survey import Ceiling

CPU = Device("cpu", "some cpu")


@pytest.mark.parametrize("role", list(Role))
def test_sources_and_axes_of_a_role_are_the_gradients_of_linear(role: Role) -> None:
    """Torch's own autograd is the reference: y, dx and dw of F.linear, each as a·bᵀ of the sources that SOURCES names."""
    site = SiteShape(m=5, k=3, n=4)
    x, w = torch.randn(5, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    dy = torch.randn(5, 4)
    y = torch.nn.functional.linear(x, w)
    y.backward(dy)
    stored = {TensorName.X: x, TensorName.DY: dy, TensorName.W: w}
    a, b = (stored[s.tensor].t() if s.transposed else stored[s.tensor] for s in SOURCES[role])
    problem = GemmProblem.of(role, site, Format.FP32, CPU)
    assert (tuple(a.shape), tuple(b.shape)) == ((problem.m, problem.k), (problem.n, problem.k))
    torch.testing.assert_close(a @ b.t(), {Role.FPROP: y, Role.DGRAD: x.grad, Role.WGRAD: w.grad}[role])


def wrong_kinds() -> dict[str, Callable[[], object]]:
    model = torch.nn.Linear(4, 4)
    return {
        "loka.Record.load": lambda: loka.measure("run"),
        "the record must be a Record, got NoneType": lambda: loka.Guard(model, None),
        "loka.Survey.load": lambda: loka.make_plan("run"),
        "loka.Plan.load": lambda: loka.apply_plan(model, "run"),
        "the plan must be a Plan": lambda: loka.check_plan(model, None, [], loss=lambda model, batch: model(batch)),
        "the model must be a Module": lambda: loka.Probe(None),
        "got NoneType: give the model itself": lambda: loka.apply_mods(None),
        "every must be a whole number": lambda: loka.Probe(model, every=1.5),
        "a run is named by the path of its folder, got None": lambda: loka.Plan.load(None),
        "memory_budget must be a whole number, at least 1, got '1GB'": lambda: loka.Probe(model, memory_budget="1GB"),
    }


@pytest.mark.parametrize("message", wrong_kinds())
def test_what_is_of_another_kind_is_told_at_the_door(message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        wrong_kinds()[message]()


def test_a_folder_that_cannot_be_written_to_is_named_and_not_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "mkdir", read_only)
    monkeypatch.setattr(os, "open", read_only)
    for name in ("plan.json", "runs/plan.json"):
        with pytest.raises(InvalidInput, match=rf"{tmp_path} cannot be written to \(Read-only file system\): name another"):
            atomic_write(tmp_path / name, "{}")


def read_only(path: str, *_: int) -> None:
    """Root may write anywhere."""
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)


def test_recipes_read_as_engineers_say_them() -> None:
    e4m3 = (Format.E4M3, Scaling.ROWWISE)
    assert str(Recipe(*e4m3, *e4m3)) == "e4m3 rowwise"
    assert str(Recipe(Format.E5M2, Scaling.ROWWISE, *e4m3, Accumulation.FAST)) == "e5m2·e4m3 rowwise fast"
    assert str(Recipe(Format.BF16, Scaling.NONE, Format.BF16, Scaling.NONE)) == "bf16"


class TestRegistry:
    def test_unknown_name_lists_the_known_and_suggests(self) -> None:
        registry: Registry[int] = Registry("fruit")
        registry.add("apple", 1)
        registry.add("pear", 2)
        with pytest.raises(UnknownName) as failure:
            registry.get("appel")
        assert str(failure.value) == "no fruit is called 'appel'. Did you mean 'apple'? Known: apple, pear"

    def test_a_name_is_taken_once(self) -> None:
        registry: Registry[int] = Registry("fruit")
        registry.add("apple", 1)
        with pytest.raises(ValueError, match="fruit 'apple' is registered twice"):
            registry.add("apple", 2)
        elsewhere = {"registry": registry, "__name__": "of_no_file"}  # a notebook, a worker: no module that was imported
        exec("registry.add('pear', 1)", elsewhere)
        with pytest.raises(ValueError, match="fruit 'pear' is registered twice"):
            exec("registry.add('pear', 2)", elsewhere)

    def test_a_package_is_read_once_and_only_when_asked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        package = tmp_path / "fruits"
        package.mkdir()
        (package / "__init__.py").write_text("from loka.core.registry import Registry\nFRUITS = Registry('fruit', 'fruits')\n")
        for name in ("fig", "plum"):
            (package / f"{name}.py").write_text(f"import fruits\nfruits.FRUITS.add('{name}', 3)\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        registry: Registry[int] = importlib.import_module("fruits").FRUITS
        assert not {"fruits.fig", "fruits.plum"} & set(sys.modules)
        assert registry.names() == ["fig", "plum"]
        assert "fig" in registry  # and nothing is registered twice
        assert len(registry) == 2

    def test_who_asks_while_a_package_is_read_waits_for_all_of_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = tmp_path / "berries"
        package.mkdir()
        (package / "__init__.py").write_text(
            "from loka.core.registry import Registry\nBERRIES = Registry('berry', 'berries')\n"
        )
        for name in ("bilberry", "raspberry"):
            text = f"import time, berries\nberries.BERRIES.add('{name}', 3)\ntime.sleep(0.2)\n"
            (package / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        registry: Registry[int] = importlib.import_module("berries").BERRIES
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda _: registry.names(), range(2)))
        assert found == [["bilberry", "raspberry"]] * 2

    def test_a_package_that_could_not_be_read_is_read_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        package = tmp_path / "nuts"
        package.mkdir()
        (package / "__init__.py").write_text(
            "from loka.core.registry import Registry\n"
            "NUTS, CRACKED, is_ready = Registry('nut', 'nuts'), Registry('cracked nut'), False\n"
        )
        (package / "acorn.py").write_text(
            "import nuts\n"
            "nuts.NUTS.add('acorn', 1)\n"
            "nuts.CRACKED.add('acorn', 1)\n"
            "if not nuts.is_ready:\n    raise ZeroDivisionError\n"
        )
        (package / "walnut.py").write_text("import nuts\nnuts.NUTS.add('walnut', 2)\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        nuts = importlib.import_module("nuts")
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                nuts.NUTS.names()
        nuts.is_ready = True
        assert nuts.NUTS.names() == ["acorn", "walnut"]
        assert nuts.CRACKED.names() == ["acorn"]

    def test_what_a_failing_module_imported_and_what_others_added_meanwhile_stays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = tmp_path / "herbs"
        package.mkdir()
        (package / "__init__.py").write_text(
            "from loka.core.registry import Registry\n"
            "HERBS, OTHERS, is_ready = Registry('herb', 'herbs'), Registry('other herb'), False\n"
        )
        (package / "basil.py").write_text(
            "import herbs, herbs.thyme\nherbs.HERBS.add('basil', 1)\nherbs.OTHERS.add('mine', 1)\n"
            "if not herbs.is_ready:\n    herbs.by_another()\n    raise ZeroDivisionError\n"
        )
        (package / "thyme.py").write_text("import herbs\nherbs.HERBS.add('thyme', 1)\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        herbs = importlib.import_module("herbs")
        herbs.by_another = lambda: herbs.OTHERS.add("another's", 1)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                herbs.HERBS.names()
            herbs.by_another = lambda: None
        herbs.is_ready = True
        assert herbs.HERBS.names() == ["basil", "thyme"]
        assert herbs.OTHERS.names() == ["another's", "mine"]
        with pytest.raises(ValueError, match="herb 'basil' is registered twice"):
            herbs.HERBS.add("basil", 2)


class TestAtomicFiles:
    def test_a_failed_write_leaves_the_old_file_and_nothing_else(self, tmp_path: Path) -> None:
        target = tmp_path / "plan.json"
        atomic_write(target, "old")

        def fail_halfway() -> None:
            with atomic_path(target) as path:
                path.write_text("half")
                raise RuntimeError

        with pytest.raises(RuntimeError):
            fail_halfway()
        assert target.read_text() == "old"
        assert os.listdir(tmp_path) == ["plan.json"]

    def test_a_killed_write_leaves_the_old_file(self, tmp_path: Path) -> None:
        target = tmp_path / "plan.json"
        atomic_write(target, b"old")
        script = (
            "import os, signal, sys; from loka.core.files import atomic_path\n"
            "with atomic_path(sys.argv[1]) as path:\n"
            "    path.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        done = subprocess.run([sys.executable, "-c", script, target], check=False)
        assert done.returncode == -9
        assert target.read_bytes() == b"old"

    def test_makes_folders_and_follows_the_umask(self, tmp_path: Path) -> None:
        before = os.umask(0o027)
        try:
            atomic_write(tmp_path / "a" / "b.json", "x")
        finally:
            os.umask(before)
        assert (tmp_path / "a" / "b.json").stat().st_mode & 0o777 == 0o640


def test_a_folder_that_cannot_be_written_to_is_refused_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_folder(tmp_path / "not" / "yet")
    assert not (tmp_path / "not").exists()
    (tmp_path / "file").write_text("")
    for path in ("file", "file/run"):
        with pytest.raises(InvalidInput, match=r"/file is a file: name a folder"):
            require_folder(tmp_path / path)
    monkeypatch.setattr(os, "mkdir", read_only)
    with pytest.raises(InvalidInput, match=r"cannot be written to \(Read-only file system\): name another folder"):
        require_folder(tmp_path / "run")


class TestResults:
    environment = Environment("NVIDIA H200 (sm_90)", "3.12.3", "0.1.0", {"torch": "2.11.0"}, "13.0", "2026-11-15")

    def test_named_by_hardware_and_date(self, tmp_path: Path) -> None:
        table = markdown_table(["kernel", "µs"], [["torch.bf16", "3.1"]])
        json_path, markdown_path = write_results(tmp_path, "gemm", self.environment, "loka bench gemm", [{"us": 3.1}], table)
        assert json_path.name == "nvidia-h200-2026-11-15-gemm.json"
        document = msgspec.json.decode(json_path.read_bytes())
        assert (document["schema"], document["rows"]) == ("loka.results/1", [{"us": 3.1}])
        assert document["environment"]["libraries"] == {"torch": "2.11.0"}
        text = markdown_path.read_text()
        assert "| torch.bf16 | 3.1 |" in text
        assert "Made by `loka bench gemm`" in text

    def test_a_folder_that_is_none_is_told_before_the_work(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(InvalidInput, match="is a file: name a folder"):
            GatheredResults(tmp_path / "file", "quality", self.environment, "command")

    def test_gathered_rows_survive_an_interrupt(self, tmp_path: Path) -> None:
        first = GatheredResults(tmp_path, "quality", self.environment, "command")
        first.add("wukong/0", {"ne": 0.8})
        first.add("wukong/1", {"ne": 0.7})
        again = GatheredResults(tmp_path, "quality", self.environment, "command")
        assert {key: row["ne"] for key, row in again.rows.items()} == {"wukong/0": 0.8, "wukong/1": 0.7}
        again.add("wukong/1", {"ne": 0.6})
        elsewhere = GatheredResults("unused", "quality", self.environment, "command", path=again.json_path)
        assert elsewhere.rows["wukong/1"]["ne"] == 0.6
        assert elsewhere.write_markdown("a table").read_text().endswith("a table")

    def test_two_at_a_time_add_to_the_same_file(self, tmp_path: Path) -> None:
        one, other = (GatheredResults(tmp_path, "quality", self.environment, "command") for _ in range(2))
        one.add("wukong/0", {"ne": 0.8})
        other.add("wukong/1", {"ne": 0.7})
        one.add("wukong/2", {"ne": 0.6})
        found = GatheredResults(tmp_path, "quality", self.environment, "command")
        assert {key: row["ne"] for key, row in found.rows.items()} == {"wukong/0": 0.8, "wukong/1": 0.7, "wukong/2": 0.6}
        assert one.rows == found.rows

    def test_those_of_another_device_are_not_continued(self, tmp_path: Path) -> None:
        first = GatheredResults(tmp_path, "quality", self.environment, "command")
        first.add("a", {"x": 1})
        before, elsewhere = first.json_path.read_bytes(), msgspec.structs.replace(self.environment, device="another")
        with pytest.raises(
            InvalidFile, match=f"holds results of {re.escape(self.environment.device)}, and this is another: name"
        ):
            GatheredResults(tmp_path, "quality", elsewhere, "command", path=first.json_path)
        assert first.json_path.read_bytes() == before
        later = GatheredResults(tmp_path, "quality", self.another_day(), "command", path=first.json_path)
        assert set(later.rows) == {"a"}

    def another_day(self) -> Environment:
        return msgspec.structs.replace(self.environment, date="2031-01-01", libraries={"torch": "3.0"})

    @pytest.mark.parametrize(
        "content", [b"", b"{", b"[]", b'{"rows": [1]}', b'{"rows": [{}]}', b'{"rows": "\xff"}', b"[" * 100_000]
    )
    def test_a_foreign_results_file_is_refused_and_kept(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "foreign.json"
        path.write_bytes(content)
        with pytest.raises(InvalidFile, match=r"holds no gathered results .* move it away"):
            GatheredResults(tmp_path, "quality", self.environment, "command", path=path)
        assert path.read_bytes() == content

    @pytest.mark.parametrize("other", [{"schema": "loka.results/99"}, {"name": "model"}])
    def test_those_of_another_benchmark_or_schema_are_not_continued(self, tmp_path: Path, other: dict[str, str]) -> None:
        first = GatheredResults(tmp_path, "quality", self.environment, "command")
        first.add("a", {"x": 1})
        fields = msgspec.json.decode(first.json_path.read_bytes()) | other
        first.json_path.write_bytes(msgspec.json.encode(fields))
        with pytest.raises(InvalidFile, match="name another file"):
            GatheredResults(tmp_path, "quality", self.environment, "command")
        assert msgspec.json.decode(first.json_path.read_bytes()) == fields

    def test_a_command_names_no_folder_of_this_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.argv", ["/somewhere/bin/loka", "bench", "gemm", "--out", "/tmp/results"])
        assert current_command() == "loka bench gemm --out results"
        monkeypatch.setattr("sys.argv", ["/somewhere/benchmarks/train_quality.py", "--movielens", "../data/ml-1m"])
        assert current_command() == "python benchmarks/train_quality.py --movielens ml-1m"

    @pytest.mark.parametrize(
        ("device", "slug"),
        [
            ("Intel(R) Xeon(R) Processor @ 2.50GHz (x86_64, 2 threads)", "intel-xeon-x86-64-2-threads-2026-11-15"),
            (
                "Intel(R) Xeon(R) Processor @ 2.50GHz with VNNI (x86_64, 2 threads)",
                "intel-xeon-with-vnni-x86-64-2-threads-2026-11-15",
            ),
            ("AMD EPYC 7B13 with VNNI (x86_64, 8 threads)", "amd-epyc-7b13-with-vnni-x86-64-8-threads-2026-11-15"),
            ("NVIDIA H200 (sm_90)", "nvidia-h200-2026-11-15"),
        ],
    )
    def test_files_are_named_by_hardware_and_date(self, device: str, slug: str) -> None:
        assert Environment(device, "3.12.0", "0.1.0", {}, None, "2026-11-15").slug == slug

    def test_this_machine(self) -> None:
        environment = current_environment(CPU)
        assert environment.libraries["torch"].startswith("2.")
        assert environment.slug.endswith(environment.date)
        assert "(" not in environment.slug


def test_no_more_than_all_of_a_step_is_covered() -> None:
    """Parts that were timed apart may add up to more; a step that was not timed has none."""
    assert [Ceiling(*times).covered for times in ((10.0, 4.0), (10.0, 20.0), (0.0, 1.0))] == [0.4, 1.0, 0.0]


def test_a_table_has_as_many_columns_in_every_line() -> None:
    """Where the line below the header has another number of them, a reader of Markdown shows no table at all."""
    table = markdown_table(["kernel", "µs", "error"], [["torch.bf16", "3.1", "0"], ["torch.rowwise", "2.0", "0.08"]])
    assert [line.count("|") for line in table.splitlines()] == [4, 4, 4, 4]


def test_a_folder_may_be_called_like_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "of_plan.json"
    folder.mkdir()
    assert file_in(folder, "plan.json") == folder / "plan.json"
    assert file_in(folder / "other.json", "plan.json") == folder / "other.json"


def test_another_file_is_not_taken_for_the_folder_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(InvalidInput, match=r"notes.txt is a file, and no survey.json: name the folder of a run"):
        loka.Survey.load(tmp_path / "notes.txt")


def test_the_nearest_measured_rows_above_stand_in_or_the_largest() -> None:
    assert [stand_in(m, (512, 64, 128)) for m in (1, 64, 65, 500, 513)] == [64, 64, 128, 512, 512]


def test_rows_by_frequency_and_of_equally_frequent_ones_the_largest_first() -> None:
    assert by_frequency({100: 1.0, 2048: 2.0, 7: 0.5, 300: 1.0}) == [2048, 300, 100, 7]
