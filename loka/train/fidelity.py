"""Fidelity of the Probe: FP8 errors as predicted from what it learned, beside those on held-out batches of real rows.

Four other predictions are given for comparison: from the same drawn rows, but without what the Probe saw 8 bits make of y and
dw; from a normal distribution of the same mean and covariance; from randn of the same rms; and from the very rows that the
Probe saw, which it does not keep.

Axes:  B batches,  M rows of a batch,  K in_features,  N out_features.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from loka.core.gemm import GemmProblem, Role, SiteShape
from loka.core.recipe import Format
from loka.core.site_record import SiteRecord
from loka.kernels.contract import KERNELS, is_oracle
from loka.kernels.device import device_of
from loka.measure.error import corrections_of
from loka.measure.factors import Correction, Factors
from loka.measure.parts import Option, SiteParts, SiteTensors
from loka.numerics.metrics import FLOOR_AXIS, mere_floored
from loka.probe.probe import Probe
from loka.probe.watch import watch

METRICS = ("mere_floored", "relative_rms")
PREDICTORS = ("learned", "drawn", "gaussian", "randn", "reservoir")
FEW = 4  # batches for fprop and dgrad, whose error is a mean over rows; wgrad has only one for a whole batch
DRAWN = 32  # batches that a prediction is made from

Rows = tuple[Tensor, Tensor]  # x_MK and dy_MN of one batch
Draw = Callable[[], Rows]
Errors = dict[str, tuple[float, float]]  # by role and recipe, the METRICS


@dataclass
class SiteRows:
    """What one site saw: the batches that the Probe learned from, and two halves of the held-out ones."""

    weight_NK: Tensor
    learned: list[Rows] = field(default_factory=list)
    held_out: tuple[list[Rows], list[Rows]] = field(default_factory=lambda: ([], []))


@dataclass(frozen=True)
class SiteFidelity:
    """The errors of one site: on each half of the held-out batches, and as each predictor predicts them."""

    halves: tuple[Errors, Errors]
    predicted: dict[str, Errors]


def study(
    model: nn.Module,
    batches: Iterator[Any],
    loss: Callable[[Any], Tensor],
    n_batches: int,
    some_rows: int | None = None,
) -> dict[str, SiteFidelity]:
    """The fidelity at every linear layer of ``model``, heads excepted: they stay in high precision whatever their error.

    The model stands still. Every second of ``n_batches`` is the Probe's; the others are held out, in two halves. The Probe
    takes all rows and forgets none. With ``some_rows`` it takes that many of a batch and forgets older ones, as it does in
    training.
    """
    sites = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    rows = {name: SiteRows(site.weight.detach().clone()) for name, site in sites.items()}
    probe = Probe(model, every=1, rows=some_rows) if some_rows else Probe(model, every=1, rows=2**30, half_life=None)
    for index, batch in enumerate(islice(batches, n_batches)):
        with watch(model, sites, 2**30, torch.Generator()) as seen:
            if index % 2:
                loss(batch).backward()
            else:
                with probe.step():
                    loss(batch).backward()
        model.zero_grad(set_to_none=True)
        for name, site_rows in rows.items():
            part = site_rows.held_out[index // 2 % 2] if index % 2 else site_rows.learned
            part += [(call.x_RK, call.dy_RN) for call in seen.trained_calls(name) if call.dy_RN is not None]
    record = probe.record()
    probe.detach()
    return {
        name: fidelity_of(rows[name], site) for name, site in record.sites.items() if not site.is_head and rows[name].learned
    }


def study_planted(
    planted: Callable[[torch.Generator], Rows], weight_NK: Tensor, n_batches: int, some_rows: int | None = None
) -> SiteFidelity:
    """The fidelity at a linear layer whose x and dy are exactly those that ``planted`` makes."""
    n, k = weight_NK.shape
    site = nn.Linear(k, n, bias=False)
    site.weight = nn.Parameter(weight_NK.clone())
    model = nn.Sequential(site, nn.Linear(n, 1))  # without the second, the first would be a head
    generator = torch.Generator().manual_seed(0)

    def loss(rows: Rows) -> Tensor:
        outputs: list[Tensor] = []
        handle = site.register_forward_hook(lambda module, args, y: outputs.append(y))
        model(rows[0])
        handle.remove()
        return (outputs[0] * rows[1]).sum()

    return study(model, iter(lambda: planted(generator), None), loss, n_batches, some_rows)["0"]


def fidelity_of(rows: SiteRows, site: SiteRecord) -> SiteFidelity:
    m = rows.learned[0][0].shape[0]
    halves = [_errors(iter(half).__next__, rows.weight_NK, len(half), {}) for half in rows.held_out]
    predicted = {}
    for name in PREDICTORS:
        draw = _draw(name, rows, site, m, torch.Generator().manual_seed(0))
        predicted[name] = _errors(draw, rows.weight_NK, DRAWN, corrections_of(site) if name == "learned" else {})
    return SiteFidelity((halves[0], halves[1]), predicted)


def _draw(predictor: str, rows: SiteRows, site: SiteRecord, m: int, generator: torch.Generator) -> Draw:
    x_RK, dy_RN = (torch.cat(parts) for parts in zip(*rows.learned, strict=True))
    k = x_RK.shape[1]

    def learned() -> Rows:
        x_MK, dy_MN = site.sample(m, generator)
        assert dy_MN is not None
        return x_MK, dy_MN

    if predictor == "gaussian":
        joint_RD = torch.cat([x_RK, dy_RN], dim=1).double()
        values_D, vectors_DD = torch.linalg.eigh(torch.cov(joint_RD.t()))
        factor_DD = (vectors_DD * values_D.clamp(min=0).sqrt()).t()

        def gaussian() -> Rows:
            normal_MD = torch.randn(m, len(factor_DD), generator=generator, dtype=torch.float64)
            values_MD = (joint_RD.mean(0) + normal_MD @ factor_DD).float()
            return values_MD[:, :k].contiguous(), values_MD[:, k:].contiguous()

        return gaussian

    def randn() -> Rows:
        x, dy = (rms * torch.randn(m, width, generator=generator) for rms, width in sizes)
        return x, dy

    def reservoir() -> Rows:
        chosen_M = torch.randint(len(x_RK), (m,), generator=generator)
        return x_RK[chosen_M], dy_RN[chosen_M]

    sizes = [(float(part.double().square().mean().sqrt()), part.shape[1]) for part in (x_RK, dy_RN)]
    return {"learned": learned, "drawn": learned, "randn": randn, "reservoir": reservoir}[predictor]


def _errors(draw: Draw, weight_NK: Tensor, n_batches: int, corrections: Mapping[Role, Correction]) -> Errors:
    """Over all batches: the mean of ``mere_floored``, and rms(error)/rms(reference), corrected as ``measure`` does.

    Not the mean of each batch's relative_rms: that is large where a batch's dw happens to be small, so the mean would take
    hundreds of batches to settle.
    """
    sums: dict[Option, tuple[float, float, float]] = {}
    for index in range(n_batches):
        x_MK, dy_MN = draw()
        parts = SiteParts(tensors := SiteTensors(x_MK, dy_MN, [weight_NK]))
        for correction in corrections.values():
            correction.add(tensors)
        for option in fp8_options(*dy_MN.shape, weight_NK.shape[1]):
            if index >= FEW and option.role is not Role.WGRAD:
                continue
            out, reference = parts.multiply(option).double(), parts.reference(option.role)
            floored = mere_floored(out, reference, axis=FLOOR_AXIS[option.role])
            new = floored, (out - reference).square().sum(), reference.square().sum()
            old = sums.get(option, (0.0, 0.0, 0.0))
            sums[option] = (old[0] + float(new[0]), old[1] + float(new[1]), old[2] + float(new[2]))
    errors: Errors = {}
    for option, (floored, error, size) in sums.items():
        batches = n_batches if option.role is Role.WGRAD else min(FEW, n_batches)
        factors = corrections[option.role].factors(option.recipe, batches) if option.role in corrections else Factors()
        floored *= factors.of_values / batches
        rms = factors.of_rms * math.sqrt(error / size) if size > 0 else 0.0
        errors[f"{option.role} {option.recipe}"] = floored, rms
    return errors


@cache
def fp8_options(m: int, n: int, k: int) -> tuple[Option, ...]:
    """Every FP8 recipe of the oracle at every role that takes it."""
    device = device_of(torch.device("cpu"))
    options = [
        Option(name, role)
        for name, kernel in KERNELS.items()
        for role in Role
        if is_oracle(name)
        and "int8" not in name
        and kernel.why_not(GemmProblem.of(role, SiteShape(m, k, n), Format.FP32, device)) is None
    ]
    return tuple({(option.role, str(option.recipe)): option for option in options}.values())
