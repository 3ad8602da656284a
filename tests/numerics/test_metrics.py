import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loka.core.errors import InvalidInput
from loka.core.gemm import Role
from loka.core.recipe import Format, Scaling
from loka.numerics import metrics
from loka.numerics.metrics import (
    ErrorReport,
    ErrorSamples,
    flushed_share,
    measure_error,
    mere,
    mere_floored,
    misread_share,
    relative_rms,
    saturated_share,
    silenced_share,
    sqnr_db,
)
from loka.numerics.reference import gemm
from loka.numerics.scaling import quantize

DYNAMIC = [scaling for scaling in Scaling if scaling not in (Scaling.NONE, Scaling.STATIC)]
EIGHT_BIT = [format for format in Format if format.is_8bit]
NAMES = metrics.METRICS
METRICS = [mere, mere_floored, relative_rms]


def test_each_metric_by_hand():
    ref = torch.tensor([[3.0, -4.0], [0.1, 0.0]])  # rms = √(25.01/4) ≈ 2.50, floored at 0.25
    out = torch.tensor([[3.3, -4.0], [0.2, 0.05]])
    rms = math.sqrt(25.01 / 4)
    assert float(mere_floored(out, ref)) == pytest.approx((0.1 + 0 + 0.1 / (0.1 * rms) + 0.05 / (0.1 * rms)) / 4, rel=1e-6)
    assert float(relative_rms(out, ref)) == pytest.approx(math.sqrt((0.09 + 0.01 + 0.0025) / 25.01), rel=1e-6)
    assert float(sqnr_db(out, ref)) == pytest.approx(10 * math.log10(25.01 / 0.1025), rel=1e-6)
    assert float(mere(out, ref)) == math.inf  # 0.05 where the reference is 0
    assert float(mere(out[:, :1], ref[:, :1])) == pytest.approx((0.1 + 1.0) / 2, rel=1e-6)


def test_each_column_or_row_is_floored_at_its_own_rms():
    ref = torch.tensor([[100.0, 0.01], [100.0, 0.01]])
    out = torch.tensor([[100.0, 0.02], [100.0, 0.01]])  # wrong by 100 %, where the whole tensor's floor would hide it
    assert float(mere_floored(out, ref, axis=0)) == pytest.approx(0.25, rel=1e-6)
    assert float(mere_floored(out.t(), ref.t(), axis=1)) == pytest.approx(0.25, rel=1e-6)
    assert float(mere_floored(out, ref)) == float(mere_floored(out.t(), ref.t())) < 0.001
    assert measure_error(out, ref, Role.WGRAD).mere_floored == pytest.approx(0.25, rel=1e-6)
    for role in (Role.FPROP, Role.DGRAD):
        assert measure_error(out.t(), ref.t(), role).mere_floored == pytest.approx(0.25, rel=1e-6)


def test_the_mean_is_over_all_values_of_a_matrix_that_is_not_square():
    ref = torch.tensor([[2.0, 2.0, 2.0], [4.0, 4.0, 4.0]])
    out = ref * torch.tensor([[1.1, 1.0, 1.0], [1.0, 1.0, 1.2]])
    for axis in (0, 1, None):
        assert float(mere_floored(out, ref, axis=axis)) == pytest.approx((0.1 + 0.2) / 6, rel=1e-6)


def test_differences_that_fp32_would_round_away_are_seen():
    ref = torch.tensor([1.0], dtype=torch.float64)
    assert float(relative_rms(ref + 1e-12, ref)) == pytest.approx(1e-12, rel=1e-3)


@pytest.mark.parametrize("metric", METRICS)
def test_a_reference_of_zero(metric):
    zero = torch.zeros(3, 3)
    assert float(metric(zero, zero)) == 0
    assert float(metric(zero + 1e-30, zero)) == math.inf


