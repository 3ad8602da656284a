"""Models whose embeddings lie elsewhere than their linear layers, as tables that no GPU holds do."""

import pytest
import torch
from plans import ROWWISE, Tower, batch, plan_for
from torch import Tensor, nn

import loka
from loka.core.environment import current_environment
from loka.core.record import Record
from loka.kernels.device import device_of


class WithTable(nn.Module):
    """Its first parameter is on a device on which nothing can run, and its forward leaves it there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(8, 4, device="meta")
        self.tower = Tower()

    def forward(self, x: Tensor) -> Tensor:
        return self.tower(x)


def probed(model: nn.Module) -> Record:
    probe = loka.Probe(model, every=1)
    for step in range(3):
        with probe.step():
            model(batch(64, step)).square().mean().backward()
    return probe.record()


def test_the_probe_a_plan_and_the_guard_go_by_where_the_layers_are() -> None:
    model = WithTable()
    record = probed(model)
    assert record.environment.device == current_environment(device_of(torch.device("cpu"))).device
    assert record.sites["tower.head"].is_head
    sites = ("tower.bottom", "tower.top.0")
    plan = plan_for(nn.ModuleDict({"tower": model.tower}), dict.fromkeys(sites, ROWWISE))
    checked = loka.check_plan(model, plan, [batch(64, 9)] * 2, loss=lambda m, x: m(x).square().mean(), max_loss_change=1.0)
    assert {site.site for site in plan.sites} == {site.site for site in checked.plan.sites}
    assert loka.apply_plan(model, plan).sites == sites
    guard = loka.Guard(model, record, every=1)
    with guard.step():
        model(batch(64, 4)).square().mean().backward()
    assert not guard.events


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_who_reads_what_is_seen_in_the_precision_of_the_layers(dtype: torch.dtype) -> None:
    """What forward does under autocast may depend on it: without it this one would call no layer."""

    class Asks(WithTable):
        def forward(self, x: Tensor) -> Tensor:
            y = self.tower.bottom(x)
            return self.tower.head(self.tower.top(y)) if y.dtype is dtype else y

    model = Asks()
    probe = loka.Probe(model, every=1)
    with probe.step(), torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        model(batch(64)).square().mean().backward()
    assert probe.record().sites["tower.head"].is_head
