"""``loka.measure`` on planted records: known errors, times where they belong, transforms where they help, and nothing lost."""

import dataclasses
import itertools
import math
from itertools import product
from pathlib import Path

import msgspec
import pytest
import torch
from planted_sites import cancelling_mean, compensated_range
from stand_in_records import normal_weight, planted_record, record_of, site_record
from torch import nn

import loka
from loka.core.errors import InvalidInput, UnknownName
from loka.core.gemm import SOURCES, Role, SiteShape, TensorName
from loka.core.progress import Lines
from loka.core.recipe import Format, Transform
from loka.core.record import Record
from loka.core.site_record import NOT_FINITE, Finding
from loka.core.survey import Candidate, SiteSurvey, Survey
from loka.kernels.executor import SiteKernels
from loka.measure.block import Blocks
from loka.measure.error import FEWEST_SAMPLES, MOST_SAMPLES, OptionError, budgets_s, draw_tensors, until_known, usual_rows
from loka.measure.partial import identity_of
from loka.measure.parts import Option, SiteParts, SiteTensors
from loka.measure.site_survey import _cast_sets
from loka.measure.speed import Speeds, TimedShape
from loka.measure.survey import chosen_kernels, measure
from loka.measure.timing import time_together
from loka.numerics.metrics import measure_error

pytestmark = pytest.mark.usefixtures("without_trials")
TRUSTED = ["torch.fp32", "torch.bf16", "reference.rowwise", "reference.tensorwise"]


def candidate(site: SiteSurvey, kernel: str, role: Role, transform: Transform = Transform.NONE) -> Candidate:
    (found,) = [c for c in site.candidates if (c.kernel, c.role, c.transform) == (kernel, role, transform)]
    return found


@pytest.fixture(scope="module")
def survey() -> Survey:
    return measure(record_of(site_record("a", normal_weight(), calls={64: 2.0, 128: 1.0})), kernels=TRUSTED)


@pytest.fixture(scope="module")
def site(survey: Survey) -> SiteSurvey:
    return survey.sites[0]


class TestErrorsAndTimes:
    @pytest.mark.parametrize("role", Role)
    def test_errors_are_those_of_the_format(self, site: SiteSurvey, role: Role) -> None:
        error = candidate(site, "reference.rowwise", role).error
        assert error["relative_rms"].mean == pytest.approx(0.037, rel=0.06)  # e4m3's, on normal values
        assert error["mere_floored"].mean == pytest.approx(0.08, rel=0.1)
        assert error["mere_floored"].low < error["mere_floored"].mean < error["mere_floored"].high
        assert error["mere_floored"].n >= 3
        assert candidate(site, "torch.bf16", role).error["relative_rms"].mean == pytest.approx(0.0023, rel=0.3)
        assert candidate(site, "torch.fp32", role).error["relative_rms"].high < 1e-6

    def test_everything_timed_has_every_m(self, site: SiteSurvey) -> None:
        for c in site.candidates:
            assert set(c.gemm_us) == (set() if c.kernel.startswith("reference.") else {64, 128})
        assert site.baseline == "torch.fp32"

    def test_a_plan_finds_every_cast_it_can_ask_for(self, site: SiteSurvey) -> None:
        """Of any two timed kernels: each form alone, unless the tensor is read as it is stored."""
        timed = {(cast.tensor, cast.forms) for cast in site.casts}
        for c in site.candidates:
            for source, form in zip(SOURCES[c.role], c.forms, strict=True):
                assert not c.gemm_us or form.startswith("fp32") or (source.tensor, (form,)) in timed

    def test_survives_its_file(self, survey: Survey, tmp_path: Path) -> None:
        survey.save(tmp_path)
        assert Survey.load(tmp_path).document == survey.document


