from collections.abc import Iterator

import msgspec
import pytest
import torch

from loka.data.batch import Batch, FeatureSchema
from loka.data.dataset import DATASETS, Source


class PlantedOptions(msgspec.Struct, frozen=True):
    inf_at: int = -1  # the step whose batch has an infinite dense value
    test_examples: int = 256


class Planted:
    """A click follows from the first id and the first dense value alone. ``seed`` and the step decide a batch."""

    schema = FeatureSchema(n_dense=3, onehot_sizes=(5, 7))
    bad_rows = 0

    def __init__(self, seed: int, device: torch.device, options: PlantedOptions) -> None:
        self.seed, self.device, self.options = seed, device, options

    def batches_per_epoch(self, batch_size: int) -> int:
        return 12

    def train(self, batch_size: int, *, start: int = 0) -> Iterator[Batch]:
        step = start
        while True:
            yield self._batch(1_000_003 * self.seed + step, batch_size, is_bad=step == self.options.inf_at)
            step += 1

    def test(self, batch_size: int) -> Iterator[Batch]:
        if self.options.test_examples:
            yield self._batch(-1, self.options.test_examples)

    def _batch(self, seed: int, batch_size: int, is_bad: bool = False) -> Batch:
        generator = torch.Generator().manual_seed(seed % 2**31)
        dense_BD = torch.randn(batch_size, 3, generator=generator)
        ids = [torch.randint(size, (batch_size,), generator=generator) for size in self.schema.onehot_sizes]
        onehot_BF = torch.stack(ids, 1)
        teacher_logit_B = 2 * dense_BD[:, 0] + 2 * (onehot_BF[:, 0] - 2)
        label_B = (torch.rand(batch_size, generator=generator) < teacher_logit_B.sigmoid()).float()
        if is_bad:
            dense_BD[0, 1] = float("inf")
        return Batch(dense_BD, onehot_BF, label_B, teacher_logit_B=teacher_logit_B).to(self.device)


@pytest.fixture
def planted() -> Iterator[str]:
    """The name of a small data set with a known best NE."""
    DATASETS.names()  # the others first: adding ours must not stand in for finding them
    DATASETS.add("planted", Source(PlantedOptions, lambda path, seed, device, options: Planted(seed, device, options)))
    yield "planted"
    DATASETS.remove("planted")
