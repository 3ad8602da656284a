"""A recommendation model: an embedding table in front of a dense part."""

import torch
from torch import Tensor, nn

from loka.data.batch import Batch, FeatureSchema
from loka.models.embeddings import Embeddings


class Recommender(nn.Module):
    """Logits for a batch: ``dense_part(dense features, *embeddings(batch))``.

    All sparse work and all row-sparse gradients are in ``embeddings``. ``dense_part`` takes and returns plain tensors: it alone
    is compiled, probed and moved to low precision.
    """

    def __init__(self, schema: FeatureSchema, embeddings: Embeddings, dense_part: nn.Module) -> None:
        super().__init__()
        self.schema = schema
        self.embeddings = embeddings
        self.dense_part = dense_part

    @torch.no_grad()
    def dense_inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """The arguments of the dense part for ``batch``: an example for all that runs or traces it alone, such as Mods."""
        return (batch.dense_BD, *self.embeddings(batch))

    def forward(self, batch: Batch) -> Tensor:
        logits_B = self.dense_part(batch.dense_BD, *self.embeddings(batch))
        return logits_B.float()  # under autocast the head's output is bf16, too coarse for a loss
