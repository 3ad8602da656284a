"""Ids to vectors: one table for all features, with gradients for the rows touched only.

Axes:  B examples,  E width of an embedding,  F one-hot features,  G bags,  S ids in a bag,  L steps of the sequence,
N = F + G·S + L ids of an example,  P features that come out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.core.errors import InvalidInput
from loka.data.batch import PADDING, Batch, FeatureSchema
from loka.models.bags import sum_bags


@dataclass(frozen=True)
class _Feature:
    name: str
    n_rows: int  # of the table
    n_ids: int  # of an example
    lowest_id: int  # PADDING where ids may be missing


def _features(schema: FeatureSchema) -> list[_Feature]:
    features = [_Feature(f"one-hot feature {f}", size, 1, 0) for f, size in enumerate(schema.onehot_sizes)]
    features += [_Feature(f"bag {g}", size, schema.bag_length, PADDING) for g, size in enumerate(schema.multihot_sizes)]
    if schema.sequence_length:
        features.append(_Feature("the sequence", schema.sequence_size, schema.sequence_length, PADDING))
    return features


class Embeddings(nn.Module):
    """Look up a batch's ids; returns the tensors that a dense part takes after the dense features.

    ``features_BPE`` holds the one-hot features, then each bag's mean over its ids (zero for an empty bag). The sequence is one
    more bag, unless ``keep_sequence``: then ``sequence_BLE`` (zero at padding) and ``valid_BL`` follow.

    Features share one table, each with its own rows. So the forward pass of a batch is one sum over bags (a one-hot feature is
    a bag of one), and its backward pass is one sparse COO gradient, whose cost depends on the ids in the batch. Padding reads
    the feature's first row, weighted by zero: skipping it would have the GPU wait for the host. On the CPU an id out of range
    is an error. On a GPU, where checking would wait too, it is taken for the feature's last row: check data on the CPU once.
    """

    table: Tensor
    first_P: Tensor  # of an example's ids, the first of each bag
    offset_N: Tensor
    size_N: Tensor
    first_row_N: Tensor
    lowest_N: Tensor

    def __init__(self, schema: FeatureSchema, dim: int, *, keep_sequence: bool = False) -> None:
        super().__init__()
        _check_schema(schema)
        features = _features(schema)
        self.schema = schema
        self.dim = dim
        self.keep_sequence = keep_sequence
        self.n_features = len(features) - (keep_sequence and schema.sequence_length > 0)

        self.table = nn.Parameter(torch.empty(sum(feature.n_rows for feature in features), dim))
        offsets = []
        row = 0
        for feature in features:
            # As in DLRM: the more ids a feature has, the rarer each is, and the nearer to zero it begins. An id that was never
            # trained stays there; noise from those costs more than a slow start.
            bound = feature.n_rows**-0.5
            nn.init.uniform_(self.table[row : row + feature.n_rows], -bound, bound)
            offsets.append(row)
            row += feature.n_rows

        def per_id(values: list[int]) -> Tensor:
            repeats = [[value] * feature.n_ids for value, feature in zip(values, features, strict=True)]
            return torch.tensor([value for repeated in repeats for value in repeated])

        lengths = [feature.n_ids for feature in features[: self.n_features]]
        lengths += [1] * (schema.sequence_length if keep_sequence else 0)
        self.register_buffer("first_P", torch.tensor([0, *lengths]).cumsum(0)[:-1], persistent=False)
        self.register_buffer("offset_N", per_id(offsets), persistent=False)
        self.register_buffer("size_N", per_id([feature.n_rows for feature in features]), persistent=False)
        self.register_buffer("first_row_N", torch.zeros_like(self.size_N), persistent=False)
        self.register_buffer("lowest_N", per_id([feature.lowest_id for feature in features]), persistent=False)

    def forward(self, batch: Batch) -> tuple[Tensor, ...]:
        ids_BN = self._ids(batch)
        if ids_BN.device.type == "cpu":
            self._check_ids(ids_BN)
        valid_BN = ids_BN != PADDING
        n_ids = ids_BN.shape[1]
        # On a GPU, where nobody waits for a check, nothing is read or written past a feature's rows all the same.
        rows_BN = ids_BN.clamp(self.first_row_N, self.size_N - 1) + self.offset_N
        means_BPE = sum_bags(self.table, rows_BN, self._weights(valid_BN), self.first_P)
        if not self.keep_sequence:
            return (means_BPE,)
        features_BPE, sequence_BLE = means_BPE.split((self.n_features, self.schema.sequence_length), dim=1)
        return features_BPE.contiguous(), sequence_BLE.contiguous(), valid_BN[:, n_ids - self.schema.sequence_length :]

    def _weights(self, valid_BN: Tensor) -> Tensor:
        """The weight of each id in the mean of its bag; 0 at padding."""
        schema = self.schema
        n_bags = len(schema.multihot_sizes)
        widths = (len(schema.onehot_sizes), n_bags * schema.bag_length, schema.sequence_length)
        valid_BF, valid_BX, valid_BL = valid_BN.split(widths, dim=1)
        weights = [valid_BF.float()]
        if n_bags:
            weights.append(_shares(valid_BX.unflatten(1, (n_bags, -1))).flatten(1))
        weights.append(valid_BL.float() if self.keep_sequence else _shares(valid_BL))
        return torch.cat(weights, dim=1)

    def _ids(self, batch: Batch) -> Tensor:
        """All ids of each example in the table's order of features."""
        schema = self.schema
        expected: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
            ("onehot_BF", batch.onehot_BF, (len(schema.onehot_sizes),))
        ]
        if schema.multihot_sizes:
            expected.append(("multihot_BGS", batch.multihot_BGS, (len(schema.multihot_sizes), schema.bag_length)))
        if schema.sequence_length:
            expected.append(("sequence_BL", batch.sequence_BL, (schema.sequence_length,)))
        ids = []
        for name, tensor, shape in expected:
            if tensor is None or tuple(tensor.shape[1:]) != shape:
                got = "none" if tensor is None else f"{tuple(tensor.shape[1:])}"
                raise InvalidInput(f"the model was built for {name} of shape {shape} an example, the batch has {got}")
            ids.append(tensor.flatten(1))
        return torch.cat(ids, dim=1)

    def _check_ids(self, ids_BN: Tensor) -> None:
        bad_BN = (ids_BN < self.lowest_N) | (ids_BN >= self.size_N)
        if bad_BN.any():
            example, n = bad_BN.nonzero()[0].tolist()
            names = [feature.name for feature in _features(self.schema) for _ in range(feature.n_ids)]
            wrong, size = int(ids_BN[example, n]), int(self.size_N[n])
            raise InvalidInput(
                f"example {example} has id {wrong} in {names[n]}, which has the {size} ids from 0 to {size - 1}; "
                f"hash or clip ids when reading them, or build the model with a larger size"
            )


def _shares(valid_XS: Tensor) -> Tensor:
    """The weights of a mean over the valid ones of S."""
    return valid_XS / valid_XS.sum(-1, keepdim=True).clamp(min=1)


def _check_schema(schema: FeatureSchema) -> None:
    sizes = (*schema.onehot_sizes, *schema.multihot_sizes)
    if schema.n_dense < 0 or any(size < 1 for size in sizes):
        raise InvalidInput(f"a schema needs n_dense ≥ 0 and at least one id in every feature, got {schema}")
    if schema.multihot_sizes and schema.bag_length < 1:
        raise InvalidInput(f"a schema with bags needs a bag_length of at least 1, got {schema}")
    if (schema.sequence_size > 0) != (schema.sequence_length > 0):
        raise InvalidInput(f"a sequence needs both sequence_size and sequence_length, got {schema}")
    if not sizes and not schema.sequence_length:
        raise InvalidInput(f"a schema needs at least one categorical feature, got {schema}")
