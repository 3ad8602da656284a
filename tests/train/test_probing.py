"""Training a user's workload under the Probe."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import loka
from loka.core.errors import InvalidInput
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
    workload = loka.Workload(model, batches, lambda model, batch: model(*batch).square().mean())
    record, ended_by = probe_workload(workload, steps=4, every=2)
    assert (record.steps_seen, ended_by) == (4, None)
    assert all(not torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


class Branching(nn.Module):
    """By tracing its data flow cannot be known."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor, *, factor: float) -> Tensor:
        x = 2 * x if x.sum() > 1e9 else x
        return factor * self.head(self.second(self.norm(self.first(x)).relu()).relu())


def test_mods_are_made_by_the_first_call_however_its_arguments_are_given() -> None:
    workload = loka.Workload(Branching(), [torch.randn(8, 16)], lambda model, x: model(x, factor=0.5).square().mean())
    probe_workload(workload, steps=1, every=1, mods=["no_bias", "block_norm"])
    model = workload.model
    assert isinstance(model.norm, loka.BlockNorm)
    assert isinstance(model.second, nn.Linear)
    assert model.second.bias is None


def test_the_batch_that_shows_mods_the_model_is_trained_on_too() -> None:
    batches = iter([torch.randn(8, 16) for _ in range(3)])
    workload = loka.Workload(Branching(), batches, lambda model, x: model(x, factor=0.5).square().mean())
    record, _ = probe_workload(workload, steps=9, every=1, mods=["no_bias"])
    assert record.steps_seen == 3


def rows_of(*sizes: int) -> loka.Workload:
    """A tower on batches of ``sizes`` rows. Of a batch of none the loss is no number."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))
    batches = [torch.randn(size, 16) for size in sizes]
    return loka.Workload(model, batches, lambda model, x: model(x).square().mean())


def test_what_was_learned_before_a_loss_that_is_no_number_is_kept() -> None:
    """And no weight of the Record has been trained by it, though the step is not one that the Probe samples."""
    record, ended_by = probe_workload(rows_of(32, 32, 32, 0, 32), steps=5, every=2)
    assert "the loss of step 4 is nan: look for NaN in its batch, or for an empty one" in str(ended_by)
    assert record.steps_seen == 4
    assert record.sites["0"].was_called
    assert all(site.weight_NK.isfinite().all() for site in record.sites.values())


def test_what_was_learned_before_an_error_of_the_workload_is_kept() -> None:

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() if len(x) == 32 else {}["no such key"]

    record, ended_by = probe_workload(dataclasses.replace(rows_of(32, 32, 17), loss=loss), steps=5, every=1)
    assert isinstance(ended_by, KeyError)
    assert record.sites["2"].was_called


def test_an_error_before_anything_was_learned_is_raised() -> None:
    with pytest.raises(InvalidInput, match="the loss of step 1 is nan"):
        probe_workload(rows_of(0, 32), steps=5, every=1)


def test_of_a_model_whose_weights_are_no_numbers_no_record_is_made_and_that_is_told() -> None:
    """But of a layer that nothing calls they say nothing of what the others saw."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if len(x) == 17:
            raise KeyboardInterrupt
        return model(x).square().mean()

    workload = dataclasses.replace(rows_of(32, 32, 17), loss=loss)
    workload.model.register_module("uncalled", nn.Linear(4, 4))
    torch.nn.init.constant_(workload.model.uncalled.weight, torch.nan)
    workload.model.forward = lambda x: workload.model[2](workload.model[1](workload.model[0](x)))  # type: ignore[method-assign]
    record, ended_by = probe_workload(workload, steps=5, every=1)
    assert isinstance(ended_by, KeyboardInterrupt)
    assert record.sites["2"].was_called
    workload.model[2].weight.register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(InvalidInput, match=r"the weights of 2 are NaN or infinite after step \d, so that no Record is made"):
        probe_workload(workload, steps=5, every=1)
