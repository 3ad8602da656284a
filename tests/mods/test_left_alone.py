"""What Mods leave alone, and the reason they give."""

from collections.abc import Callable

import pytest
import torch
from report_lines import changed, reasons
from torch import Tensor, nn

import loka

READS_INPUTS = "reads the model's inputs: without its bias a norm would hide how large they are"


def test_what_reads_the_inputs_and_heads_of_several_outputs(mlp: nn.Sequential) -> None:
    report = loka.apply_mods(mlp, "no_bias")
    assert changed(report) == ["no_bias 1", "no_bias 3"]
    assert reasons(report) == {"no_bias 0": READS_INPUTS, "no_bias 6": "is a prediction head: its output is the model's"}
    assert mlp[0].bias is not None
    assert mlp[6].bias is not None


def test_what_may_be_a_head() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.hidden, self.heads = nn.Linear(6, 6), nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.hidden(self.first(x)).relu()
            return self.heads(y) if y.sum() > 0 else self.heads(-y)

    unsure = "may be a prediction head: who reads its output shows only in a run, so pass example="
    report = loka.apply_mods(Branching())
    assert not report.changes
    assert reasons(report) == {"no_bias first": unsure, "no_bias hidden": unsure, "no_bias heads": unsure}
    report = loka.apply_mods(Branching(), example=(torch.randn(4, 6),))
    assert changed(report) == ["no_bias hidden"]
    head = "is a prediction head: its output is the model's"
    assert reasons(report) == {"no_bias first": READS_INPUTS, "no_bias heads": head}


def test_what_may_read_the_inputs() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
            self.head = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.tower(x if x.sum() > 0 else -x))

    head = "is a prediction head: it has one output"
    for example, why in [
        (None, "may read the model's inputs: that shows only in a run, so pass example="),
        ((torch.randn(4, 6),), READS_INPUTS),
    ]:
        report = loka.apply_mods(Branching(), example=example)
        assert changed(report) == ["no_bias tower.2"]
        assert reasons(report) == {"no_bias tower.0": why, "no_bias head": head}


def test_subclasses_and_look_alikes() -> None:
    class MyLinear(nn.Linear):
        pass

    class MyNorm(nn.LayerNorm):
        pass

    class Swish(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sigmoid()

    class RMSNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / x.square().mean(-1, keepdim=True).sqrt()

    model = nn.Sequential(MyLinear(4, 4), MyNorm(4), Swish(), RMSNorm(), nn.BatchNorm1d(4), nn.Linear(4, 1))
    report = loka.apply_mods(model)
    assert not report.changes
    assert reasons(report) == {
        "block_norm 1": "is a MyNorm: only torch.nn.LayerNorm and torch.nn.RMSNorm are changed",
        "block_norm 3": "is a RMSNorm: only torch.nn.LayerNorm and torch.nn.RMSNorm are changed",
        "block_norm 4": "is a BatchNorm1d: only torch.nn.LayerNorm and torch.nn.RMSNorm are changed",
        "hard_swish 2": "is a Swish: only torch.nn.SiLU is changed",
        "no_bias 0": "is a MyLinear: only torch.nn.Linear and loka.nn.linear.LokaLinear are changed",
        "no_bias 1": "is a MyNorm: only torch.nn.LayerNorm is changed",
        "no_bias 4": "is a BatchNorm1d: only torch.nn.LayerNorm is changed",
        "no_bias 5": "is a prediction head: it has one output",
    }


def test_an_activation_that_may_take_more_or_give_more() -> None:
    class Gated(nn.SiLU):
        def forward(self, input: Tensor, gate: float = 1.0) -> Tensor:
            return gate * super().forward(input)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act, self.top, self.head = nn.Linear(6, 8), Gated(), nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.top(self.act(self.first(x), 100.0)))

    model, x = Model(), torch.randn(4, 6)
    expected = model(x)
    report = loka.apply_mods(model, "insert_norm")
    assert reasons(report)["insert_norm act"].startswith("is a Gated: only torch.nn.ReLU and torch.nn.LeakyReLU and ")
    assert torch.equal(model(x), expected)


def test_a_norm_that_holds_more_and_one_that_says_more() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    model[1].gain, model[3].mult = nn.Parameter(torch.ones(4)), 2.0  # type: ignore[assignment]
    report = loka.apply_mods(model, ["block_norm"])
    assert reasons(report)["block_norm 1"].startswith("holds gain too")
    assert isinstance(model[3], loka.BlockNorm)
    assert model[3].mult == 2.0