def test_casts_of_two_roles_are_timed_together() -> None:
    """oneDNN's kernels are timed here: what any pair of them shares is there as one cast."""
    site = measure(record_of(site_record("a", normal_weight())), kernels=["onednn.int8", "onednn.int8_tensorwise"]).sites[0]
    timed = {(cast.tensor, cast.forms) for cast in site.casts}
    int8 = [c for c in site.candidates if c.kernel.startswith("onednn")]
    assert len([c for c in int8 if c.gemm_us]) == 6
    for a, b in product(int8, int8):
        for (a_source, a_form), (b_source, b_form) in product(
            zip(SOURCES[a.role], a.forms, strict=True), zip(SOURCES[b.role], b.forms, strict=True)
        ):
            if a.role != b.role and a_source.tensor is b_source.tensor:
                assert (a_source.tensor, tuple(sorted((a_form, b_form)))) in timed


@pytest.mark.parametrize("is_stored_in_bf16", [False, True])
def test_a_weight_stored_in_bf16_is_read_as_it_is(is_stored_in_bf16: bool, tmp_path: Path) -> None:
    """Under autocast bf16 reads a cast of the weight in every step; a model kept in bf16 has none to pay for."""
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 1))
    model = model.bfloat16() if is_stored_in_bf16 else model
    probe = loka.Probe(model, every=1)
    with probe.step(), torch.autocast("cpu", torch.bfloat16, enabled=not is_stored_in_bf16):
        model(torch.randn(64, 32).to(model[0].weight.dtype)).float().square().mean().backward()
    probe.record().save(tmp_path)
    site = measure(Record.load(tmp_path), kernels=["torch.bf16"]).sites[0]
    assert site.baseline == "torch.bf16"
    assert any(cast.tensor is TensorName.W for cast in site.casts) is not is_stored_in_bf16


