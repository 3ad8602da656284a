"""Forward as torch.compile makes it amid a model on a CPU: what runs is the layer, and what is told is what it takes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from int8_here import needs
from stand_in_records import record_of, site_record

import loka
from loka.core.errors import InvalidInput
from loka.core.gemm import Role, SiteShape, TensorName
from loka.core.progress import Lines
from loka.core.recipe import Format, Transform
from loka.core.survey import Survey
from loka.kernels.providers.torch_casts import room_to_compile
from loka.kernels.providers.torch_left import LEFT
from loka.measure.amid_model import between_relus, inputs_of, plain_layer
from loka.measure.partial import identity_of
from loka.measure.parts import Option, SiteParts, SiteTensors
from loka.measure.speed import Speeds, TimedShape
from loka.measure.timing import time_together
from loka.measure.trial import needs_trial

CPU = torch.device("cpu")
INT8 = Option("onednn.int8", Role.FPROP)
FP32 = Option("torch.fp32", Role.FPROP)
FROM_THE_LEFT = Option(LEFT, Role.FPROP)
needs_int8 = needs("onednn.int8")


def parts_of(m: int, k: int, n: int) -> SiteParts:
    parts = SiteParts(SiteTensors.random(SiteShape(m, k, n), torch.float32, CPU, has_bias=True))
    parts.tensors.features[Transform.CENTER] = torch.randn(k)
    return parts


def exact(parts: SiteParts, turn: int, *, relus: bool) -> torch.Tensor:
    """M×N at float64."""
    x, w, bias = parts.tensors.x.double(), parts.tensors.weights[turn].double(), parts.tensors.bias
    assert bias is not None
    y = (x.relu() if relus else x) @ w.t() + bias.double()
    return y.relu() if relus else y


@pytest.mark.parametrize(
    ("option", "error"),
    [
        pytest.param(None, 1e-6, id="as torch runs it"),
        pytest.param(FROM_THE_LEFT, 1e-6, id="from the left"),
        pytest.param(INT8, 0.02, id="int8", marks=needs_int8),
        pytest.param(Option("onednn.int8", Role.FPROP, Transform.CENTER), 0.04, id="int8 behind center", marks=needs_int8),
    ],
)
def test_it_is_the_layer_between_two_relus(option: Option | None, error: float) -> None:
    """Several of them, whatever the shape, wherever a feature's values lie, and whoever reads it; each has a weight of its
    own."""
    places = ((48, 40, 24), None, False), ((60, 24, 32), None, False), ((60, 24, 32), 12, False), ((60, 24, 32), 12, True)
    with room_to_compile():
        for (m, k, n), across, feeds_product in places:
            if option == FROM_THE_LEFT and across is None:
                continue  # is refused
            parts = parts_of(m, k, n)
            layers = between_relus(parts, option, inputs_of(parts, across), feeds_product=feeds_product)
            for turn, y in enumerate(layers(0)):
                if across:
                    assert y.shape == ((m // across, across, n) if feeds_product else (m // across, n, across))
                    y = y if feeds_product else y.mT
                expected = exact(parts, turn, relus=True)
                distance = (y.reshape(m, n) - expected).square().mean().sqrt() / expected.square().mean().sqrt()
                assert distance < error
                plain = plain_layer(parts, across)(turn).reshape(m, n)
                torch.testing.assert_close(plain.double(), exact(parts, turn, relus=False), rtol=1e-4, atol=1e-4)


@needs_int8
def test_a_layer_under_autocast_multiplies_in_its_dtype() -> None:
    """Its weight is kept in FP32."""
    tensors = SiteTensors.random(SiteShape(48, 40, 24), torch.bfloat16, CPU, weight_dtype=torch.float32, has_bias=True)
    parts = SiteParts(tensors)
    expected = exact(parts, 0, relus=True)
    with room_to_compile():
        for y, *_ in (between_relus(parts, option, inputs_of(parts, None))(0) for option in (None, INT8)):
            assert y.dtype is torch.bfloat16
            assert (y - expected).square().mean().sqrt() < 0.02 * expected.square().mean().sqrt()
    assert plain_layer(parts, None)(0).dtype is torch.bfloat16


def test_an_option_takes_what_the_layer_does_and_the_difference_between_the_relus(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = TimedShape(SiteShape(48, 40, 24), Format.FP32, Format.FP32, True)
    speeds, slow = Speeds(CPU, compiled=True), Option("reference.rowwise", Role.FPROP)
    free, broken = Option("reference.tensorwise", Role.FPROP), Option("reference.blockwise", Role.FPROP)
    graphs = {
        None: (150.0, 410.0),
        INT8: (170.0, 350.0),
        slow: (150.0, 490.0),
        free: (150.0, 160.0),
        FROM_THE_LEFT: (150.0, 160.0),
    }  # of one and of three layers
    planted: dict[object, float | str] = {
        (option, n): us for option, both in graphs.items() for n, us in zip((1, 3), both, strict=True)
    }
    planted |= {(None, 0): 100.0, (broken, 1): 150.0, (broken, 3): "failed: at it"}
    monkeypatch.setattr(Speeds, "_time", lambda self, calls, shape: {key: planted[key] for key in calls})
    assert speeds.products_us([FP32, INT8, slow, free, FROM_THE_LEFT, broken], shape) == {
        FP32: 100.0, INT8: 60.0, slow: 140.0, free: 25.0, FROM_THE_LEFT: 50.0, broken: "failed: at it",
    }  # fmt: skip
    planted[None, 1] = "failed: no compiler"
    assert Speeds(CPU, compiled=True).products_us([FP32, INT8], shape) == {FP32: 100.0, INT8: "failed: no compiler"}


@pytest.mark.parametrize(
    ("role", "across", "model", "compiled", "reason"),
    [
        (Role.FPROP, 16, Format.FP32, True, None),
        (Role.FPROP, None, Format.FP32, True, "multiplies from the left, and here x lies row by row"),
        (Role.FPROP, 16, Format.BF16, True, "multiplies in fp32, and the model in bf16"),
        (Role.FPROP, 16, Format.FP32, False, "is timed in compiled models alone: measure with compiled=True"),
        (Role.WGRAD, 16, Format.FP32, False, "is for fprop: torch's own layer makes the gradients"),
    ],
)
def test_from_the_left_is_for_what_lies_across_in_compiled_fp32(
    role: Role, across: int | None, model: Format, compiled: bool, reason: str | None
) -> None:
    shape = TimedShape(SiteShape(48, 40, 24), model, Format.FP32, True, across=across)
    assert Speeds(CPU, compiled=compiled).refusal(Option(LEFT, role), shape) == reason


@pytest.mark.usefixtures("without_trials")
def test_a_layer_over_another_axis_is_planned_from_the_left_where_that_is_faster() -> None:
    """And is as exact as high precision."""
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0)) / 128**0.5
    record = record_of(site_record("a", weight, calls={64: 1.0}, across=32), site_record("b", weight, calls={64: 1.0}))
    survey = loka.measure(record, kernels=[LEFT], device="cpu", compiled=True)
    (a, b) = ([c for c in site.candidates if c.kernel == LEFT and c.role is Role.FPROP] for site in survey.sites)
    assert (a[0].why_not, b[0].why_not) == (None, "multiplies from the left, and here x lies row by row")
    assert set(a[0].gemm_us) == {64}
    assert a[0].error["mere_floored"].high < 1e-5
    planned = {site.site: site.kernels[Role.FPROP] for site in loka.make_plan(survey, goal="serving", min_speedup=0.001).sites}
    assert {name: choice.kernel for name, choice in planned.items()} == {"a": LEFT, "b": "torch.fp32"}
    assert planned["a"].error is None


def test_a_layer_that_feeds_a_product_is_timed_as_one() -> None:
    """Where x lies across, and compiled: otherwise its output lies row by row in any case."""
    weight = torch.randn(96, 128)
    sites = [site_record("a", weight, across=across, feeds_product=feeds) for across in (32, None) for feeds in (True, False)]
    shapes = [TimedShape.of(site, 64, Format.FP32, compiled=True) for site in sites]
    assert [shape.feeds_product for shape in shapes] == [True, False, False, False]
    assert not TimedShape.of(sites[0], 100, Format.FP32, compiled=True).feeds_product  # no matrices of 32 rows
    assert not TimedShape.of(sites[0], 64, Format.FP32).feeds_product


def test_what_cannot_even_be_built_is_told_and_the_others_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def built(parts: SiteParts, option: Option | None, inputs: list[torch.Tensor], **facts: bool) -> Callable[[int], object]:
        if option == INT8:
            raise RuntimeError("cannot be built")
        return lambda turn: torch.ones(64).relu()

    monkeypatch.setattr("loka.measure.speed.between_relus", built)
    shape, other = TimedShape(SiteShape(48, 40, 24), Format.FP32, Format.FP32, True), Option("reference.rowwise", Role.FPROP)
    times = Speeds(CPU, compiled=True).products_us([FP32, INT8, other], shape)
    assert times.pop(INT8) == "failed: RuntimeError: cannot be built"
    assert all(isinstance(time_us, float) and time_us > 0 for time_us in times.values())


@needs_int8
def test_across_takes_no_longer_than_it_would_in_a_model() -> None:
    """Code for unknown sizes takes five to twelve times as long there, and a layer that gains seemed to lose."""
    parts = parts_of(1024, 256, 256)
    with room_to_compile():
        calls = {str(across): between_relus(parts, INT8, inputs_of(parts, across)) for across in (None, 16)}
        times = time_together(calls, CPU, turns=1, rounds=7)
    assert times["16"].median_us < 3 * times["None"].median_us


def test_what_fprop_reads_of_x_costs_nothing_more_and_the_rest_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = TimedShape(SiteShape(48, 40, 24), Format.FP32, Format.FP32, True)
    fprop, wgrad = INT8.forms[0], Option("onednn.int8", Role.WGRAD).forms[1]
    planted = {(wgrad,): 7.0, (fprop,): 5.0}
    monkeypatch.setattr(Speeds, "_time", lambda self, calls, shape: {key: planted[key] for key in calls})
    speeds = Speeds(CPU, compiled=True)
    sets = [(fprop,), (wgrad,), (fprop, wgrad)]
    assert speeds.casts_us(TensorName.X, sets, shape) == {(fprop,): 0.0, (wgrad,): 7.0, (fprop, wgrad): 7.0}
    assert speeds.casts_us(TensorName.DY, [(fprop,)], shape) == {(fprop,): 5.0}
    assert Speeds(CPU).casts_us(TensorName.X, [(fprop,)], shape) == {(fprop,): 5.0}


@needs_int8
@pytest.mark.usefixtures("without_trials")
def test_a_survey_of_a_compiled_model_says_so_and_can_be_planned_from(tmp_path: Path) -> None:
    """Rows that lie across are timed so where the rows of a call are that many times some number."""
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0)) / 128**0.5
    record = record_of(site_record("a", weight, calls={64: 2.0, 100: 1.0}, across=32))
    assert [TimedShape.of(record.sites["a"], m, Format.FP32).across for m in (64, 100)] == [32, None]
    survey = loka.measure(record, kernels=["onednn.int8"], device="cpu", compiled=True, out=tmp_path)
    assert survey.document.compiled
    assert Survey.load(tmp_path).document == survey.document
    (candidate,) = [c for c in survey.sites[0].candidates if (c.kernel, c.role) == ("onednn.int8", Role.FPROP)]
    assert set(candidate.gemm_us) == {64, 100}
    (x_cast,) = [c for c in survey.sites[0].casts if c.tensor is TensorName.X and c.forms == (candidate.forms[0],)]
    assert set(x_cast.time_us.values()) == {0.0}
    assert loka.make_plan(survey, goal="serving", min_speedup=0.001).sites[0].is_low_precision
    with pytest.raises(InvalidInput, match="for a model that serves compiled, without gradients: plan for serving by it"):
        loka.make_plan(survey, goal="training")
    assert not loka.measure(record, kernels=["torch.fp32"], device="cpu").document.compiled
    here = record.environment
    assert identity_of(record, ("torch.fp32",), here) != identity_of(record, ("torch.fp32",), here, compiled=True)


def test_a_kernel_of_high_precision_is_told_of_and_needs_no_trial(capsys: pytest.CaptureFixture[str]) -> None:
    assert not needs_trial(LEFT)
    record = record_of(site_record("a", torch.randn(16, 24), calls={64: 2.0}, across=32))
    loka.measure(record, kernels=[LEFT], device="cpu", compiled=True, progress=Lines())
    assert "a: 1 kernel able, of high precision" in capsys.readouterr().out


def test_without_a_compiler_it_says_what_is_missing_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: object, **options: object) -> object:
        raise RuntimeError("no working C++ compiler found")

    monkeypatch.setattr(torch, "compile", broken)
    record = record_of(site_record("a", torch.randn(8, 16)))
    with pytest.raises(InvalidInput, match=r"no working C\+\+ compiler found.*apt install g\+\+.*without `compiled`"):
        loka.measure(record, kernels=["torch.fp32"], device="cpu", compiled=True, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_where_torch_compile_is_switched_off_it_says_so() -> None:
    """It would run eager, and say nothing."""
    record = record_of(site_record("a", torch.randn(8, 16)))
    with torch.compiler.set_stance("force_eager"), pytest.raises(InvalidInput, match="switched off here"):
        loka.measure(record, kernels=["torch.fp32"], device="cpu", compiled=True)