def test_sqnr_at_its_ends():
    zero, one = torch.zeros(3), torch.ones(3)
    assert float(sqnr_db(one, one)) == math.inf
    assert float(sqnr_db(zero, zero)) == math.inf
    assert float(sqnr_db(one, zero)) == -math.inf
    assert float(sqnr_db(zero, one)) == 0


@pytest.mark.parametrize("metric", [*METRICS, sqnr_db])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_averaged_away(metric, bad):
    ref = torch.ones(100, 100)
    out = ref.clone()
    out[3, 4] = bad
    assert not math.isfinite(metric(out, ref))
    assert not math.isfinite(metric(ref, out))
    assert not math.isfinite(metric(out, out))  # an infinite reference cannot be compared with


def test_shapes_that_differ_or_hold_nothing_are_refused():
    with pytest.raises(InvalidInput, match=r"\(2, 3\) and \(1, 3\)"):
        mere(torch.ones(2, 3), torch.ones(1, 3))
    with pytest.raises(InvalidInput, match=r"shape \(0, 3\), has no error"):
        relative_rms(torch.ones(0, 3), torch.ones(0, 3))


def test_a_single_number_has_an_error_and_a_vector_no_rows():
    assert float(mere(torch.tensor(1.1), torch.tensor(1.0))) == pytest.approx(0.1, rel=1e-6)
    assert float(mere_floored(torch.tensor(1.1), torch.tensor(1.0))) == pytest.approx(0.1, rel=1e-6)
    for out, axis in ((torch.ones(3), 0), (torch.ones(3, 3), -1)):
        with pytest.raises(InvalidInput, match="is of a matrix"):
            mere_floored(out, out, axis=axis)


@pytest.mark.parametrize("share", [flushed_share, misread_share, saturated_share, silenced_share])
def test_the_cast_of_another_tensor_is_refused(share):
    with pytest.raises(InvalidInput, match=r"\(12, 5\) and \(6, 5\)"):
        share(torch.ones(12, 5), quantize(torch.ones(6, 5), Format.E4M3, Scaling.ROWWISE))


def test_flushed_share_counts_nonzero_values_whose_code_is_zero():
    x = torch.tensor([[448.0, 2.0**-11, -(2.0**-12), 0.0, 2.0**-9]])  # e4m3's smallest is 2⁻⁹, and its half a tie to 0
    assert float(flushed_share(x, quantize(x, Format.E4M3, Scaling.TENSORWISE))) == pytest.approx(2 / 4)
    assert float(flushed_share(x, quantize(x, Format.INT8, Scaling.TENSORWISE))) == pytest.approx(3 / 4)
    assert float(flushed_share(x, quantize(x, Format.E5M2, Scaling.TENSORWISE))) == 0


def test_silenced_features_are_those_of_which_next_to_nothing_is_left():
    x = torch.ones(20, 4)
    x[:, 1] = 1e-6  # flushed everywhere beside a 1
    x[:18, 2] = 1e-6  # flushed in nine of ten: heard
    x[:, 3] = 0  # never there
    assert float(silenced_share(x, quantize(x, Format.E4M3, Scaling.TENSORWISE))) == pytest.approx(1 / 3)
    assert float(silenced_share(x, quantize(x, Format.E4M3, Scaling.COLWISE))) == 0


def test_misread_features_are_those_whose_cast_is_off_by_half_their_norm():
    x = torch.ones(20, 5)
    x[:, 1] = 1e-6  # flushed everywhere beside a 1
    x[1:, 2] = 1e-6  # flushed but for one, which is all of its norm
    x[:, 3] = 0  # never there
    x[:, 4] = 0.6 * 2.0**-9 / 448  # of e4m3's smallest at this scale: rounded up to 1.7 times what it is
    assert float(misread_share(x, quantize(x, Format.E4M3, Scaling.TENSORWISE))) == pytest.approx(2 / 4)
    assert float(misread_share(x, quantize(x, Format.E4M3, Scaling.COLWISE))) == 0
    assert float(silenced_share(x, quantize(x, Format.E4M3, Scaling.TENSORWISE))) == pytest.approx(2 / 4)