def test_what_nobody_asks_for_is_neither_measured_nor_planned_and_still_runs() -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16), nn.Linear(16, 1))
    probe = loka.Probe(model, every=1)
    with probe.step():
        model(torch.randn(64, 32)).square().mean().backward()
    survey = measure(probe.record(), kernels=["onednn.int8"])
    first, second, _ = survey.sites
    assert {candidate.role for candidate in first.candidates} == {Role.FPROP, Role.WGRAD}
    assert {candidate.role for candidate in second.candidates} == set(Role)
    plan = loka.make_plan(survey, goal="training", min_speedup=0.0, max_error=1.0)
    assert plan.sites[0].kernels[Role.DGRAD].kernel == survey.sites[0].baseline
    assert "nobody asks for this one" in plan.sites[0].kernels[Role.DGRAD].reason
    loka.apply_plan(model, plan)
    x = torch.randn(64, 32, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.any()


def test_a_site_gets_time_by_what_it_has_of_the_work() -> None:
    """Multiplications in a step, by hand: 8·16·16, 4·3·64·64 and 2·128·512·512, in calls of 8, 4 and 128 rows."""
    parts = [("tiny", 16, {8: 1.0}), ("middle", 64, {4: 3.0}), ("large", 512, {128: 2.0})]
    sites = [site_record(name, normal_weight(width, width), calls=calls) for name, width, calls in parts]
    assert budgets_s(sites, torch.device("cpu")) == {"tiny": 0.5, "middle": 0.5, "large": 3.0}
    sites = [site_record(str(index), normal_weight(16, 16), calls={8: 1.0 + index % 2}) for index in range(100)]
    budgets = budgets_s(sites, torch.device("cpu"))
    assert (budgets["0"], budgets["1"]) == pytest.approx((180 / 150, 2 * 180 / 150))


@pytest.mark.parametrize(("budget_s", "expected"), [(0.0, FEWEST_SAMPLES), (60.0, MOST_SAMPLES)])
def test_samples_end_with_the_time_but_for_the_fewest(budget_s: float, expected: int) -> None:
    never_known = OptionError()
    assert len(list(until_known(itertools.count(), [never_known], budget_s))) == expected


def test_without_names_it_takes_what_the_machine_has() -> None:
    (site,) = measure(record_of(site_record("a", normal_weight(32, 48), calls={32: 1.0}))).sites
    reasons = {c.kernel: c.why_not for c in site.candidates if c.role is Role.FPROP}
    assert reasons["torch.rowwise"] == "needs an NVIDIA GPU"
    assert reasons["reference.blockwise"] is reasons["onednn.int8"] is None
    assert loka.make_plan(measure(record_of(site_record("a", normal_weight())), kernels=TRUSTED)).sites[0].site == "a"


class TestTransforms:
    @pytest.mark.parametrize("plant", [cancelling_mean, compensated_range])
    def test_are_tried_where_no_kernel_is_healthy_and_rescue_the_site(self, plant) -> None:  # type: ignore[no-untyped-def]
        expected = plant()
        survey = measure(record_of(planted_record("a", plant)), kernels=["reference.rowwise"])
        plain = candidate(survey.sites[0], "reference.rowwise", Role.FPROP)
        rescued = candidate(survey.sites[0], "reference.rowwise", Role.FPROP, expected.transform)
        assert plain.error["relative_rms"].mean > 0.5
        assert rescued.error["relative_rms"].mean == pytest.approx(0.037, rel=0.1)
        assert rescued.error["mere_floored"].high < 0.1
        assert candidate(survey.sites[0], "reference.rowwise", Role.WGRAD, expected.transform).error["mere_floored"].high < 0.1
        torch.testing.assert_close(survey.vectors[f"a/{expected.transform}"], expected.vector_K, rtol=0.01, atol=0)
        assert {c.transform for c in survey.sites[0].candidates} == {Transform.NONE, expected.transform}
        touched = {c.role for c in survey.sites[0].candidates if c.transform is expected.transform}
        assert touched == (set(Role) if expected.transform is Transform.RESCALE else {Role.FPROP, Role.WGRAD})

    def test_what_is_surveyed_is_what_a_module_does(self) -> None:
        planted = cancelling_mean()
        survey = measure(record_of(planted_record("a", cancelling_mean)), kernels=["reference.rowwise"])
        linear = nn.Linear(*reversed(planted.weight_NK.shape), bias=False)
        linear.weight.data.copy_(planted.weight_NK)
        module = loka.LokaLinear.from_linear(
            linear, SiteKernels.same("reference.rowwise"), Transform.CENTER, survey.vectors["a/center"]
        )
        exact = planted.x_MK.double() @ planted.weight_NK.double().t()
        error = (module(planted.x_MK).double() - exact).norm() / exact.norm()
        surveyed = candidate(survey.sites[0], "reference.rowwise", Role.FPROP, Transform.CENTER).error["relative_rms"]
        assert error.item() == pytest.approx(surveyed.mean, rel=0.1)

    def test_are_tried_where_features_are_silenced_though_the_output_hardly_shows_it(self) -> None:
        """Counts over many binades in front of weights that have not learned yet: the large ones rule the output."""
        scale_K = torch.where(torch.arange(128) < 16, 2.0**20, 1.0)
        site = site_record("a", normal_weight(), lambda rows, g: (scale_K * torch.randn(rows, 128, generator=g), None),
                           scale=scale_K, trains=False)  # fmt: skip
        (surveyed,) = measure(record_of(site), kernels=["reference.rowwise"]).sites
        plain = candidate(surveyed, "reference.rowwise", Role.FPROP)
        assert plain.error["mere_floored"].high < 0.1
        assert plain.silenced == pytest.approx(112 / 128)
        assert candidate(surveyed, "reference.rowwise", Role.FPROP, Transform.RESCALE).silenced == 0

    def test_one_kernel_behind_two_of_them_is_told_as_one(self, capsys: pytest.CaptureFixture[str]) -> None:
        measure(record_of(planted_record("a", cancelling_mean)), kernels=["reference.rowwise"], progress=Lines())
        assert "a: 1 kernel able, at best mere_floored 0.07" in capsys.readouterr().out

    def test_are_left_alone_where_the_site_is_healthy(self) -> None:
        site = site_record("a", normal_weight(), mean=torch.ones(128), scale=torch.arange(128).remainder(2) + 1.0)
        (healthy,) = measure(record_of(site), kernels=["reference.rowwise"]).sites
        assert {c.transform for c in healthy.candidates} == {Transform.NONE}
        finding = Finding("a", "cancelling_mean", "a large mean", {}, "center")
        survey = measure(record_of(site, findings=(finding,)), kernels=["reference.rowwise"])
        assert {c.transform for c in survey.sites[0].candidates} == {Transform.NONE, Transform.CENTER}
        assert survey.document.findings == ("a: a large mean",)


def test_equal_problems_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []

    def counted(calls, *args, **options):  # type: ignore[no-untyped-def]
        timed.append(len(calls))
        return time_together(calls, *args, **options)

    monkeypatch.setattr("loka.measure.speed.time_together", counted)
    one = measure(record_of(site_record("a", normal_weight())), kernels=TRUSTED)
    alone, timed[:] = sum(timed), []
    two = measure(record_of(site_record("a", normal_weight()), site_record("b", normal_weight(seed=1))), kernels=TRUSTED)
    assert sum(timed) == alone > 0
    assert [len(c.gemm_us) for c in two.sites[1].candidates] == [len(c.gemm_us) for c in one.sites[0].candidates]
    assert two.sites[0].casts == two.sites[1].casts


class TestSitesOfAllKinds:
    def test_one_that_does_not_train_has_fprop_alone(self) -> None:
        def draw(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, None]:
            return torch.randn(rows, 128, generator=generator), None

        (site,) = measure(record_of(site_record("a", normal_weight(), draw, trains=False)), kernels=TRUSTED).sites
        assert {c.role for c in site.candidates} == {Role.FPROP}

    def test_one_that_was_never_called_is_said_to_be(self) -> None:
        record = record_of(site_record("a", normal_weight(), calls={}), site_record("b", normal_weight()))
        a, b = measure(record, kernels=TRUSTED).sites
        assert (a.candidates, a.notes) == ((), ("never called while the Probe looked, or with no rows",))
        assert b.candidates

    @pytest.mark.parametrize(
        ("rows", "note"),
        [(torch.full((8, 16), math.nan), "every row that the Probe saw"), (torch.zeros(0, 16), "with no rows")],
    )
    def test_one_that_saw_no_number_says_so(self, rows: torch.Tensor, note: str) -> None:
        model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 1))
        probe = loka.Probe(model, every=1)
        with probe.step():
            model(rows).sum().backward()
        first = measure(probe.record(), kernels=TRUSTED).sites[0]
        probe.detach()
        assert first.candidates == ()
        assert note in first.notes[-1]

    def test_weights_of_another_dtype_than_the_gemms(self) -> None:
        """Autocast: fp32 weights, bf16 products; the weight's cast to bf16 is timed, x is bf16 already."""
        (site,) = measure(record_of(site_record("a", normal_weight()), dtype=Format.BF16), kernels=["reference.rowwise"]).sites
        assert site.baseline == "torch.bf16"
        assert {(cast.tensor, cast.forms) for cast in site.casts} == {(TensorName.W, ("bf16",)), (TensorName.W, ("bf16ᵀ",))}
        assert candidate(site, "reference.rowwise", Role.WGRAD).error["relative_rms"].mean == pytest.approx(0.037, rel=0.06)
        drawn = next(draw_tensors(site_record("a", normal_weight()), 1, Format.BF16, torch.device("cpu")))
        assert drawn.x.dtype is torch.bfloat16
        assert torch.equal(drawn.weights[0], normal_weight()), "casts read the weight as the model stores it"

    def test_many_row_counts_are_bounded(self) -> None:
        calls = {m: 2.0 if 20 <= m < 26 else 1.0 for m in range(16, 32)}
        (site,) = measure(record_of(site_record("a", normal_weight(), calls=calls)), kernels=["torch.fp32"]).sites
        assert sorted(candidate(site, "torch.fp32", Role.FPROP).gemm_us) == [20, 21, 22, 23, 24, 25, 31]
        assert site.calls == calls

    def test_a_block_says_what_keeps_it_from_being_one(self) -> None:
        behind = {"norm": "norm", "norm_kind": "LayerNorm", "activation": "act", "activation_kind": "SiLU"}
        sites = (
            site_record("layer_norm", normal_weight(), **behind),
            site_record("block_norm", normal_weight(), **behind | {"norm_kind": "BlockNorm", "activation_kind": "Hardswish"}),
            site_record("own", normal_weight(), **behind | {"activation_kind": "MyActivation"}),
            site_record("groups", normal_weight(), **behind | {"norm_kind": "GroupNorm"}),
            site_record("threshold", normal_weight(), activation="act", activation_kind="Threshold"),
            site_record("alone", normal_weight()),
        )
        survey = measure(record_of(*sites), kernels=["torch.fp32"])
        reasons = {site.site: [block.why_not for block in site.blocks] for site in survey.sites}
        assert reasons["alone"] == []
        assert reasons["block_norm"] == ["needs an NVIDIA GPU"]
        assert "apply the Mod block_norm" in reasons["layer_norm"][0]
        assert "MyActivation, which follows it, is no class of torch.nn" in reasons["own"][0]
        assert "GroupNorm, which follows it, has settings" in reasons["groups"][0]
        assert "Threshold, which follows it, has settings" in reasons["threshold"][0]