def test_one_with_an_attribute_that_its_successor_has_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    model[1].n_features = 4  # type: ignore[assignment]
    report = loka.apply_mods(model)
    assert reasons(report)["block_norm 1"].startswith("has an attribute 'n_features' put on it, which the BlockNorm")
    assert [type(model[index]) for index in (1, 3)] == [nn.LayerNorm, loka.BlockNorm]


def test_what_has_been_tampered_with() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.SiLU(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    torch.nn.utils.parametrizations.weight_norm(model[0])
    model[1].register_forward_hook(lambda *_: None)
    model[2].register_full_backward_hook(lambda *_: None)
    model[3].forward = lambda x: x  # type: ignore[method-assign, assignment]
    report = loka.apply_mods(model)
    assert reasons(report) | {"no_bias 5": ""} == {
        "no_bias 0": "is parametrized",
        "block_norm 1": "has hooks, which a new module would lose",
        "hard_swish 2": "has hooks, which a new module would lose",
        "no_bias 3": "has a forward of its own, put on the instance",
        "no_bias 5": "",
    }
    assert changed(report) == ["block_norm 4", "no_bias 1"]  # a bias can go in place: the hook stays


def test_a_norm_over_several_axes() -> None:
    model = nn.Sequential(nn.LayerNorm((3, 4)), nn.Flatten(), nn.Linear(12, 1))
    report = loka.apply_mods(model, "block_norm")
    assert reasons(report) == {"block_norm 0": "normalizes the last 2 axes (3, 4) together, a BlockNorm the blocks of one axis"}


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_without_eps(norm: type[nn.LayerNorm | nn.RMSNorm]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), norm(4, eps=0.0), nn.Linear(4, 4), norm(4), nn.Linear(4, 1))
    report = loka.apply_mods(model, "block_norm")
    assert changed(report) == ["block_norm 3"]
    assert reasons(report) == {"block_norm 1": "has an eps of 0: a BlockNorm's is above 0, or a row of zeros would be 0/0"}


def test_parts_of_torchs_own_modules() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten(), nn.Linear(24, 1))
    report = loka.apply_mods(model)
    assert not report.changes
    assert reasons(report)["block_norm 0.norm1"] == "is inside TransformerEncoderLayer, which reads its parameters directly"
    assert "no_bias 0.self_attn.out_proj" in reasons(report)
    model.eval()(torch.randn(2, 3, 8))  # its fast path reads them


def test_the_model_itself() -> None:
    norm = nn.LayerNorm(4)
    assert reasons(loka.apply_mods(norm, "block_norm")) == {
        "block_norm ": "is the model itself: put it into another module to have it changed"
    }


@pytest.mark.parametrize("with_example", [True, False])
def test_layers_whose_parameters_others_read(with_example: bool) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.read, self.unused, self.called, self.head = (nn.Linear(4, 4) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x) @ self.read.weight.T + self.read.bias
            return self.head(self.called(x).relu())

    model = Reads()
    report = loka.apply_mods(model, example=(torch.randn(2, 4),) if with_example else None)
    assert changed(report) == ["no_bias called"]
    assert "its parameters are read by a call of" in reasons(report)["no_bias read"]
    assert reasons(report)["no_bias unused"] == "is never called, so it may serve a purpose of its own"
    model(torch.randn(2, 4))


def test_linear_layers_of_a_branch_that_the_example_does_not_take_but_not_its_norms() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            towers = {task: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 8)) for task in "ab"}
            self.first, self.towers, self.head = nn.Linear(6, 8), nn.ModuleDict(towers), nn.Linear(8, 1)

        def forward(self, x: Tensor, task: str) -> Tensor:
            return self.head(self.towers[task](self.first(x)))

    model, x = Branches(), torch.randn(4, 6)
    report = loka.apply_mods(model, example=(x, "a"))
    replaced = [f"{mod} towers.{task}.{i}" for mod, i in (("block_norm", 1), ("hard_swish", 2)) for task in "ab"]
    assert changed(report) == [*replaced, "no_bias towers.a.0", "no_bias towers.a.3"]
    assert [name for name, why in reasons(report).items() if "is never called" in why] == [
        "no_bias towers.b.0",
        "no_bias towers.b.3",
    ]
    model(x, "b")


@pytest.mark.parametrize("with_example", [False, True])
def test_a_norm_whose_weight_forward_reads(with_example: bool) -> None:
    class Gained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.other, self.head = (
                nn.Linear(6, 8),
                nn.LayerNorm(8),
                nn.LayerNorm(8),
                nn.Linear(8, 1),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.other(self.norm(self.first(x)) * self.norm.weight))

    model, x = Gained(), torch.randn(4, 6)
    report = loka.apply_mods(model, "block_norm", example=(x,) if with_example else None)
    assert changed(report) == ["block_norm other"]
    assert reasons(report) == {"block_norm norm": "its parameters are read by a call of mul, not by itself"}
    model(x)


