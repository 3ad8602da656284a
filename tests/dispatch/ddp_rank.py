"""One rank of test_ddp: trains models under DistributedDataParallel, planned before and after, and saves their weights."""

import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from plans import MIXED, batch, plan_for, tower
from torch.nn.parallel import DistributedDataParallel

import loka


def train(rank: int, when: str) -> dict[str, torch.Tensor]:
    model = tower(seed=rank)  # DDP sends rank 0's weights to the others
    if when == "before":
        loka.apply_plan(model, plan_for(model, MIXED))
    model.register_buffer("steps", torch.zeros(()), persistent=False)  # which DDP sends in front of a forward pass
    parallel = DistributedDataParallel(model, find_unused_parameters=when == "checked")
    if when in ("after", "checked"):
        loka.apply_plan(parallel, plan_for(model, MIXED))
    loka.refresh(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        parallel(batch(seed=10 * step + rank)).square().mean().backward()
        optimizer.step()
        if when == "checked" and rank == 0:  # while the other goes on
            check(parallel)
    return model.state_dict()


def check(parallel: DistributedDataParallel) -> None:
    loka.restore(parallel)
    plan, batches = plan_for(parallel.module, MIXED), [batch(seed=seed) for seed in (100, 101)]
    loka.check_plan(parallel, plan, batches, loss=lambda model, x: model(x).square().mean(), max_loss_change=1.0, repeats=1)
    loka.apply_plan(parallel, plan)


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), sys.argv[2]
    patience = timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=patience)
    for when in ("before", "after", "checked"):
        torch.save(train(rank, when), f"{folder}/{when}-{rank}.pt")
    dist.destroy_process_group()
