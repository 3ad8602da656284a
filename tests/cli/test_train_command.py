import subprocess
import sys

import pytest
from cyclopts import CycloptsError

from loka.cli import app
from loka.core.errors import InvalidInput, UnknownName
from loka.train.config import Precision, TrainConfig


@pytest.fixture
def parsed(monkeypatch) -> dict:
    """What the command line made of its words, in place of a training run."""
    seen: dict = {}

    def stop(config: TrainConfig, *, resume: bool, progress: object) -> None:
        seen.update(config=config, resume=resume)
        raise InvalidInput("stop here")

    monkeypatch.setattr("loka.train.loop.train", stop)
    return seen


def run(words: str) -> None:
    app(words, exit_on_error=False, result_action="return_value")


def test_words_become_the_config(parsed):
    with pytest.raises(InvalidInput, match="stop here"):
        run(
            "train --model wukong --preset tiny --steps 7 --precision bf16 --compile "
            "--model-options.dropout 0.25 --model-options.dim 8 "
            "--model-options.top_widths [64,32] "
            "--data-options.dense raw --skip-bad-rows --resume --out elsewhere"
        )
    assert parsed["resume"]
    assert parsed["config"] == TrainConfig(
        model="wukong",
        preset="tiny",
        steps=7,
        precision=Precision.BF16,
        compile=True,
        model_options={"dropout": 0.25, "dim": 8, "top_widths": (64, 32)},
        data_options={"dense": "raw", "skip_bad_rows": True},
        out="elsewhere",
    )


@pytest.mark.parametrize("words", ["--mods no_bias block_norm", "--mods no_bias --mods block_norm"])
def test_mods_are_named_as_for_the_probe(parsed, words):
    with pytest.raises(InvalidInput, match="stop here"):
        run(f"train wukong {words} --steps 7")
    assert parsed["config"] == TrainConfig("wukong", mods=("no_bias", "block_norm"), steps=7)
    with pytest.raises(CycloptsError, match="--mods"):
        app("train wukong --mods --steps 7", exit_on_error=False, print_error=False)


def test_unknown_names_list_the_known(tmp_path):
    with pytest.raises(UnknownName, match=r"'dlrn'.*dcnv2, dlrm, interformer, wukong"):
        run(f"train --model dlrn --steps 1 --out {tmp_path}")


def test_a_run_without_a_terminal_prints_plain_lines_and_a_summary(tmp_path, capsys):
    run(
        "train --model dlrm --preset tiny --steps 4 --batch-size 256 --log-every 2 --device cpu "
        f"--data-options.test_examples 300 --data-options.onehot_sizes [9,99] --out {tmp_path}"
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["2/4", "4/4"]
    assert "best possible" in lines[0]
    assert "300 held-out examples of synthetic" in "\n".join(lines)
    assert f"{tmp_path}/metrics.jsonl" in "\n".join(lines)
    assert "--resume" in lines[-1]


def test_a_mistake_is_one_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    command = [sys.executable, "-m", "loka", "train", "--model", "dlrm", "--out", str(tmp_path)]
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr == f"loka: {tmp_path} holds a run already: continue it with --resume, or choose another --out\n"


def test_help_loads_no_torch():
    script = """
import sys
from loka.cli import app
app("train --help", result_action="return_value")
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
