"""Two ranks of DistributedDataParallel over gloo, against the same steps in one process."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from plans import MIXED, batch, plan_for, tower
from torch.nn.parallel import DistributedDataParallel

import loka
from loka.core.errors import InvalidInput


def test_a_static_graph_is_checked_behind_its_first_step(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(tower(), static_graph=True)

        def check() -> loka.Plan:
            plan, batches = plan_for(parallel.module, MIXED), [batch(seed=seed) for seed in (100, 101)]
            limits = {"max_loss_change": 1.0, "min_speedup": 0.0}
            return loka.check_plan(parallel, plan, batches, loss=lambda m, x: m(x).square().mean(), **limits, repeats=1).plan

        with pytest.raises(InvalidInput, match="behind a training step"):
            check()
        parallel(batch()).mean().backward()
        before = [weight.grad.clone() for weight in parallel.parameters()]
        assert len([site for site in check().sites if site.is_low_precision]) == len(MIXED)
        assert all(torch.equal(weight.grad, grad) for weight, grad in zip(parallel.parameters(), before, strict=True))
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_a_planned_model_trains_alike_on_both_ranks(tmp_path: Path) -> None:
    """Also where one of them checks a plan by itself between two steps."""
    script = Path(__file__).with_name("ddp_rank.py")
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), tmp_path], stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=100)
        assert rank.returncode == 0, errors
    # In one process: each rank's gradient by itself, and their mean.
    model = tower(seed=0)
    loka.apply_plan(model, plan_for(model, MIXED))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in (0, 1):
            (0.5 * model(batch(seed=10 * step + rank)).square().mean()).backward()
        optimizer.step()
    for when in ("before", "after", "checked"):
        zero, one = (torch.load(tmp_path / f"{when}-{rank}.pt", weights_only=True) for rank in (0, 1))
        for name, value in model.state_dict().items():
            assert torch.equal(zero[name], one[name])
            torch.testing.assert_close(zero[name], value, rtol=1e-3, atol=1e-6)
