"""What a Probe learns of sites with 3-D inputs, several calls or none, shared weights and checkpointing."""

import pytest
import torch
from probed import probe_steps
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loka.core.errors import InvalidInput
from loka.core.record import Record


def test_the_gradient_of_a_shared_or_a_frozen_weight_is_nobodys() -> None:
    """Of a shared weight it is the sum over both sites; both are learned from their rows alone."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    model[2].weight.requires_grad_(False)
    record = probe_steps(model, lambda model: model(torch.randn(32, 6)).sum())
    for site in record.sites.values():
        assert site.statistics["gradients"].tensors["steps"] == 0
        assert site.sample(8, torch.Generator())[1].shape == (8, 6)


class TiedEmbedding(nn.Module):
    """Scores of items by the very vectors that they are looked up with."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.scores = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.scores.weight = self.items.weight

    def forward(self, item_M: Tensor) -> Tensor:
        return self.scores(self.items(item_M)).square().sum()


def test_the_gradient_of_a_weight_that_is_an_embedding_too_is_nobodys() -> None:
    site = probe_steps(TiedEmbedding(), lambda model: model(torch.arange(10))).sites["scores"]
    assert site.statistics["gradients"].tensors["steps"] == 0
    assert not site.statistics["gradients"].tensors["dw_NK"].any()


class Unusual(nn.Module):
    """Sites with 3-D inputs, called twice, with a shared weight, inside a checkpoint, and never."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.twice, self.tied, self.unused, self.saved, self.head = (nn.Linear(8, 8) for _ in range(6))
        self.tied.weight = self.twice.weight

    def forward(self, x_BTK: Tensor) -> Tensor:
        x_BK = self.tokens(x_BTK).mean(1)
        x_BK = self.tied(self.twice(torch.relu(self.twice(x_BK))))
        return self.head(checkpoint(self.saved, x_BK, use_reentrant=False)).sum()


@pytest.fixture(scope="module")
def unusual() -> Record:
    torch.manual_seed(0)
    return probe_steps(Unusual(), lambda model: model(torch.randn(6, 5, 8)), steps=2)


def test_rows_of_3d_inputs_are_those_of_all_their_leading_axes(unusual: Record) -> None:
    assert unusual.sites["tokens"].calls == {30: 1.0}


def test_a_site_called_twice_learns_from_both_calls(unusual: Record) -> None:
    site = unusual.sites["twice"]
    assert site.calls == {6: 2.0}
    assert "called 2 times" in site.notes
    assert site.statistics["moments"].tensors["count"] > 2 * 6


def test_a_shared_weight_is_said(unusual: Record) -> None:
    assert unusual.sites["tied"].notes == ("shares its weight with twice",)


def test_a_checkpointed_site_counts_once_and_trains(unusual: Record) -> None:
    assert unusual.sites["saved"].calls == {6: 1.0}
    assert unusual.sites["saved"].trains


def test_a_site_never_called_is_said(unusual: Record) -> None:
    site = unusual.sites["unused"]
    assert "never called" in site.notes
    assert site.calls == {}
    assert not site.was_called
    with pytest.raises(InvalidInput, match="site unused was never called"):
        _ = site.mean_K
