"""The rules around Mods: what is kept and shared, the report, and mistakes."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from report_lines import changed, reasons
from torch import Tensor, nn

import loka
from loka.core.errors import InvalidInput, UnknownName
from loka.mods.contract import MODS, Place


class TestKeep:
    def test_names_patterns_and_all_inside(self, mlp: nn.Sequential) -> None:
        model = nn.Sequential(mlp, nn.Linear(3, 3), nn.SiLU(), copy.deepcopy(mlp[1:3]), nn.Linear(300, 1))
        report = loka.apply_mods(model, keep=["0", "3.*"], dry_run=True)
        assert changed(report) == ["hard_swish 2", "no_bias 1"]
        assert reasons(report)["block_norm 0.1"] == "kept by keep='0'"
        assert reasons(report)["block_norm 3.1"] == "kept by keep='3.*'"
        assert changed(loka.apply_mods(model, "hard_swish", keep="0.2", dry_run=True)) == ["hard_swish 2", "hard_swish 3.2"]

    def test_a_name_with_brackets_is_a_name(self) -> None:
        model = nn.ModuleDict({"e[0]": nn.SiLU(), "e0": nn.SiLU()})
        assert reasons(loka.apply_mods(model, keep="e[0]", dry_run=True)) == {"hard_swish e[0]": "kept by keep='e[0]'"}

    def test_a_shared_module_is_kept_by_any_of_its_names(self) -> None:
        model = nn.ModuleDict({"a": nn.SiLU()})
        model["b"] = model["a"]
        assert reasons(loka.apply_mods(model, keep="b")) == {"hard_swish a": "kept by keep='b'"}

    def test_a_pattern_that_matches_nothing_is_a_mistake(self, mlp: nn.Sequential) -> None:
        model = nn.ModuleDict({"tower": mlp, "head": nn.Linear(3, 1)})
        with pytest.raises(InvalidInput, match=r"keep='towr' matches no module. Did you mean 'tower'"):
            loka.apply_mods(model, keep="towr")
        with pytest.raises(InvalidInput, match=r"keep='\*\.x' matches no module. Print the model to see its modules' names"):
            loka.apply_mods(model, keep="*.x")


def test_frozen_parts_are_left_alone() -> None:
    """Nothing would be trained to make up for the change."""
    model = nn.Sequential()
    for name in ("tower", "top"):
        parts = (nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.SiLU())
        model.add_module(name, nn.Sequential(*parts))
    model.add_module("head", nn.Linear(8, 1))
    model.tower.requires_grad_(False)
    x = torch.randn(4, 8)
    expected = model.tower(x)
    report = loka.apply_mods(model, example=(x,))
    assert changed(report) == ["block_norm top.2", "hard_swish top.3", "no_bias top.0", "no_bias top.1"]
    assert reasons(report)["hard_swish tower.3"].startswith("tower is frozen: nothing would be trained")
    assert reasons(report)["no_bias tower.1"].startswith("tower.1 is frozen")
    assert torch.equal(model.tower(x), expected)


def test_a_model_that_no_longer_runs_is_as_it_was() -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.hidden, self.norm, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1)
            self.also = self.norm

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.hidden(self.first(x).to(self.norm.weight.dtype))))

    model, x = Casting(), torch.randn(4, 6)
    expected, state, parts = model(x), copy.deepcopy(model.state_dict()), dict(model.named_modules(remove_duplicate=False))
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(InvalidInput, match=r"no longer runs.*BlockNorm.*no attribute 'weight'.*nothing was changed.*keep="):
        loka.apply_mods(model, example=(x,), optimizer=optimizer)
    assert dict(model.named_modules(remove_duplicate=False)) == parts
    assert model.state_dict().keys() == state.keys()
    assert torch.equal(model(x), expected)
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
    assert changed(loka.apply_mods(model, example=(x,), keep="norm")) == ["no_bias hidden"]


def test_shared_modules_are_replaced_everywhere_by_one() -> None:
    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.act = nn.LayerNorm(4), nn.SiLU()
            self.first = nn.Linear(4, 4)
            self.towers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), self.norm, self.act) for _ in range(2))
            self.by_name = nn.ModuleDict({"again": self.norm})
            self.head = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.head(self.by_name["again"](self.act(self.norm(sum(tower(y) for tower in self.towers)))))

    model = Sharing()
    report = loka.apply_mods(model)
    assert changed(report) == ["block_norm norm", "hard_swish act", "no_bias towers.0.0", "no_bias towers.1.0"]
    assert isinstance(model.norm, loka.BlockNorm)
    assert model.towers[0][1] is model.towers[1][1] is model.by_name["again"] is model.norm
    assert model.towers[0][2] is model.act
    model(torch.randn(2, 4)).sum().backward()


class TestReport:
    def test_reads_well(self, mlp: nn.Sequential) -> None:
        promised = loka.apply_mods(mlp, dry_run=True)
        text = """\
Sequential: 4 changes would be made by block_norm, hard_swish, no_bias, 640 of 8,803 parameters (7.3 %) removed
  block_norm  1  LayerNorm(300)    → BlockNorm(300, 2 blocks)  −600 (weight, bias)
  block_norm  4  RMSNorm(20)       → BlockNorm(20)             −20 (weight)
  hard_swish  2  SiLU              → Hardswish
  no_bias     3  Linear with bias  → Linear without            −20 (bias)
left alone:
  no_bias  0  reads the model's inputs: without its bias a norm would hide how large they are
  no_bias  6  is a prediction head: its output is the model's