def test_features_whose_cast_is_nan_are_misread():
    x = torch.ones(20, 4)
    q = quantize(x, Format.E4M3, Scaling.COLWISE)
    assert float(misread_share(x, q._replace(scale=torch.full_like(q.scale, math.nan)))) == 1
    x[:, 1:] = 0  # and these have nothing to misread
    assert float(misread_share(x, q._replace(scale=torch.full_like(q.scale, math.nan)))) == 1


def test_poisoned_values_are_not_called_flushed():
    x = torch.tensor([[1.0, math.nan, 2.0], [1e-9, 1.0, 0.0]])
    assert float(flushed_share(x, quantize(x, Format.INT8, Scaling.ROWWISE))) == pytest.approx(1 / 4)


def test_saturated_share_counts_finite_values_past_the_range():
    x = torch.tensor([[1.0, 448.0, 448.5, -1000.0, math.inf, 0.0]])
    for format, expected in ((Format.E4M3, 2 / 4), (Format.E5M2, 0), (Format.INT8, 0)):  # int8's scale is NaN: all poisoned
        q = quantize(x, format, Scaling.STATIC, static_scale=1.0)
        assert float(saturated_share(x, q)) == pytest.approx(expected)
    q = quantize(x[:, :4], Format.INT8, Scaling.STATIC, static_scale=1.0)
    assert float(saturated_share(x[:, :4], q)) == pytest.approx(3 / 4)


@pytest.mark.parametrize("share", [flushed_share, misread_share, saturated_share, silenced_share])
def test_shares_of_nothing_are_zero(share):
    for x in (torch.zeros(3, 3), torch.zeros(0, 3)):
        assert float(share(x, quantize(x, Format.E4M3, Scaling.ROWWISE))) == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 140), st.sampled_from(EIGHT_BIT), st.sampled_from(DYNAMIC), st.integers(0, 2**31), st.floats(-60, 60))
def test_a_scale_taken_from_the_values_saturates_none(columns, format, scaling, seed, binades):
    x = torch.randn(20, columns, generator=torch.Generator().manual_seed(seed)) * 2.0**binades
    assert float(saturated_share(x, quantize(x, format, scaling))) == 0


def _by_all_metrics(out, ref, x, q):
    reports = [measure_error(out, ref, role) for role in (None, *Role)]
    shares = [float(share(x, q)) for share in (flushed_share, misread_share, saturated_share, silenced_share)]
    return [getattr(report, metric) for report in reports for metric in NAMES] + shares


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 300), st.integers(1, 200), st.integers(1, 5000), st.sampled_from(DYNAMIC), st.integers(0, 2**31)
)  # fmt: skip
def test_a_tensor_too_large_for_one_go_has_the_same_error_in_slices(rows, columns, at_once, scaling, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * 2.0 ** torch.randint(-12, 1, (1, columns), generator=generator)
    q, out = quantize(x, Format.E4M3, scaling), x + 0.1 * torch.randn(rows, columns, generator=generator)
    whole = _by_all_metrics(out, x, x, q)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "AT_ONCE", at_once)
        assert _by_all_metrics(out, x, x, q) == pytest.approx(whole, rel=1e-12)


def test_no_float64_copy_is_larger_than_a_slice(monkeypatch):
    largest = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            largest.extend(t.numel() for t in tree_leaves(made) if isinstance(t, torch.Tensor) and t.dtype is torch.float64)
            return made

    x = torch.randn(512, 256)
    q = quantize(x, Format.E4M3, Scaling.BLOCK_128X128)
    monkeypatch.setattr(metrics, "AT_ONCE", 128 * 256)
    with Watch():
        _by_all_metrics(x + 0.1, x, x, q)
    assert max(largest) == 128 * 256


