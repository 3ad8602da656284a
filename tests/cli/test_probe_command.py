"""``loka probe`` as a user calls it: a workload by name or their own, from training to record; a message where it fails."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loka.cli import app
from loka.core.errors import InvalidInput, UnknownName
from loka.core.record import Record
from loka.train.workloads import built_in_names, open_workload

OWN = """
import torch
import loka

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.SiLU(), torch.nn.Linear(16, 1))
batches = [(x, x.sum(1, keepdim=True)) for x in torch.randn(5, 32, 8)]

def loss(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()

def workload():
    return loka.Workload(model, batches, loss)

def deeper():
    return loka.Workload(torch.nn.Sequential(torch.nn.Linear(8, 8), *model), batches, loss)

def stuck():
    return loka.Workload(model, [(torch.full((128, 8), 3.0), torch.zeros(128, 1))], loss)

def no_workload():
    return model, batches, loss

def of_rows():
    return loka.Workload(model, batches, lambda model, batch: model(batch[0]))

def of_constants():
    return loka.Workload(model, batches, lambda model, batch: torch.zeros(()))

def of_nan():
    return loka.Workload(model, batches, lambda model, batch: model(batch[0]).mean() * torch.nan)

def of_an_iterator():
    return loka.Workload(model, iter(batches[:2]), loss)

def of_nothing():
    return loka.Workload(model, [], loss)

def of_no_module():
    return loka.Workload(model.forward, batches, loss)

def interrupted(by=KeyboardInterrupt):
    def stop(model, batch):
        stop.calls += 1
        if stop.calls > 3:
            raise by
        return loss(model, batch)
    stop.calls = 0
    return loka.Workload(model, batches, stop)

def told_to_stop():
    import signal
    told = interrupted()
    def stop(model, batch):
        try:
            return told.loss(model, batch)
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
    return loka.Workload(model, batches, stop)

def of_no_loss():
    return loka.Workload(model, batches, None)

def of_a_function():
    return loka.Workload(model, lambda: iter(batches), loss)

def loses_its_store():
    return interrupted(BrokenPipeError("the feature store hung up"))
"""


def run(words: str) -> None:
    app(words, exit_on_error=False, result_action="return_value")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that lies in the current folder."""
    (tmp_path / "own_workload.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    monkeypatch.delitem(sys.modules, "own_workload", raising=False)
    return "own_workload"


def test_a_workload_of_ours_becomes_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(f"probe wukong-tiny@synthetic -o {tmp_path} --steps 4 --every 2 --batch-size 64 --device cpu")
    record = Record.load(tmp_path)
    assert record.steps_seen == 4
    assert all(site.trains for site in record.sites.values())
    assert record.sites["dense_part.head"].is_head
    assert record.sites["dense_part.top.0"].norm_kind == "LayerNorm"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("memory of the Probe: ")
    assert [line.split()[0] for line in lines[1:3]] == ["1/2", "2/2"]
    printed = "\n".join(lines)
    assert f"{len(record.sites)} sites in fp32, after 4 steps" in printed
    assert lines[-1].endswith(f"Next: loka measure {tmp_path}")


def test_a_users_workload_is_found_in_the_current_folder_and_learns(own: str, tmp_path: Path) -> None:
    workload = open_workload(f"{own}:workload")
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True)
    before = workload.loss(workload.model, (x, y)).item()
    run(f"probe {own}:workload --steps 60 --every 20")
    assert workload.loss(workload.model, (x, y)).item() < 0.9 * before
    record = Record.load(tmp_path / "run")
    assert {name: (site.k, site.n, site.calls) for name, site in record.sites.items()} == {
        "0": (8, 16, {32: 1.0}),
        "3": (16, 1, {32: 1.0}),
    }


def test_mods_are_made_before_training(own: str) -> None:
    run(f"probe {own}:deeper --steps 2 --mods no_bias block_norm")
    sites = Record.load("run").sites
    assert sites["1"].norm_kind == "BlockNorm"
    assert {name: site.has_bias for name, site in sites.items()} == {"0": True, "1": False, "4": True}  # first and head keep it


def test_an_interrupt_keeps_what_was_learned(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(f"probe {own}:interrupted --every 1")
    assert stopped.value.code == 130
    assert Record.load("run").sites["0"].statistics["moments"].tensors["count"] > 32
    assert "stopped at step 4 of 200" in capsys.readouterr().out


def test_nor_does_a_second_interrupt_lose_it(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Record.save

    def interrupted_save(record: Record, out: Path) -> Path:
        signal.raise_signal(signal.SIGINT)
        return save(record, out)

    monkeypatch.setattr(Record, "save", interrupted_save)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as stopped:
            run(f"probe {own}:told_to_stop --every 1")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert stopped.value.code == 130
    assert Record.load("run").steps_seen == 4


def test_a_reader_who_has_enough_does_not_lose_what_was_learned(own: str) -> None:
    command = [sys.executable, "-m", "loka", "probe", f"{own}:workload", "--every", "1", "--steps", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert any(line.startswith("3/") for line in process.stdout)
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode != 0, errors) == (True, "")
    assert 3 <= Record.load("run").steps_seen < 100_000


def test_a_broken_pipe_of_the_workload_is_told(own: str) -> None:
    with pytest.raises(BrokenPipeError, match="the feature store hung up"):
        run(f"probe {own}:loses_its_store --every 1")
    assert Record.load("run").steps_seen == 4  # what was learned before is kept


def test_findings_are_printed_with_what_mends_them(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(f"probe {own}:stuck --steps 1")
    printed = " ".join(capsys.readouterr().out.split())
    assert "finding at 0: 8 of 8 features of x never change. Fix: center." in printed


def test_the_names_of_ours() -> None:
    assert {"wukong-small@synthetic", "dcnv2-tiny@criteo", "interformer-base@movielens"} <= set(built_in_names())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wukong-smal@synthetic", "Did you mean 'wukong-small@synthetic'"),
        ("nothing-like-it", "Ours are MODEL-SIZE@DATA"),
    ],
)
def test_a_typo_is_told(name: str, message: str) -> None:
    with pytest.raises(UnknownName, match=message):
        run(f"probe {name}")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("worklod", "Did you mean 'workload'"),
        ("no_workload", r"returned a tuple: it must return loka.Workload"),
        ("of_no_module", "is a method, not a torch.nn.Module"),
        ("of_no_loss", "is a NoneType: it must be a function of model and batch"),
        ("of_a_function", "are a function: give a list, a DataLoader"),
        ("of_rows", r"returned a tensor of shape \(32, 1\): it must be a scalar"),
        ("of_constants", "cannot be differentiated"),
        ("of_nan", "the loss of step 1 is nan"),
        ("of_nothing", "the workload's batches are empty"),
        ("workload --batch-size 9", "batch_size cannot be set for own_workload:workload"),
        ("workload --steps 0", "steps must be at least 1"),
        ("workload --every 0", "every must be a whole number, at least 1"),
        ("workload --mods no_bais", "no_bias"),
        ("workload --mods", "--mods takes the names of Mods, any of block_norm"),
    ],
)
def test_a_bad_workload_is_refused_with_a_reason(own: str, function: str, message: str) -> None:
    with pytest.raises((InvalidInput, UnknownName), match=message):
        run(f"probe {own}:{function}")
    assert not Path("run").exists()


def test_an_iterator_is_learned_from_to_its_end(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(f"probe {own}:of_an_iterator --every 1")
    assert "the batches ended after 2 of 200 steps, and cannot be iterated anew" in capsys.readouterr().out
    assert Record.load("run").steps_seen == 2


def test_a_file_in_the_place_of_the_run_is_told_before_training(own: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"own_workload.py is a file: name a folder"):
        run(f"probe {own}:of_rows -o {tmp_path}/own_workload.py")


def test_a_batch_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="batch_size is 0: it must be 1 or more"):
        run(f"probe wukong-tiny@synthetic -o {tmp_path} --batch-size 0 --device cpu")


def test_a_missing_module_and_one_that_imports_a_missing_one_are_told_apart(own: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"there is no module 'not_there.at_all'"):
        run("probe not_there.at_all:workload")
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere")
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        run("probe needs_more:workload")