def test_an_activation_that_serves_several() -> None:
    class Shared(nn.Module):
        def __init__(self, widths: list[int]) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip([4, *widths], widths, strict=False))
            self.act, self.head = nn.ReLU(), nn.Linear(widths[-1], 1)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = self.act(layer(x))
            return self.head(x)

    report = loka.apply_mods(Shared([8, 6]), "insert_norm")
    assert reasons(report) == {"insert_norm act": "serves layers of widths 6, 8: give each an activation of its own"}
    same = Shared([8, 8])
    assert changed(loka.apply_mods(same, "insert_norm")) == ["insert_norm act"]
    assert same(torch.randn(2, 4)).shape == (2, 1)

    class Twice(Shared):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.act(x))

    report = loka.apply_mods(Twice([4]), "insert_norm")
    assert reasons(report) == {"insert_norm act": "serves input as well as layers.0: give each an activation of its own"}

    report = loka.apply_mods(nn.Sequential(nn.Linear(4, 1), nn.ReLU(), nn.Linear(1, 2)), "insert_norm")
    assert reasons(report) == {"insert_norm 1": "stands behind the prediction head 0"}


@pytest.mark.parametrize("with_example", [False, True])
@pytest.mark.parametrize("goes_on", ["reads", "keeps"])
def test_an_activation_in_place_whose_input_is_read_behind_it(goes_on: str, with_example: bool) -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act, self.top, self.head = (
                nn.Linear(6, 8),
                nn.ReLU(inplace=True),
                nn.Linear(8, 8),
                nn.Linear(8, 1),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            y = self.act(x)
            self.kept = x.detach() if goes_on == "keeps" else None
            return self.head(self.top(y if goes_on == "keeps" else x))

    model, x = Drops(), torch.randn(4, 6)
    expected = model(x)
    report = loka.apply_mods(model, "insert_norm", example=(x,) if with_example else None)
    assert not report.changes
    why = {"insert_norm act": "works in place, and forward goes on with what it was given: go on with what it gives"}
    assert reasons(report) == (why if with_example else {})  # a trace shows two that read the layer
    assert torch.equal(model(x), expected)


def test_insert_norm_names_activations_that_the_example_did_not_reach() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(16, 32), nn.Linear(32, 1)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(2))

        def forward(self, x: Tensor, task: int) -> Tensor:
            return self.head(self.experts[task](self.first(x).tanh()))

    model = Experts()
    report = loka.apply_mods(model, ["insert_norm"], example=(torch.randn(4, 16), 0))
    assert changed(report) == ["insert_norm experts.0.1"]
    assert {name: why.partition(":")[0] for name, why in reasons(report).items()} == {
        "insert_norm experts.1.1": "is not called, as far as can be seen"
    }


def test_a_bias_that_was_set_on_purpose() -> None:
    """A gate that begins closed would begin half open."""
    gate, hidden = nn.Linear(16, 16), nn.Linear(16, 16)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), gate, nn.Sigmoid(), hidden, nn.ReLU(), nn.Linear(16, 1))
    nn.init.constant_(model[2].bias, -4.0)
    nn.init.constant_(model[4].bias, 0.01)
    report = loka.apply_mods(model, "no_bias")
    assert changed(report) == ["no_bias 4"]
    assert reasons(report)["no_bias 2"] == "its bias is -4 throughout, which was set on purpose"


def test_a_prediction_that_another_tower_reads_too() -> None:
    class ActorCritic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bottom, self.action = nn.Linear(20, 64), nn.Linear(64, 6)
            self.value = nn.Sequential(nn.Linear(70, 48), nn.ReLU(), nn.Linear(48, 4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.bottom(x).relu()
            action = self.action(h)
            return action, self.value(torch.cat([h, action.softmax(-1).detach()], 1))

    report = loka.apply_mods(ActorCritic(), "no_bias")
    assert changed(report) == ["no_bias value.0"]
    assert reasons(report)["no_bias action"] == "is a prediction head: its output is the model's"


@pytest.mark.parametrize("told", [lambda h: 1e-4 * h.square().mean(), lambda h: h > 0, torch.zeros_like])
def test_what_is_told_of_a_layer_makes_it_no_prediction_head(told: Callable[[Tensor], Tensor]) -> None:
    class Monitored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.second(self.first(x).relu())
            return self.last(h.relu()), told(h)

    assert changed(loka.apply_mods(Monitored(), "no_bias", example=(torch.randn(5, 8),))) == ["no_bias second"]
