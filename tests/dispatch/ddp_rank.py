"""One rank of test_ddp: trains models under DistributedDataParallel, planned before and after, and saves their weights."""

import sys
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
    parallel = DistributedDataParallel(model)
    if when == "after":
        loka.apply_plan(parallel, plan_for(model, MIXED))
    loka.refresh(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        parallel(batch(seed=10 * step + rank)).square().mean().backward()
        optimizer.step()
    return model.state_dict()


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    for when in ("before", "after"):
        torch.save(train(rank, when), f"{folder}/{when}-{rank}.pt")
    dist.destroy_process_group()
