"""Norms in front of layers, which a fused block may run."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import loka
from loka.nn.blocks import Entry, Follower, find_blocks


class Gained(loka.BlockNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Entries(nn.Module):
    """Norms in front of layers: of one alone, of one that reads several vectors as one, of two, behind a layer of its own,
    read as well, of another kind, behind dropout, of vectors whose blocks differ, in front of something that is run before
    the layer, called elsewhere too, of a class of the user's own, seen as another shape where a copy may be needed, and in
    front of another layer's norm."""

    def __init__(self) -> None:
        super().__init__()
        names = ("alone", "of_two", "behind", "read", "dropped", "early", "busy", "viewed", "first", "second")
        self.norms = nn.ModuleDict({name: loka.BlockNorm(8) for name in names})
        self.flattened, self.uneven, self.other = loka.BlockNorm(8, block=4), loka.BlockNorm(8, block=3), nn.LayerNorm(8)
        self.gained = Gained(8)
        names = ("plain", "left", "right", "front", "back", "beside", "dropout", "layer", "late", "often", "own", "seen")
        names = (*names, "of_first", "of_second")
        self.layers = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})
        self.wide, self.uneven_wide = nn.Linear(24, 8), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        layer, norm = self.layers, self.norms
        two, read = norm["of_two"](x), norm["read"](x)
        outputs = [
            layer["plain"](norm["alone"](x)),
            layer["left"](two),
            layer["right"](two),
            layer["back"](norm["behind"](layer["front"](x))),
            layer["beside"](read) + read,
            layer["dropout"](F.dropout(norm["dropped"](x))),
            layer["layer"](self.other(x)),
            layer["often"](norm["busy"](x)) + norm["busy"](x + 1),
            layer["own"](self.gained(x)),
            layer["seen"](norm["viewed"](x).view(-1, 3, 8)),
        ]
        first, second = norm["first"](x), norm["second"](x)
        outputs += [layer["of_first"](first), layer["of_second"](second)]
        early = norm["early"](x)
        x = x.clamp_(min=0)  # what the norm has read is not what a block would read
        outputs.append(layer["late"](early))
        wide = self.wide(self.flattened(x).flatten(1)) + self.uneven_wide(self.uneven(x).reshape(-1, 24))
        return torch.cat([*outputs, wide[:, None]], dim=1)


@pytest.mark.parametrize("with_example", [False, True])
def test_a_norm_in_front_is_the_sites_where_nothing_else_has_it(with_example: bool) -> None:
    found = find_blocks(Entries(), (torch.randn(5, 3, 8),) if with_example else None)
    entries = {block.site.removeprefix("layers."): block.entry for block in found}
    assert entries.pop("plain") == Entry("norms.alone", 256)
    assert entries.pop("wide") == Entry("flattened", 4)
    assert set(entries.values()) == {None}
    assert found.of("layers.front").norm == Follower("BlockNorm", "norms.behind", 256, 1e-5)
