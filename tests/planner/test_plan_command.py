from pathlib import Path

import msgspec
import pytest
import torch
from planned_survey import baseline, candidate, site, survey
from safetensors.torch import save_file

from loka.cli import app
from loka.core.errors import InvalidFile, InvalidInput, UnknownName
from loka.core.gemm import Role
from loka.core.plan import Goal, Plan
from loka.core.survey import SCHEMA, Survey
from loka.planner.plan import make_plan


def run(words: str) -> None:
    app(words, exit_on_error=False, result_action="return_value")


@pytest.fixture
def surveyed(tmp_path: Path) -> Path:
    fast = candidate("a.one", Role.FPROP, {100: 10.0}, forms=("fp32", "fp32"))
    high = baseline({role: {100: 100.0} for role in Role})
    survey(site("mlp.0", (*high, fast)), site("mlp.1", (*high, fast)), site("out", (*high, fast), is_head=True)).save(tmp_path)
    return tmp_path


def test_it_prints_the_table_writes_the_plan_and_names_the_next_command(surveyed: Path, capsys: pytest.CaptureFixture) -> None:
    run(f"plan {surveyed} --goal serving --max-error 0.15 --min-speedup 1.1 --keep ml[a-p].1")
    text = capsys.readouterr().out
    line = next(line for line in text.splitlines() if "mlp.0" in line)
    assert line.split() == ["mlp.0", "64×32", "a.one", "0.090", "10.0", "100.0", "10.00"]
    limits = "Plan for serving on some cpu. Limits: error at most 0.15, speed-up at least 1.1×, casts included"
    assert limits in " ".join(text.split())
    assert "kept in high precision by keep='ml[a-p].1'" in text
    assert "1 of 3 sites in low precision, 1.43× over all sites" in " ".join(text.split())
    assert "Next: loka report" in text
    assert "loka.Plan.load(" in text
    document = Plan.load(surveyed).document
    assert (document.goal, document.min_speedup, document.keep) == (Goal.SERVING, 1.1, ("ml[a-p].1",))
    assert document.max_error[Role.FPROP] == 0.15


def test_a_kernel_of_high_precision_is_named_where_it_is_another(surveyed: Path, capsys: pytest.CaptureFixture) -> None:
    exact = candidate("torch.fp32_left", Role.FPROP, {100: 50.0}, recipe="fp32", forms=("fp32", "fp32"))
    high = baseline({role: {100: 100.0} for role in Role})
    survey(site("a", (*high, exact)), site("b", high)).save(surveyed)
    run(f"plan {surveyed} --goal serving")
    text = capsys.readouterr().out
    a, b = (next(line for line in text.splitlines() if line.split()[:1] == [name]).split() for name in "ab")
    assert (a[2], b[2]) == ("torch.fp32_left", "–")
    assert "0 of 2 sites in low precision, 1 in fp32 on another kernel, 1.33× over all sites" in " ".join(text.split())


def test_without_flags_it_plans_as_the_function_does(surveyed: Path) -> None:
    run(f"plan {surveyed}")
    command, function = Plan.load(surveyed).document, make_plan(Survey.load(surveyed)).document
    assert (command.goal, command.min_speedup, command.max_error, command.keep) == (
        function.goal, function.min_speedup, function.max_error, function.keep,
    )  # fmt: skip


@pytest.mark.parametrize(("record", "told"), [('{"id": "one"}', False), ('{"id": "two"}', True), ("{}", False), ("no", False)])
def test_a_record_that_was_not_measured_yet_is_told(
    record: str, told: bool, surveyed: Path, capsys: pytest.CaptureFixture
) -> None:
    """By its id alone, which older ones do not have."""
    Survey(msgspec.structs.replace(Survey.load(surveyed).document, record="one")).save(surveyed)
    save_file({"weight": torch.ones(1)}, surveyed / "record.safetensors", metadata={"document": record})
    run(f"plan {surveyed}")
    assert ("was measured from a different record" in capsys.readouterr().out) is told


def test_a_survey_that_names_no_record_is_of_none_that_has_an_id(surveyed: Path, capsys: pytest.CaptureFixture) -> None:
    Survey(msgspec.structs.replace(Survey.load(surveyed).document, record="")).save(surveyed)
    save_file({"weight": torch.ones(1)}, surveyed / "record.safetensors", metadata={"document": '{"id": "one"}'})
    run(f"plan {surveyed}")
    assert "was measured from a different record" in capsys.readouterr().out


def test_a_record_that_cannot_be_read_is_no_other_one(surveyed: Path, capsys: pytest.CaptureFixture) -> None:
    Survey(msgspec.structs.replace(Survey.load(surveyed).document, record="one")).save(surveyed)
    (surveyed / "record.safetensors").write_bytes(b"half of it")
    run(f"plan {surveyed}")
    assert "different record" not in capsys.readouterr().out


@pytest.mark.parametrize("compiled", [False, True])
def test_it_says_where_times_are_of_a_compiled_model(compiled: bool, surveyed: Path, capsys: pytest.CaptureFixture) -> None:
    Survey(msgspec.structs.replace(Survey.load(surveyed).document, compiled=compiled)).save(surveyed)
    run(f"plan {surveyed} --goal serving")
    assert ("serve it under torch.compile" in capsys.readouterr().out) is compiled


def test_it_explains_one_site_and_leaves_the_plan_as_it_is(surveyed: Path, capsys: pytest.CaptureFixture) -> None:
    run(f"plan {surveyed} --goal serving")
    capsys.readouterr()
    run(f"plan {surveyed} --site out")
    text = " ".join(capsys.readouterr().out.split())
    assert "out 64×32: a prediction head, and heads stay in high precision" in text
    assert "rejected a.one (fprop): a prediction head" in text
    assert Plan.load(surveyed).document.goal is Goal.SERVING
    with pytest.raises(UnknownName, match=r"no site is called 'ou'\. Did you mean 'out'"):
        run(f"plan {surveyed} --site ou")


def test_keep_wants_a_name(surveyed: Path) -> None:
    with pytest.raises(InvalidInput, match="--keep takes the names of sites"):
        run(f"plan {surveyed} --keep")


def test_without_a_survey_it_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidFile, match=r"there is no .*survey.json: make it with `loka measure"):
        run(f"plan {tmp_path}")


@pytest.mark.parametrize("older", [f"loka.survey/{version}" for version in range(2, 7)])
def test_an_older_survey_is_planned_from(older: str, surveyed: Path) -> None:
    path = surveyed / "survey.json"
    now = make_plan(Survey.load(surveyed))
    path.write_text(path.read_text().replace(SCHEMA, older))
    assert make_plan(Survey.load(surveyed)).document == now.document


def test_a_survey_of_too_old_a_schema_is_told(surveyed: Path) -> None:
    path = surveyed / "survey.json"
    path.write_text(path.read_text().replace(SCHEMA, "loka.survey/1"))
    with pytest.raises(InvalidFile, match=r"older schema loka.survey/1.*make it again with `loka measure"):
        Survey.load(surveyed)
