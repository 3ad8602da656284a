"""Nothing a kernel or a user does loses the measurement: faulty kernels are told, interrupts are gone on from."""

import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
from stand_in_records import record_of, site_record

from loka.core.errors import InvalidInput
from loka.core.gemm import Role, TensorName
from loka.core.progress import Silent
from loka.core.recipe import Format
from loka.core.site_record import SiteRecord
from loka.core.statistics import Rule, Statistic
from loka.core.survey import Candidate, SiteSurvey, Survey
from loka.kernels.operand import Form
from loka.measure.partial import Partial
from loka.measure.parts import Option, SiteParts
from loka.measure.site_survey import Bench, survey_site
from loka.measure.survey import measure

TRUSTED = ["torch.fp32", "torch.bf16", "reference.rowwise"]


def normal_weight(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) / k**0.5


def candidate(site: SiteSurvey, kernel: str, role: Role) -> Candidate:
    (found,) = [c for c in site.candidates if (c.kernel, c.role) == (kernel, role)]
    return found


class TestFaultyKernels:
    def test_each_is_told_and_the_rest_goes_on(self, faulty_kernels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("loka.measure.trial.LIMIT_S", 5.0)  # which a busy machine may need to end a process
        weight = normal_weight(256, 256)
        weight[:128, 128:] *= 16
        record = record_of(site_record("a", weight, trains=False), site_record("b", weight, trains=False))
        survey = measure(record, kernels=[*faulty_kernels, "reference.rowwise"])
        for site in survey.sites:
            reasons = {c.kernel: c.why_not for c in site.candidates}
            assert reasons.pop("torch.fp32") is reasons.pop("reference.rowwise") is None
            assert reasons["faulty.raises"] == "failed: RuntimeError: cutlass cannot implement"
            assert reasons["faulty.nan"] == "returned NaN or inf"
            assert reasons["faulty.hangs"] == "hung for 5 s at fprop of 128x256x256, tried in a process of its own"
            assert reasons["faulty.dies"].startswith("ended its process with exit code 3 at fprop")  # type: ignore[union-attr]
            assert reasons["faulty.wrong_axis"].startswith("returned nonsense: relative RMS error")  # type: ignore[union-attr]
            assert not any(c.error or c.gemm_us for c in site.candidates if c.why_not)

    @pytest.mark.usefixtures("faulty_kernels", "without_trials")
    def test_wrong_scales_pass_on_randn_and_not_on_what_the_probe_saw(self) -> None:
        """Blocks of randn have nearly equal scales, so that taking them along the wrong axis hardly shows there."""
        uneven = normal_weight(256, 256)
        uneven[:128, 128:] *= 16
        sites = site_record("randn", normal_weight(256, 256)), site_record("real", uneven)
        randn, real = measure(record_of(*sites), kernels=["faulty.wrong_axis"]).sites
        assert candidate(randn, "faulty.wrong_axis", Role.FPROP).why_not is None
        assert "nonsense" in (candidate(real, "faulty.wrong_axis", Role.FPROP).why_not or "")


class _Interrupted(Silent):
    """Stops the measurement after a number of sites, as a user would."""

    def __init__(self, after: int) -> None:
        self._left = after

    def advance(self, piece: str) -> None:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt


class TestResuming:
    sites = tuple(site_record(name, normal_weight(32, 32, seed)) for seed, name in enumerate("abc"))

    def interrupt(self, run: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            measure(record_of(*self.sites), kernels=TRUSTED, out=run, progress=_Interrupted(after=2))
        assert [path.name for path in run.iterdir()] == ["survey.partial.jsonl"]

    def measured(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        names: list[str] = []

        def noted(site: SiteRecord, bench: Bench) -> SiteSurvey:
            names.append(site.name)
            return survey_site(site, bench)

        monkeypatch.setattr("loka.measure.survey.survey_site", noted)
        return names

    def test_goes_on_where_it_stopped(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.interrupt(tmp_path)
        names = self.measured(monkeypatch)
        survey = measure(record_of(*self.sites), kernels=TRUSTED, out=tmp_path)
        assert names == ["c"]
        assert [site.site for site in survey.sites] == ["a", "b", "c"]
        assert [path.name for path in tmp_path.iterdir()] == ["survey.json"]
        assert Survey.load(tmp_path).document == survey.document

    def test_a_folder_is_one_measurement_s_at_a_time(self, tmp_path: Path) -> None:
        """Two would time each other, and the second lose what the first has written."""
        code = "import sys; from loka.core.locking import alone_in\nwith alone_in(sys.argv[1]): print(flush=True); input()"
        with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdin=PIPE, stdout=PIPE) as other:
            other.stdout.readline()  # type: ignore[union-attr]
            with pytest.raises(InvalidInput, match=r"another process is at the run in .*: wait for it, or name another folder"):
                measure(record_of(*self.sites), kernels=TRUSTED, out=tmp_path)
            other.kill()
        assert not list(tmp_path.iterdir())
        assert measure(record_of(*self.sites), kernels=TRUSTED, out=tmp_path).sites

    @pytest.mark.parametrize("end", [-1, -100], ids=["the newline", "a part of it"])
    def test_a_line_that_a_kill_cut_off_is_measured_again(
        self, end: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.interrupt(tmp_path)
        partial = tmp_path / "survey.partial.jsonl"
        partial.write_bytes(partial.read_bytes()[:end])
        names = self.measured(monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            measure(record_of(*self.sites), kernels=TRUSTED, out=tmp_path, progress=_Interrupted(after=1))
        survey = measure(record_of(*self.sites), kernels=TRUSTED, out=tmp_path)
        assert names == ["b", "c"]
        assert [site.site for site in survey.sites] == ["a", "b", "c"]

    @pytest.mark.parametrize("text", [b"", b"\n", b"{", b"\xff\n", b"{}\n", b'{"schema": "loka.survey-partial/1"}\n'])
    def test_what_is_no_measurement_of_this_kind_is_measured_again(
        self, text: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "survey.partial.jsonl").write_bytes(text)
        names = self.measured(monkeypatch)
        measure(record_of(*self.sites), kernels=TRUSTED, out=tmp_path)
        assert names == ["a", "b", "c"]

    @pytest.mark.parametrize(
        "changed",
        [
            site_record("a", normal_weight(32, 32, 9)),
            site_record("a", normal_weight(32, 32, 0), calls={64: 1.0}),
            site_record("a", normal_weight(32, 32, 0), statistics={"sums": Statistic(Rule.SUM, {"x_K": torch.ones(32)})}),
            site_record("a", normal_weight(32, 32, 0), stays="may be a prediction head"),
            site_record("a", normal_weight(32, 32, 0), norm="norm", norm_kind="BlockNorm"),
        ],
        ids=["trained", "called with other rows", "probed on other data", "known to stay", "known to be a block"],
    )
    def test_begins_anew_where_anything_differs(
        self, changed: SiteRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.interrupt(tmp_path)
        names = self.measured(monkeypatch)
        measure(record_of(changed, *self.sites[1:]), kernels=TRUSTED, out=tmp_path)
        assert names == ["a", "b", "c"]


@pytest.mark.usefixtures("faulty_kernels", "without_trials")
def test_a_product_that_fails_only_when_it_is_timed_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error was measured on few rows; at the model's own M it raises."""
    multiply = SiteParts.multiply

    def fails_at_full_size(self: SiteParts, option: Option, turn: int = 0, **options: bool) -> torch.Tensor:
        if option.kernel == "torch.bf16" and self.tensors.bias is not None:
            raise RuntimeError("too many resources requested for launch")
        return multiply(self, option, turn, **options)

    monkeypatch.setattr(SiteParts, "multiply", fails_at_full_size)
    site = site_record("a", normal_weight(32, 32), has_bias=True, trains=False)
    (surveyed,) = measure(record_of(site), kernels=["torch.bf16"]).sites
    failed, fine = candidate(surveyed, "torch.bf16", Role.FPROP), candidate(surveyed, "torch.fp32", Role.FPROP)
    assert failed.why_not == "failed: RuntimeError: too many resources requested for launch (at 128 rows)"
    assert fine.gemm_us
    assert not failed.error


@pytest.mark.usefixtures("without_trials")
@pytest.mark.parametrize("broken", ["torch.bf16", "torch.fp32"])
def test_a_kernel_that_fails_at_some_rows_is_refused_and_the_baseline_timed_at_the_others(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model would run it at those rows too."""
    multiply = SiteParts.multiply

    def fails_at_many_rows(self: SiteParts, option: Option, turn: int = 0, **options: bool) -> torch.Tensor:
        if option.kernel == broken and self.tensors.x.shape[0] > 64:
            raise RuntimeError("too many rows")
        return multiply(self, option, turn, **options)

    monkeypatch.setattr(SiteParts, "multiply", fails_at_many_rows)
    site = site_record("a", normal_weight(32, 32), calls={64: 9.0, 128: 1.0}, trains=False)
    (surveyed,) = measure(record_of(site), kernels=["torch.bf16"]).sites
    other, baseline = (candidate(surveyed, kernel, Role.FPROP) for kernel in ("torch.bf16", "torch.fp32"))
    if broken == "torch.bf16":
        assert (other.why_not, other.gemm_us) == ("failed: RuntimeError: too many rows (at 128 rows)", {})
        assert not other.error
        assert (baseline.why_not, list(baseline.gemm_us)) == (None, [64, 128])
    else:
        assert (baseline.why_not, list(baseline.gemm_us)) == (None, [64])
        assert (other.why_not, list(other.gemm_us)) == (None, [64, 128])


@pytest.mark.usefixtures("without_trials")
def test_a_kernel_whose_cast_fails_at_some_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cast = SiteParts.cast

    def fails_at_many_rows(self: SiteParts, name: TensorName, forms: tuple[Form, ...], turn: int = 0) -> object:
        if name is TensorName.X and forms[0].spec.format is Format.INT8 and self.tensors.x.shape[0] > 64:
            raise RuntimeError("too many rows")
        return cast(self, name, forms, turn)

    monkeypatch.setattr(SiteParts, "cast", fails_at_many_rows)
    site = site_record("a", normal_weight(32, 32), calls={64: 9.0, 128: 1.0}, trains=False)
    (surveyed,) = measure(record_of(site), kernels=["onednn.int8"]).sites
    own = candidate(surveyed, "onednn.int8", Role.FPROP)
    assert own.why_not == f"failed: RuntimeError: too many rows (at 128 rows), its cast of x to {own.forms[0]}"
    assert (own.error, own.gemm_us) == ({}, {})
    assert not [read for read in surveyed.casts if read.forms == own.forms[:1] and read.tensor is TensorName.X]


def test_all_kernels_that_broke_the_process_are_remembered(tmp_path: Path) -> None:
    partial = Partial(tmp_path, "identity")
    for kernel in ("one", "two"):
        partial.leave_out(kernel, f"{kernel} broke it")
    assert Partial(tmp_path, "identity").left_out == {"one": "one broke it", "two": "two broke it"}
    assert Partial(tmp_path, "another").left_out == {}
