"""LoKA in a training loop of your own. The lines marked ← are all it takes.

Run it: python examples/own_model.py run
"""

import sys

import torch
from torch import nn

import loka


class ClickModel(nn.Module):
    """In place of your model: any nn.Module with linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.EmbeddingBag(1000, 64)
        self.tower = nn.Sequential(
            nn.Linear(64 + 13, 512), nn.LayerNorm(512), nn.SiLU(),
            nn.Linear(512, 512), nn.LayerNorm(512), nn.SiLU(),
        )  # fmt: skip
        self.head = nn.Linear(512, 1)

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        return self.head(self.tower(torch.cat([self.users(ids), dense], dim=1))).squeeze(1)


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def batches(count: int, size: int = 512) -> list[Batch]:
    """In place of your data: clicks whose probability depends on the first dense feature."""
    dense = torch.randn(count, size, 13)
    clicked = torch.bernoulli(torch.sigmoid(2 * dense[..., 0] - 1))
    return list(zip(torch.randint(0, 1000, (count, size, 5)), dense, clicked, strict=True))


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    ids, dense, clicked = batch
    return nn.functional.binary_cross_entropy_with_logits(model(ids, dense), clicked)


def main(run: str) -> None:
    torch.manual_seed(0)
    model = ClickModel()
    print(loka.apply_mods(model))  # ← before the optimizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    probe = loka.Probe(model, every=10)  # ←

    for batch in batches(60):
        with probe.step():  # ←
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    record = probe.record()
    record.save(run)
    survey = loka.measure(record, out=run)  # ← minutes for a large model, but only once: it serves any number of plans
    plan = loka.make_plan(survey, goal="serving")  # ← or goal="training"
    checked = loka.check_plan(model, plan, batches(4), loss=loss_of)  # ← the whole model; sites that harm it are given back
    print(checked)
    checked.plan.save(run)

    model.eval()
    ids, dense, _ = batches(1)[0]
    with torch.no_grad():
        before = model(ids, dense)
        loka.apply_plan(model, checked.plan)  # ← in place; loka.restore(model) undoes it
        after = model(ids, dense)
    sites = checked.plan.sites
    low = sum(site.is_low_precision for site in sites)
    print(f"{low} of {len(sites)} sites in low precision; logits moved by at most {(after - before).abs().max():.4f}")
    print(f"wrote {loka.write_report(run)}: open it in a browser")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "run")
