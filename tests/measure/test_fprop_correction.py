"""Errors of outputs, as rows that are drawn feature by feature get them wrong, and as they are told."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import loka
from loka.core.gemm import Role
from loka.core.recipe import Format
from loka.core.record import SiteRecord
from loka.core.statistics import Rule, Statistic
from loka.measure.error import measure_errors
from loka.measure.factors import Factors
from loka.measure.fprop_correction import FpropCorrection
from loka.measure.parts import Option, SiteParts, SiteTensors

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