@pytest.mark.parametrize(
    ("x_format", "scaling", "expected_rms", "expected_floored"),
    [
        (Format.E4M3, Scaling.TENSORWISE, 0.0373, 0.08),
        (Format.E4M3, Scaling.ROWWISE, 0.0373, 0.08),
        (Format.E5M2, Scaling.ROWWISE, 0.0588, 0.125),
    ],
)
def test_a_healthy_site_has_the_errors_we_quote(x_format, scaling, expected_rms, expected_floored):
    """Normal values at 2048×512×512, against w in e4m3: the yardstick that every other site's error is read by."""
    generator = torch.Generator().manual_seed(0)
    x_MK = torch.randn(2048, 512, generator=generator)
    w_NK = torch.randn(512, 512, generator=generator)
    error = measure_error(gemm(quantize(x_MK, x_format, scaling), quantize(w_NK, Format.E4M3, scaling)), gemm(x_MK, w_NK))
    assert error.relative_rms == pytest.approx(expected_rms, rel=0.01)
    assert error.mere_floored == pytest.approx(expected_floored, rel=0.02)
    assert error.sqnr_db == pytest.approx(-20 * math.log10(error.relative_rms))
    assert error.mere > 2 * error.mere_floored  # ruled by near-zero references


def test_samples_tell_when_their_mean_is_known_well_enough():
    draw = random.Random(0)
    samples = ErrorSamples()
    while len(samples) < 2 or not samples.tight("mere_floored", relative=0.02):
        samples.add(ErrorReport(draw.gauss(0.4, 0.2), draw.gauss(0.08, 0.004), 0.037, 28.6))
    estimate = samples.summary()["mere_floored"]
    assert estimate.n == len(samples)
    assert 10 < len(samples) < 60  # (1.96·0.05/0.02)² ≈ 24
    assert estimate.low < 0.08 < estimate.high
    assert estimate.high - estimate.mean <= 0.02 * estimate.mean
    assert not samples.tight("mere", relative=0.02)
    assert samples.tight("relative_rms", relative=0.0)  # every sample the same


def test_one_sample_is_never_tight():
    samples = ErrorSamples()
    samples.add(ErrorReport(0.4, 0.08, 0.037, math.inf))
    assert not samples.tight("mere_floored", relative=1e9)
    samples.add(ErrorReport(0.5, 0.09, 0.038, math.inf))
    assert samples.estimate("sqnr_db").low == math.inf


def test_an_output_with_nan_is_never_tight():
    samples = ErrorSamples()
    for _ in range(5):
        samples.add(ErrorReport(math.nan, math.nan, math.nan, math.nan))
    assert not samples.tight("mere_floored", relative=1.0)
    assert math.isnan(samples.summary()["mere_floored"].mean)


def test_unknown_metrics_are_named():
    with pytest.raises(InvalidInput, match="'rms'; known: mere, mere_floored, relative_rms, sqnr_db"):
        ErrorSamples().estimate("rms")


@pytest.mark.parametrize(("role", "axis"), [(Role.DGRAD, 1), (Role.WGRAD, 0)])
def test_examples_that_are_masked_do_not_hide_what_becomes_of_the_others(role, axis):
    """A gradient that is lost whole has an error of 1, however many rows of zeros, which are right, lie beside it."""
    ref = torch.zeros(20, 20)
    ref[3] = 1.0
    ref = ref if axis == 1 else ref.t()
    assert measure_error(torch.zeros(20, 20), ref, role).mere_floored == pytest.approx(1.0)
    assert measure_error(0.9 * ref, ref, role).mere_floored == pytest.approx(0.1)
    assert measure_error(ref, ref, role).mere_floored == 0
    assert measure_error(0 * ref, 0 * ref, role).mere_floored == 0
    assert measure_error(torch.eye(20), ref, role).mere_floored == math.inf  # where the reference is 0, it is not
