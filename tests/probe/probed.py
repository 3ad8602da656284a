"""Models trained for a few steps under a Probe."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import loka
from loka.core.record import Record

Step = Callable[[nn.Module], Tensor]


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.LayerNorm(20), nn.SiLU(), nn.Dropout(0.2), nn.Linear(20, 1))


def probe_steps(model: nn.Module, step: Step, steps: int = 1, **options: object) -> Record:
    probe = loka.Probe(model, every=1, **options)
    for _ in range(steps):
        with probe.step():
            step(model).backward()
    probe.detach()
    return probe.record()