def test_kernels_may_be_named_by_patterns() -> None:
    record = record_of(site_record("a", normal_weight()))
    assert chosen_kernels(record, ["reference.int8*", "torch.bf16"], torch.device("cpu")) == (
        "torch.fp32", "reference.int8_rowwise", "reference.int8_tensorwise", "torch.bf16",
    )  # fmt: skip
    with pytest.raises(UnknownName, match=r"no kernel is called 'reference\.int9\*'"):
        chosen_kernels(record, ["reference.int9*"], torch.device("cpu"))


class TestBadInput:
    def test_unknown_kernels_are_named(self) -> None:
        with pytest.raises(UnknownName, match=r"Did you mean 'torch.rowwise'"):
            measure(record_of(site_record("a", normal_weight())), kernels=["torch.rowwize"])

    def test_a_dtype_without_a_baseline(self) -> None:
        with pytest.raises(InvalidInput, match="run in fp16, for which there is no baseline"):
            measure(record_of(site_record("a", normal_weight()), dtype=Format.FP16))

    def test_a_record_without_sites(self) -> None:
        with pytest.raises(InvalidInput, match="the record has no site"):
            measure(record_of())


def test_the_package_is_the_call() -> None:
    """Importing a file of loka.measure binds the package to that name: both must work."""
    survey = loka.measure(record_of(site_record("a", normal_weight(32, 32))), kernels=["torch.fp32"])
    assert survey.sites[0].site == "a"


