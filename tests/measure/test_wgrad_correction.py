"""Errors of gradients of weights, as rows that are drawn one by one get them wrong, and as they are told."""

import dataclasses
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import loka
from loka.core.estimate import Estimate
from loka.core.gemm import Role
from loka.core.recipe import Format, Transform
from loka.core.site_record import SiteRecord
from loka.core.statistics import Rule, Statistic
from loka.measure.error import measure_errors
from loka.measure.factors import Factors
from loka.measure.parts import Option, SiteParts, SiteTensors
from loka.measure.wgrad_correction import WgradCorrection
from loka.numerics.wgrad_errors import RECIPES, some_rows, wgrad_errors

CPU = torch.device("cpu")
KERNELS = ("reference.tensorwise", "reference.rowwise")
M, K, N = 128, 24, 16


def pairs_that_cancel(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Of two rows next to each other, x is nearly the same and dy the opposite: little is left of dw."""
    x_HK, dy_HN = torch.randn(M // 2, K, generator=generator), torch.randn(M // 2, N, generator=generator)
    other_HK = x_HK + 0.1 * torch.randn(M // 2, K, generator=generator)
    return torch.stack([x_HK, other_HK], 1).flatten(0, 1), torch.stack([dy_HN, -dy_HN], 1).flatten(0, 1)


def probed(
    steps: int = 24,
    *,
    rows: int = 256,
    closely: int = M,
    of: Callable[..., tuple[Tensor, Tensor]] = pairs_that_cancel,
    shared: bool = False,
) -> SiteRecord:
    """Of so many ``rows`` of a batch, and some features of ``closely`` as many. ``shared``: with another layer, so that the
    gradient of the weight is not seen."""
    torch.manual_seed(0)
    model, generator = nn.Sequential(nn.Linear(K, N, bias=False), nn.Linear(N, 1)), torch.Generator().manual_seed(0)
    if shared:
        model.append(nn.Linear(K, N)).get_submodule("2").weight = model[0].weight
    probe = loka.Probe(model, every=1, rows=rows, half_life=None)
    for _ in range(steps):
        x_MK, dy_MN = of(generator)
        with mock.patch.multiple("loka.probe.watch", MOST_ROWS=closely, STRETCH=4), probe.step():
            y_MN = model[0](x_MK)
            model[1](y_MN.detach()).sum().backward()
            y_MN.backward(dy_MN)
    return probe.record().sites["0"]


def true_error(site: SiteRecord, kernel: str, metric: str) -> float:
    generator = torch.Generator().manual_seed(1)
    batches = [SiteParts(SiteTensors(*pairs_that_cancel(generator), [site.weight_NK])) for _ in range(50)]
    return sum(getattr(parts.error(Option(kernel, Role.WGRAD)), metric) for parts in batches) / len(batches)


@pytest.mark.parametrize("metric", ["mere_floored", "relative_rms"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rows", [M, M // 8])
def test_what_rows_that_are_drawn_one_by_one_miss_is_made_up_for(kernel: str, metric: str, rows: int) -> None:
    """However few of them are seen whole: how all cancel shows in a few features."""
    site, option = probed(rows=rows), Option(kernel, Role.WGRAD)
    true = true_error(site, kernel, metric)
    told = measure_errors(site, [option], Format.FP32, CPU)[option]
    assert told.estimates()[metric].mean == pytest.approx(true, rel=0.12)
    without = {name: statistic for name, statistic in site.statistics.items() if name != "wgrad_errors"}
    drawn = measure_errors(dataclasses.replace(site, statistics=without), [option], Format.FP32, CPU)[option]
    assert drawn.estimates()[metric].mean < true / 3


def test_draws_without_a_gradient_are_left_out_as_the_probe_leaves_them_out() -> None:
    """At a site that one row in sixty trains, most drawn batches hold none."""

    def rarely_trained(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        dy_MN = torch.randn(32, N, generator=generator) * (torch.rand(32, 1, generator=generator) < 1 / 60)
        return torch.randn(32, K, generator=generator), dy_MN

    site, option = probed(200, of=rarely_trained), Option("reference.rowwise", Role.WGRAD)
    generator, true = torch.Generator().manual_seed(1), []
    while len(true) < 200:
        x_MK, dy_MN = rarely_trained(generator)
        if dy_MN.any():
            true.append(SiteParts(SiteTensors(x_MK, dy_MN, [site.weight_NK])).error(option).mere_floored)
    error = measure_errors(site, [option], Format.FP32, CPU)[option]
    assert error.zeros > 0
    assert error.estimates()["mere_floored"].mean == pytest.approx(sum(true) / len(true), rel=0.25)


def test_a_transform_and_dgrad_are_not_corrected() -> None:
    """The gate, by which options are compared, is."""
    site = probed()
    options = [*(Option(KERNELS[0], role) for role in Role), Option(KERNELS[0], Role.WGRAD, Transform.CENTER)]
    errors = measure_errors(site, options, Format.FP32, CPU)
    corrected = [option for option in options if errors[option].factors != Factors()]
    assert corrected == [Option(KERNELS[0], role) for role in (Role.FPROP, Role.WGRAD)]
    corrected = errors[Option(KERNELS[0], Role.WGRAD)]
    assert corrected.gate == corrected.estimates()["mere_floored"].mean


@pytest.mark.parametrize(
    ("ratio", "batches", "least", "most"),
    [(1.1, 1, 1.0, 1.03), (1.1, 400, 1.095, 1.1), (10.0, 8, 9.8, 10.0), (0.1, 8, 0.1, 0.102), (1.0, 8, 1.0, 1.0)],
)
def test_a_ratio_is_trusted_as_far_as_it_is_no_chance(ratio: float, batches: int, least: float, most: float) -> None:
    """A tenth more in one batch is; ten times as much in eight is not."""
    site, generator = probed(1), torch.Generator().manual_seed(0)
    tensors = SiteTensors(*site.sample(M, generator), [site.weight_NK])
    errors = wgrad_errors([some_rows(tensors.x, tensors.dy)])
    seen = {
        "floored_W": batches * ratio * errors.floored_WB[:, 0],
        "squares_W": batches * ratio**2 * errors.squares_WB[:, 0],
        "alike_W": torch.zeros(len(RECIPES)),
        "size": batches * errors.size_B[0],
        "rows": torch.tensor(float(batches * M)),
        "times": torch.tensor(float(batches)),
        "count": torch.tensor(float(batches)),
    }
    statistics = {**site.statistics, "wgrad_errors": Statistic(Rule.SUM, seen)}
    correction = WgradCorrection(dataclasses.replace(site, statistics=statistics))
    correction.add(tensors)
    factors = correction.factors(Option(KERNELS[0], Role.WGRAD).recipe, 1)
    for factor in (factors.of_values, factors.of_rms):
        assert least - 1e-6 <= factor <= most + 1e-6


def test_recipes_that_the_probe_has_not_looked_at_are_left_as_they_are() -> None:
    site = probed(4)
    correction = WgradCorrection(site)
    correction.add(SiteTensors(*site.sample(M, torch.Generator().manual_seed(0)), [site.weight_NK]))
    assert correction.factors(Option(KERNELS[0], Role.WGRAD).recipe, 1) != Factors()
    assert correction.factors(Option("reference.int8_rowwise", Role.WGRAD).recipe, 1) == Factors()


def chance(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(M, K, generator=generator), torch.randn(M, N, generator=generator)


def the_same_in_all_rows(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Up to a sign, which x and dy share."""
    sign_M1 = torch.where(torch.rand(M, 1, generator=generator) < 0.5, -1.0, 1.0)
    row_K, row_N = torch.randn(K, generator=generator), torch.randn(N, generator=generator)
    return sign_M1 * row_K, sign_M1 * row_N


def on_one_side(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Nothing cancels: the more rows, the smaller errors by chance are beside dw."""
    x_MK, dy_MN = chance(generator)
    return 1 + 0.3 * x_MK, 1 + 0.3 * dy_MN


def test_some_rows_of_a_batch_whose_gradient_is_not_seen_are_compared_with_as_many() -> None:
    site, option = probed(24, closely=M // 8, of=on_one_side, shared=True), Option(KERNELS[0], Role.WGRAD)
    assert float(site.statistics["wgrad_errors"].tensors["rows"]) == 24 * (M // 8)
    factors = measure_errors(site, [option], Format.FP32, CPU)[option].factors
    assert factors.of_rms == pytest.approx(1.0, abs=0.15)
    assert factors.of_values == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("rows", [chance, the_same_in_all_rows])
def test_of_a_quarter_of_the_rows_the_error_is_that_of_all(rows: Callable[[torch.Generator], tuple[Tensor, Tensor]]) -> None:
    """Errors by chance grow with the root of the number of rows, and dw too; those that are alike with it, and dw too."""
    site = probed(24, closely=M // 4, of=rows)
    generator, option = torch.Generator().manual_seed(1), Option(KERNELS[0], Role.WGRAD)
    batches = [SiteParts(SiteTensors(*rows(generator), [site.weight_NK])) for _ in range(50)]
    reports = [parts.error(option) for parts in batches]
    told = measure_errors(site, [option], Format.FP32, CPU)[option].estimates()
    for metric in ("mere_floored", "relative_rms"):
        true = sum(getattr(report, metric) for report in reports) / len(reports)
        assert told[metric].mean == pytest.approx(true, rel=0.2), metric


def test_factors_scale_an_interval_and_shift_decibels() -> None:
    factors, estimate = Factors(2.0, 10.0), Estimate(3.0, 2.0, 5.0, 7)
    assert factors.applied("mere_floored", estimate) == Estimate(6.0, 4.0, 10.0, 7)
    assert factors.applied("relative_rms", estimate) == Estimate(30.0, 20.0, 50.0, 7)
    assert factors.applied("sqnr_db", estimate) == Estimate(-17.0, -18.0, -15.0, 7)
