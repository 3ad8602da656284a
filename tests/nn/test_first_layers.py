"""Which layers read the model's inputs: planted between each layer and the inputs is one thing that may stand there."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.nn.blocks import find_blocks
from loka.nn.graph import Method


class Readers(nn.Module):
    """Each layer is named after what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(10, 4), nn.LayerNorm(4)
        self.rows, self.query = nn.Parameter(torch.ones(10, 4)), nn.Parameter(torch.ones(1, 4))
        self.inputs, self.logs, self.filled, self.activated, self.dropped = (nn.Linear(4, 4) for _ in range(5))
        self.normed, self.normed_by_function, self.output_of_a_layer = (nn.Linear(4, 4) for _ in range(3))
        self.embedded, self.embedded_by_function, self.bags_by_function = (nn.Linear(4, 4) for _ in range(3))
        self.parameter, self.inputs_and_output_of_a_layer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.joined_inputs, self.input_beside_learned = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor, other: Tensor, ids: Tensor, is_missing: Tensor) -> Tensor:
        learned = self.inputs(x)
        joined = torch.cat([x.log1p(), other.masked_fill(is_missing, 0.0)], dim=-1)
        outputs = [
            self.logs(x.log1p()),
            self.filled(x.masked_fill(is_missing, 0.0)),
            self.activated(x.relu()),
            self.dropped(F.dropout(x, 0.1)),
            self.normed(self.norm(x)),
            self.normed_by_function(F.layer_norm(x, (4,))),
            self.output_of_a_layer(learned.relu()),
            self.embedded(self.table(ids)),
            self.embedded_by_function(F.embedding(ids, self.rows)),
            self.bags_by_function(F.embedding_bag(ids.unsqueeze(1), self.rows)),
            self.parameter(self.query),
            self.inputs_and_output_of_a_layer(other) + self.inputs_and_output_of_a_layer(learned),
            self.joined_inputs(joined),
            self.input_beside_learned(torch.cat([other, learned], dim=-1)),
        ]
        return torch.stack([F.silu(output).sum() for output in outputs])


@pytest.mark.parametrize("with_example", [True, False])
def test_nothing_learned_and_no_norm_may_stand_between(with_example: bool) -> None:
    example = (torch.rand(3, 4), torch.rand(3, 4), torch.tensor([1, 0, 9]), torch.rand(3, 4) > 0.5)
    found = find_blocks(Readers(), example if with_example else None)
    assert found.graph.method is (Method.RUN if with_example else Method.TRACE)
    assert {block.site: block.is_first for block in found} == {
        "inputs": True,
        "logs": True,
        "filled": True,
        "activated": True,
        "dropped": True,
        "normed": False,
        "normed_by_function": False,
        "output_of_a_layer": False,
        "embedded": False,
        "embedded_by_function": False,
        "bags_by_function": False,
        "parameter": False,
        "inputs_and_output_of_a_layer": True,  # in one of its two calls
        "joined_inputs": True,
        "input_beside_learned": False,
    }


def test_an_input_copied_into_memory_that_was_made_before_is_followed() -> None:
    class Copied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            room = torch.empty(3, 4)
            room[:, :2].copy_(x[:, :2])
            room[:, 2:].copy_(x[:, 2:])
            return self.norm(self.dense(room))

    assert find_blocks(Copied(), (torch.rand(3, 4),)).of("dense").is_first is True


def test_a_part_that_learns_and_cannot_be_traced_may_hand_an_input_on() -> None:
    class Front(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4)

        def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
            return x.nan_to_num() if x.isnan().any() else x, self.table(ids)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front, self.dense, self.norm = Front(), nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            dense, embedded = self.front(x, ids)
            return self.norm(self.dense(dense)) * embedded

    assert find_blocks(Model()).of("dense").is_first is None
    assert find_blocks(Model(), (torch.rand(3, 4), torch.tensor([1, 0, 9]))).of("dense").is_first is True


class Signed(nn.Module):
    """A forward that branches on a value, which no trace can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.tower(x if x.sum() > 0 else -x)


@pytest.mark.parametrize(
    ("model", "traced", "recorded"),
    [
        (Signed(), {"tower.0": None, "tower.2": False}, {"tower.0": True, "tower.2": False}),
        (
            nn.Sequential(nn.Linear(4, 4), Signed(), nn.Linear(4, 4)),
            {"0": True, "1.tower.0": None, "1.tower.2": False, "2": False},
            {"0": True, "1.tower.0": False, "1.tower.2": False, "2": False},
        ),
    ],
    ids=["the model", "a part"],
)
def test_what_an_untraceable_part_hands_on_is_known_from_a_run_alone(
    model: nn.Module, traced: dict[str, bool | None], recorded: dict[str, bool]
) -> None:
    assert {block.site: block.is_first for block in find_blocks(model)} == traced
    assert {block.site: block.is_first for block in find_blocks(model, (torch.randn(3, 4),))} == recorded
