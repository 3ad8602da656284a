"""For the tests of the Guard: a tower in 8 bits, watched."""

import torch
from plans import batch, plan_for, tower
from torch import Tensor, nn

import loka
from loka.core.record import Record
from loka.kernels.executor import SiteKernels

INT8 = SiteKernels.same("reference.int8_rowwise")


def train_step(model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


def record_of(model: nn.Module) -> Record:
    probe = loka.Probe(model, every=1)
    for seed in range(4):
        with probe.step():
            train_step(model, batch(200, seed))
    probe.detach()
    return probe.record()


def guarded(kernels: SiteKernels = INT8, **options: object) -> tuple[nn.Module, loka.Guard]:
    model = tower()
    record = record_of(model)
    loka.apply_plan(model, plan_for(model, {"bottom": kernels, "top.0": kernels}))
    return model, loka.Guard(model, record, **options)  # type: ignore[arg-type]


def run(model: nn.Module, guard: loka.Guard, batches: list[Tensor]) -> None:
    for x in batches:
        with guard.step():
            train_step(model, x)


def drifted(x: Tensor) -> Tensor:
    return torch.cat([1000 * x[:, :3], x[:, 3:]], 1)
