"""Training a user's workload under the Probe."""

import torch
from torch import Tensor, nn

import loka
from loka.train.probing import probe_workload


class TwoDomains(nn.Module):
    """A table for each of two kinds of batches, with sparse gradients: the first batch reads one of them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.rare = nn.Embedding(10, 4, sparse=True), nn.EmbeddingBag(10, 4, sparse=True)
        self.linear = nn.Linear(4, 1)

    def forward(self, ids_B: Tensor, is_rare: bool) -> Tensor:
        return self.linear(self.rare(ids_B[:, None]) if is_rare else self.usual(ids_B))


def test_a_table_that_the_first_batch_does_not_read_is_trained_later() -> None:
    model, batches = TwoDomains(), [(torch.arange(10), False), (torch.arange(10), True)]
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    record = probe_workload(loka.Workload(model, batches, lambda model, batch: model(*batch).square().mean()), steps=4, every=2)
    assert record.steps_seen == 4
    assert all(not torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