def test_a_site_whose_values_are_not_finite_is_told_and_stops_nothing() -> None:
    def draw(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((rows, 128), torch.nan), torch.randn(rows, 96, generator=generator)

    broken = site_record("a", normal_weight(), draw, mean=torch.full((128,), torch.nan))
    a, b = measure(record_of(broken, site_record("b", normal_weight())), kernels=TRUSTED).sites
    assert candidate(a, "reference.rowwise", Role.FPROP).why_not == "returned NaN or inf"
    assert candidate(b, "reference.rowwise", Role.FPROP).why_not is None


def test_of_a_layer_in_a_dtype_without_a_baseline_that_is_told_and_not_that_its_values_are_wrong() -> None:
    class Exact(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.usual, self.exact = nn.Linear(16, 32), nn.Linear(32, 4).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.exact(self.usual(x).double())

    model = Exact()
    probe = loka.Probe(model)
    with probe.step():
        model(torch.randn(32, 16)).sum().backward()
    record = probe.record()
    sites = {site.site: site for site in measure(record, kernels=["torch.fp32"]).sites}
    unlearned = {"exact": dataclasses.replace(record.sites["exact"], notes=(NOT_FINITE,))}  # had its rows been NaN besides
    (unlearned,) = measure(dataclasses.replace(record, sites=unlearned), kernels=["torch.fp32"]).sites
    assert unlearned.notes[-1].startswith("every row that the Probe saw here was NaN")
    assert sites["exact"].notes == ("head", "runs in float64, for which there is no baseline to compare with")
    assert sites["exact"].stays == sites["exact"].notes[1]


def test_tensors_that_were_timed_are_let_go_before_children_and_blocks_need_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a wide layer take gigabytes. Measuring the ceiling leaves some too."""
    held: list[int] = []
    made: list[Speeds] = []
    timed: list[TimedShape] = []

    class Watched(Speeds):
        def __init__(self, device: torch.device, *, compiled: bool) -> None:
            super().__init__(device, compiled=compiled)
            made.append(self)

        def _make_parts(self, shape: TimedShape) -> SiteParts:
            timed.append(shape)
            return super()._make_parts(shape)

    def look(*_: object, **__: object) -> dict:
        held.append(made[0]._parts.cache_info().currsize)
        return {}

    monkeypatch.setattr("loka.measure.survey.Speeds", Watched)
    monkeypatch.setattr("loka.measure.survey.try_kernels", look)
    monkeypatch.setattr(Blocks, "survey", lambda *_: tuple(look()))
    measure(record_of(site_record("a", normal_weight()), site_record("b", normal_weight(64)), step_us=1e5), kernels=TRUSTED)
    assert held == [0, 0, 0]
    assert len(timed) >= 2  # there was something to let go


def test_what_keeps_a_site_from_being_replaced_is_handed_on() -> None:
    told = {"stays": "is a Scaled", "stays_serving": "torch passes by it", "producer": "b", "notes": ("called 2 times",)}
    called, never = site_record("a", normal_weight(), **told), site_record("b", normal_weight(), calls={}, **told)
    for site in measure(record_of(called, never), kernels=["torch.fp32"]).sites:
        assert (site.stays, site.stays_serving, site.producer) == ("is a Scaled", "torch passes by it", "b")
        assert site.notes[0] == "called 2 times"


def test_errors_are_taken_at_the_rows_of_most_calls() -> None:
    assert usual_rows(site_record("a", normal_weight(), calls={64: 9.0, 512: 1.0})) == 64
    assert usual_rows(site_record("a", normal_weight(), calls={64: 1.0, 512: 1.0})) == 512


def test_what_casts_lose_is_the_mean_over_samples() -> None:
    error, report = OptionError(), measure_error(torch.ones(4, 4), torch.ones(4, 4), Role.FPROP)
    for lost in (0.1, 0.2, 0.6):
        error.add_lost(lost, 2 * lost, 0.0)
        error.samples.add(report)
    assert (error.flushed, error.saturated, error.silenced) == (pytest.approx(0.3), pytest.approx(0.6), 0.0)


def test_a_gradient_of_weights_comes_in_the_dtype_of_the_weight() -> None:
    """Under autocast x and dy are in bf16 and the weight is not: a wgrad that is timed writes twice the bytes."""
    tensors = SiteTensors.random(SiteShape(32, 64, 16), torch.bfloat16, torch.device("cpu"), weight_dtype=torch.float32)
    products = {role: SiteParts(tensors).multiply(Option("reference.rowwise", role)) for role in Role}
    assert [product.dtype for product in products.values()] == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_a_measurement_goes_on_only_with_the_same_kernels() -> None:
    record = record_of(site_record("a", normal_weight()))
    kernels = [("torch.fp32",), ("torch.fp32", "onednn.int8"), ("onednn.int8", "torch.fp32")]
    assert len({identity_of(record, names, record.environment) for names in kernels}) == 3


def test_a_measurement_goes_on_only_on_the_same_machine_with_the_same_versions_and_precision() -> None:
    record = record_of(site_record("a", normal_weight()))
    here = record.environment
    changed = [{"device": "another CPU"}, {"loka": "0.0.1"}, {"libraries": here.libraries | {"torch": "2.11.0"}}]
    environments = [here, *(msgspec.structs.replace(here, **fields) for fields in changed)]
    identities = [identity_of(record, ("torch.fp32",), environment) for environment in environments]
    identities.append(identity_of(dataclasses.replace(record, dtype=Format.BF16), ("torch.fp32",), here))
    identities.append(identity_of(dataclasses.replace(record, steps_seen=7), ("torch.fp32",), here))
    assert len(set(identities)) == 6
    another = record_of(site_record("a", normal_weight(), cast_in_step=True))
    assert identity_of(another, ("torch.fp32",), here) not in identities
    another_day = msgspec.structs.replace(here, date="2001-01-01")
    assert identity_of(record, ("torch.fp32",), another_day) == identities[0]


def test_of_casts_that_must_be_compiled_those_are_timed_that_no_others_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not none where two match each other, nor those of the one that is more accurate than all that need not wait."""
    waiting = {"reference.tensorwise", "reference.rowwise"}
    options = {name: Option(name, Role.FPROP) for name in (*waiting, "reference.static")}
    speeds, shape = Speeds(torch.device("cpu")), TimedShape(SiteShape(64, 64, 64), Format.FP32, Format.FP32, False)

    def timed(**gates: float) -> set[str]:
        errors = {options[f"reference.{name}"]: OptionError() for name in gates}
        monkeypatch.setattr(OptionError, "gate", property(lambda error: next(g for e, g in known if e is error)))
        known = list(zip(errors.values(), gates.values(), strict=True))
        sets = _cast_sets(TensorName.X, list(errors), errors, shape, speeds)
        return {option.kernel.partition(".")[2] for option in errors if (option.form_of(TensorName.X),) in sets}

    forms = {options[name].form_of(TensorName.X) for name in waiting}
    monkeypatch.setattr(Speeds, "is_compiled", lambda self, name, form, shape: name is TensorName.X and form in forms)
    assert timed(tensorwise=0.08, rowwise=0.08) == {"tensorwise", "rowwise"}
    assert timed(tensorwise=0.08, rowwise=0.09, static=0.07) == {"static"}
    assert timed(tensorwise=0.08, rowwise=0.06, static=0.07) == {"rowwise", "static"}


@pytest.mark.usefixtures("without_trials")
def test_a_gradient_of_zeros_is_no_error_of_zero() -> None:
    """As behind a layer that starts at 0: what 8 bits do to it nobody has seen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 1))
    nn.init.zeros_(model[2].weight)
    probe = loka.Probe(model, every=1)
    with probe.step():
        model(torch.randn(64, 32, requires_grad=True)).square().sum().backward()
    surveyed = loka.measure(probe.record(), kernels=["reference.rowwise"]).sites[0]
    errors = {c.role: c for c in surveyed.candidates if c.kernel == "reference.rowwise"}
    assert 0.01 < errors[Role.FPROP].error["mere_floored"].mean < 0.2
    for role in (Role.DGRAD, Role.WGRAD):
        assert (errors[role].error, errors[role].why_not) == (
            {}, f"{role} gave nothing but zeros while the Probe looked: probe more steps",
        )  # fmt: skip
