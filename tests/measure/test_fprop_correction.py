"""Errors of outputs, as rows that are drawn feature by feature get them wrong, and as they are told."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import loka
from loka.core.gemm import Role
from loka.core.recipe import Format
from loka.core.site_record import SiteRecord
from loka.core.statistics import Rule, Statistic
from loka.measure.error import measure_errors
from loka.measure.factors import Factors, trusted
from loka.measure.fprop_correction import MOST_ROWS, OF_A_ROW, FpropCorrection
from loka.measure.parts import Option, SiteParts, SiteTensors
from loka.numerics.fprop_errors import RECIPES, fprop_errors

CPU = torch.device("cpu")
M, K, N = 128, 24, 16


def rows_of_any_size(generator: torch.Generator) -> Tensor:
    """Large or small as a whole, which feature by feature looks like long tails."""
    return torch.randn(M, K, generator=generator) * (2 * torch.randn(M, 1, generator=generator)).exp()


def with_a_rare_large_one(generator: torch.Generator) -> Tensor:
    """One row of a batch, in one feature: rarer than any quantile tells."""
    x_MK = torch.randn(M, K, generator=generator)
    x_MK[int(torch.randint(M, (), generator=generator)), 0] = 1000.0
    return x_MK


def probed(rows_of, *, rows: int = 256, steps: int = 24) -> SiteRecord:
    torch.manual_seed(0)
    model, generator = nn.Sequential(nn.Linear(K, N, bias=False), nn.Linear(N, 1)), torch.Generator().manual_seed(0)
    probe = loka.Probe(model, every=1, rows=rows, half_life=None)
    for _ in range(steps):
        with probe.step():
            model(rows_of(generator)).square().mean().backward()
    return probe.record().sites["0"]


def true_error(site: SiteRecord, rows_of, kernel: str) -> float:
    generator = torch.Generator().manual_seed(1)
    batches = [SiteParts(SiteTensors(rows_of(generator), None, [site.weight_NK])) for _ in range(50)]
    return sum(parts.error(Option(kernel, Role.FPROP)).mere_floored for parts in batches) / len(batches)


@pytest.mark.parametrize(("kernel", "samples"), [("reference.static", 2), ("torch.static_fast", 2), ("reference.static", 1)])
def test_factors_are_seen_over_drawn_of_the_samples_an_option_had(kernel: str, samples: int) -> None:
    """By hand, of so many rows seen that all is trusted; the largest value lies behind the rows that are multiplied."""
    site, generator = probed(rows_of_any_size, steps=1), torch.Generator().manual_seed(0)
    recipe = Option(kernel, Role.FPROP).recipe
    index = [str(of) for of in RECIPES].index("e4m3 static·tensorwise")
    drawn = []
    seen = {"count": 1e6, "rows": 1e6, "size": 3.0}
    statistic = {name: torch.tensor(value) for name, value in seen.items()}
    statistic |= {"floored_W": torch.full((len(RECIPES),), 0.5e6), "squares_W": torch.full((len(RECIPES),), 0.75)}
    statistics = {**site.statistics, "fprop_errors": Statistic(Rule.SUM, statistic)}
    correction = FpropCorrection(dataclasses.replace(site, statistics=statistics))
    for _ in range(2):
        x_MK = torch.randn(MOST_ROWS + 1, K, generator=generator)
        x_MK[-1] *= 1e5
        correction.add(SiteTensors(x_MK, None, [site.weight_NK]))
        weight_NK = site.weight_NK
        drawn.append(fprop_errors(x_MK[:MOST_ROWS], x_MK.abs().amax(), weight_NK, weight_NK.abs().amax()))
    factors, drawn = correction.factors(recipe, samples), drawn[:samples]
    assert factors.of_values == pytest.approx(0.5 / float(sum(of.floored_W[index] for of in drawn) / samples), rel=1e-3)
    of_drawn = float(sum(of.squares_W[index] for of in drawn) / sum(of.size for of in drawn))
    assert factors.of_rms == pytest.approx((0.25 / of_drawn) ** 0.5, rel=1e-3)
    tensorwise = correction.factors(Option("reference.int8_tensorwise", Role.FPROP).recipe, 1)
    assert tensorwise.of_values == pytest.approx(0.5, abs=0.02)  # for a scale that covers that value leaves nothing of others


@pytest.mark.parametrize(("rows", "least", "most"), [(1, 1.0, 1.03), (64, 1.1, 1.19), (100_000, 1.199, 1.2)])
def test_a_ratio_of_few_rows_is_hardly_trusted(rows: int, least: float, most: float) -> None:
    assert least <= trusted(1.2, OF_A_ROW / rows**0.5) <= most


@pytest.mark.parametrize(
    ("rows_of", "kernel", "rows"),
    [
        (rows_of_any_size, "reference.static", 256),
        (rows_of_any_size, "reference.int8_tensorwise", 256),
        (with_a_rare_large_one, "reference.int8_tensorwise", 32),  # one row in four is seen, and the largest value of all
    ],
)
def test_what_rows_that_are_drawn_miss_is_made_up_for(rows_of, kernel: str, rows: int) -> None:
    site, option = probed(rows_of, rows=rows), Option(kernel, Role.FPROP)
    true = true_error(site, rows_of, kernel)
    told = measure_errors(site, [option], Format.FP32, CPU)[option].estimates()["mere_floored"].mean
    without = {name: statistic for name, statistic in site.statistics.items() if name != "fprop_errors"}
    drawn = measure_errors(dataclasses.replace(site, statistics=without), [option], Format.FP32, CPU)[option]
    assert told == pytest.approx(true, rel=0.15)
    assert abs(told - true) < abs(drawn.estimates()["mere_floored"].mean - true) / 2


def test_recipes_that_the_probe_has_not_looked_at_are_left_as_they_are() -> None:
    site = probed(rows_of_any_size, steps=4)
    correction = FpropCorrection(site)
    correction.add(SiteTensors(*site.sample(M, torch.Generator().manual_seed(0)), [site.weight_NK]))
    assert correction.factors(Option("reference.static", Role.FPROP).recipe, 1) != Factors()
    assert correction.factors(Option("torch.bf16", Role.FPROP).recipe, 1) == Factors()
    assert FpropCorrection(site).factors(Option("reference.static", Role.FPROP).recipe, 1) == Factors()


def test_a_record_whose_samples_were_no_numbers_corrects_nothing() -> None:
    site = probed(rows_of_any_size, steps=1)
    none = {name: torch.zeros_like(tensor) for name, tensor in site.statistics["fprop_errors"].tensors.items()}
    statistics = {**site.statistics, "fprop_errors": Statistic(Rule.SUM, none)}
    correction = FpropCorrection(dataclasses.replace(site, statistics=statistics))
    correction.add(SiteTensors(*site.sample(M, torch.Generator().manual_seed(0)), [site.weight_NK]))
    assert correction.factors(Option("reference.static", Role.FPROP).recipe, 1) == Factors()