(data flow traced without an example)"""
        assert str(promised) == text
        assert str(loka.apply_mods(mlp)) == text.replace("would be made", "made")
        assert "0 changes made" in str(loka.apply_mods(mlp, ()))

    def test_a_norm_loses_its_bias_once(self, mlp: nn.Sequential) -> None:
        both = loka.apply_mods(mlp, ["no_bias", "block_norm"], dry_run=True)
        assert "no_bias 1" not in changed(both)
        alone = loka.apply_mods(mlp, ["no_bias"], dry_run=True)
        assert "no_bias 1" in changed(alone)
        assert alone.n_removed == 300 + 20


class TestMistakes:
    def test_unknown_mod(self, mlp: nn.Sequential) -> None:
        with pytest.raises(UnknownName, match=r"no mod is called 'hardswish'. Did you mean 'hard_swish'\? Known: block_norm"):
            loka.apply_mods(mlp, ["no_bias", "hardswish"])
        assert mlp[0].bias is not None

    def test_a_wrapped_model(self, mlp: nn.Sequential) -> None:
        with pytest.raises(InvalidInput, match="is a DataParallel, which has taken over its parameters: apply Mods before"):
            loka.apply_mods(nn.DataParallel(mlp))

    def test_parameters_without_a_shape(self) -> None:
        with pytest.raises(InvalidInput, match="the model is an average of another model: apply Mods to that, then average it"):
            loka.apply_mods(torch.optim.swa_utils.AveragedModel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))))
        with pytest.raises(InvalidInput, match=r"0.weight has no shape yet: run the model once on a batch, then apply Mods"):
            loka.apply_mods(nn.Sequential(nn.LazyLinear(4), nn.SiLU()))

    def test_an_example_that_is_no_tuple(self, mlp: nn.Sequential) -> None:
        with pytest.raises(InvalidInput, match="example must be a tuple"):
            loka.apply_mods(mlp, example=torch.randn(2, 6))  # type: ignore[arg-type]


@pytest.fixture
def tanh_mod() -> Iterator[None]:
    """A Mod as a user would add it: one class in one file."""

    @MODS.register("no_tanh")
    class NoTanh:
        default, order, functions, replaces = False, 1, frozenset({"tanh"}), True

        def concerns(self, place: Place) -> bool:
            return isinstance(place.module, nn.Tanh)

        def why_not(self, place: Place) -> str | None:
            return None

        def change(self, place: Place) -> tuple[str, str]:
            return "Tanh", "Hardtanh"

        def removes(self, place: Place) -> tuple[str, ...]:
            return ()

        def replace(self, place: Place) -> nn.Module:
            return nn.Hardtanh()

    yield
    MODS.remove("no_tanh")


@pytest.mark.usefixtures("tanh_mod")
def test_a_mod_is_added_by_registering_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    assert not loka.apply_mods(model, keep="0").changes  # not unless asked for
    assert changed(loka.apply_mods(model, "no_tanh")) == ["no_tanh 1"]
    x = torch.randn(3, 4)
    torch.testing.assert_close(model[1](x), F.hardtanh(x))


def test_the_registry_holds_the_four() -> None:
    assert MODS.names() == ["block_norm", "hard_swish", "insert_norm", "no_bias"]
    assert [name for name, mod in MODS.items() if mod.default] == ["block_norm", "hard_swish", "no_bias"]


def test_a_class_derived_from_torchs_own_is_left_alone() -> None:
    class Layer(nn.TransformerEncoderLayer):
        def __init__(self) -> None:
            super().__init__(16, 2, 32, batch_first=True, activation="gelu")

    class Encoded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = Layer(), nn.Linear(16, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x).mean(1))

    model = Encoded()
    report = loka.apply_mods(model)
    assert not report.changes
    assert "is inside Layer, which reads its parameters directly" in reasons(report)["block_norm layer.norm1"]
    with torch.no_grad():
        model.eval()(torch.randn(4, 3, 16))


def test_a_model_that_no_longer_serves_is_given_back() -> None:
    """Its forward reads the norm's weight in eval mode alone."""

    class Fussy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.fc, self.norm, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.fc(self.first(x).relu()))
            return self.head(y if self.training else y * self.norm.weight)

    model = Fussy()
    before = [type(module) for module in model.modules()]
    with pytest.raises(InvalidInput, match="no longer runs on the example"):
        loka.apply_mods(model, "block_norm", example=(torch.randn(4, 8),))
    assert [type(module) for module in model.modules()] == before
    assert model.training


@pytest.mark.parametrize("hold", [lambda layer: Stage(layer), lambda layer: partial(layer), lambda layer: layer.forward])
def test_a_module_that_an_object_holds_too_is_not_replaced(hold: Callable[[nn.Module], object]) -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1)
            self.stage = hold(self.norm)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.fc(x)).relu())

    with pytest.raises(InvalidInput, match="norm is to be replaced, and stage"):
        loka.apply_mods(Held(), "block_norm")


@pytest.mark.parametrize(("mod", "held"), [("hard_swish", nn.SiLU), ("insert_norm", nn.ReLU)])
def test_an_activation_that_a_list_holds_too_is_not_replaced(mod: str, held: type[nn.Module]) -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.act, self.inner, self.head = nn.Linear(8, 16), held(), nn.Linear(16, 16), nn.Linear(16, 1)
            self.order = [self.act]

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(self.order[0](self.fc(x))).relu())

    with pytest.raises(InvalidInput, match="act is to be replaced, and order, a plain list, holds it too"):
        loka.apply_mods(Listed(), mod, example=(torch.randn(4, 8),))


@dataclass
class Stage:
    layer: nn.Module
