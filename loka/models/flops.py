"""How much arithmetic a model's dense part takes for one example."""

import torch
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from loka.data.batch import Batch, FeatureSchema
from loka.models.recommender import Recommender


def dense_flops(model: Recommender) -> int:
    """Floating-point operations of one example's forward pass through the dense part: 2 for each multiply-add of a GEMM.

    Counted on shapes alone (torch's meta device), whatever device the model is on; nothing is computed. A training step
    takes about three times as many.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    with FlopCounterMode(display=False) as counter:  # the embeddings only copy and add, which does not count
        functional_call(model, shapes, (_meta_batch(model.schema),))
    return counter.get_total_flops()


def _meta_batch(schema: FeatureSchema) -> Batch:
    """The shapes of a batch of one example."""

    def ids(*shape: int) -> torch.Tensor:
        return torch.empty((1, *shape), dtype=torch.int64, device="meta")

    return Batch(
        dense_BD=torch.empty(1, schema.n_dense, device="meta"),
        onehot_BF=ids(len(schema.onehot_sizes)),
        label_B=torch.empty(1, device="meta"),
        multihot_BGS=ids(len(schema.multihot_sizes), schema.bag_length),
        sequence_BL=ids(schema.sequence_length),
    )
