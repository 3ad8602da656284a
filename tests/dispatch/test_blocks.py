"""Fused blocks and chains in a model. Here the kernels cannot run, so the blocks compute by their high-precision reference."""

import copy

import msgspec
import pytest
import torch
from plans import ROWWISE, plan_for
from torch import Tensor, nn
from torch.nn import functional as F

import loka
from loka.core.errors import KernelUnavailable
from loka.core.plan import BlockPlan, Plan
from loka.dispatch.apply import give_back
from loka.dispatch.planned import PassThrough, PlannedLinear
from loka.dispatch.swap import required_applied
from loka.nn.fused_block import FusedBlock
from loka.nn.weight_casts import only_holders

pytestmark = pytest.mark.usefixtures("pretended_kernels")


class Chain(nn.Module):
    """Three blocks in a row, a layer of its own kind and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for _ in range(3):
            self.layers.extend([nn.Linear(32, 32, bias=False), loka.BlockNorm(32), nn.Hardswish()])
        self.side = nn.Linear(32, 32)
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.side(self.layers(x)))


def chain() -> Chain:
    torch.manual_seed(0)
    return Chain()


def block(index: int, producer: str | None = None) -> BlockPlan:
    return BlockPlan("triton.block", f"layers.{index + 1}", f"layers.{index + 2}", producer is not None, producer)


def chain_plan(model: nn.Module) -> Plan:
    blocks = {"layers.0": block(0), "layers.3": block(3, "layers.0"), "layers.6": block(6, "layers.3")}
    return plan_for(model, {**blocks, "side": ROWWISE})


def batch() -> Tensor:
    return torch.randn(20, 32, generator=torch.Generator().manual_seed(1))


def test_blocks_absorb_what_is_behind_them_and_chain() -> None:
    model, plain = chain(), chain()
    keys, parameters = list(model.state_dict()), list(map(id, model.parameters()))
    loka.apply_plan(model, chain_plan(model))
    first, second, third = (model.layers[index] for index in (0, 3, 6))
    assert isinstance(first, FusedBlock)
    assert first.followers == (second, third)
    assert [type(model.layers[index]) for index in (1, 2, 4, 5)] == [PassThrough] * 4
    assert "absorbed by layers.3" in repr(model.layers[4])
    assert isinstance(model.side, PlannedLinear)
    assert list(model.state_dict()) == keys
    assert list(map(id, model.parameters())) == parameters
    torch.testing.assert_close(model.layers(batch()), plain.layers(batch()))
    model.layers(batch()).sum().backward()
    plain.layers(batch()).sum().backward()
    torch.testing.assert_close(model.layers[6].weight.grad, plain.layers[6].weight.grad)
    other = copy.deepcopy(model)
    torch.testing.assert_close(other.layers(batch()), plain.layers(batch()))
    for one in (model, other):
        loka.restore(one)
        assert [type(module) for module in one.modules()] == [type(module) for module in plain.modules()]
        torch.testing.assert_close(one(batch()), plain(batch()))


def test_a_layer_with_nothing_behind_it_ends_a_chain() -> None:
    model, plain = chain(), chain()
    blocks = {"layers.0": block(0), "layers.3": block(3, "layers.0"), "layers.6": block(6, "layers.3")}
    loka.apply_plan(model, plan_for(model, {**blocks, "side": BlockPlan("triton.block", None, None, True, "layers.6")}))
    assert model.layers[0].followers[-1] is model.side
    torch.testing.assert_close(model(batch()), plain(batch()))
    model(batch()).sum().backward()
    plain(batch()).sum().backward()
    torch.testing.assert_close(model.side.weight.grad, plain.side.weight.grad)
    torch.testing.assert_close(model.side.bias.grad, plain.side.bias.grad)
    loka.restore(model)
    assert type(model.side) is nn.Linear


class Entered(nn.Module):
    """A chain behind a norm: as Wukong's factorization machines have it, or of vectors that are joined, as its top has."""

    def __init__(self, *, beside: bool = False, vectors: int = 1) -> None:
        super().__init__()
        self.norm, self.chain, self.beside = loka.BlockNorm(32 // vectors), chain(), beside
        self.vectors = vectors

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.unflatten(1, (self.vectors, -1))).flatten(1) if self.vectors > 1 else self.norm(x)
        return self.chain(x) + x.sum(-1, keepdim=True) if self.beside else self.chain(x)


def entered_plan(model: nn.Module) -> Plan:
    first = BlockPlan("triton.block", "chain.layers.1", "chain.layers.2", entry="norm")
    second = BlockPlan("triton.block", "chain.layers.4", "chain.layers.5", True, "chain.layers.0")
    return plan_for(model, {"chain.layers.0": first, "chain.layers.3": second})


@pytest.mark.parametrize("vectors", [1, 4])
def test_a_chain_absorbs_the_norm_in_front_of_it(vectors: int) -> None:
    model, plain = Entered(vectors=vectors), Entered(vectors=vectors)
    loka.apply_plan(model, entered_plan(model))
    first = model.chain.layers[0]
    assert isinstance(model.norm, PassThrough)
    assert first.chain.entry is not None
    assert first.followers == (model.chain.layers[3],)
    torch.testing.assert_close(model(batch()), plain(batch()))
    assert list(model.state_dict()) == list(plain.state_dict())
    again = copy.deepcopy(model)
    give_back(again, "chain.layers.3", "drifted")
    assert isinstance(again.norm, PassThrough)
    torch.testing.assert_close(again(batch()), plain(batch()))
    give_back(again, "chain.layers.0", "drifted too")
    for one in (model, again):
        loka.restore(one)
        assert [type(module) for module in one.modules()] == [type(module) for module in plain.modules()]
        torch.testing.assert_close(one(batch()), plain(batch()))


@pytest.mark.parametrize("absorbed", ["norm", "chain.layers.1", "chain.layers.5"])
def test_hooks_on_what_would_be_absorbed_are_not_lost(absorbed: str) -> None:
    model = Entered()
    model.get_submodule(absorbed).register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(KernelUnavailable, match=f"would absorb {absorbed}, which has hooks"):
        loka.apply_plan(model, entered_plan(model))
    assert not any(isinstance(module, FusedBlock) for module in model.modules())


def test_a_norm_in_front_that_something_else_reads_is_not_absorbed() -> None:
    model = Entered(beside=True)
    with pytest.raises(
        KernelUnavailable, match=r"chain.layers.0 is planned with norm in front of it, and here it is another, or something"
    ):
        loka.apply_plan(model, entered_plan(model))
    assert type(model.norm) is loka.BlockNorm


@pytest.mark.parametrize(("site", "followers"), [("layers.0", [1, 0]), ("layers.3", [0, 0]), ("layers.6", [1, 0])])
def test_one_block_of_a_chain_is_given_back(site: str, followers: list[int]) -> None:
    model, plain = chain(), chain()
    loka.apply_plan(model, chain_plan(model))
    called: list[int] = []
    for index in range(9):  # layers, and what blocks absorbed of norms and activations
        model.layers[index].register_forward_hook(lambda *_, index=index: called.append(index))
    give_back(model, site, "drifted")
    assert type(model.get_submodule(site)) is nn.Linear
    left = [model.layers[index] for index in (0, 3, 6) if f"layers.{index}" != site]
    assert [len(one.followers) for one in left if isinstance(one, FusedBlock)] == followers
    torch.testing.assert_close(model.layers(batch()), plain.layers(batch()))
    assert sorted(called) == list(range(9))
    runs = {planned.site: planned for planned in required_applied(model).plan.sites}
    assert runs[site].reason == "drifted"
    assert all(planned.block.producer != site for planned in runs.values() if planned.block)
    loka.restore(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]


class Shared(nn.Module):
    """One activation behind two layers: neither may absorb it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 1)
        self.norm_a, self.norm_b, self.act = loka.BlockNorm(32), loka.BlockNorm(32), nn.Hardswish()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.norm_b(self.b(self.act(self.norm_a(self.a(x)))))))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.head = nn.Linear(32, 32), loka.BlockNorm(32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.a(x)) if x.sum() > -1e9 else x)


class Functional(nn.Module):
    """An activation that is a function behind a norm, and a norm that is one in front of an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = (nn.Linear(32, n) for n in (32, 32, 32, 1))
        self.norm_a, self.norm_b, self.act = loka.BlockNorm(32), loka.BlockNorm(32), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm_b(self.b(F.relu(self.norm_a(self.a(x))))))
        return self.head(self.act(F.layer_norm(self.c(x), (32,))))


@pytest.mark.parametrize(
    ("model", "planned", "message"),
    [
        (
            Functional(),
            {"a": BlockPlan("triton.block", "norm_a", None), "b": BlockPlan("triton.block", "norm_b", None, True, "a")},
            "b is planned to take FP8 from a, and here relu is between them",
        ),
        (
            Functional(),
            {"c": BlockPlan("triton.block", None, "act")},
            "c is planned with act behind it, and here it is another",
        ),
        (
            Shared(),
            {"a": BlockPlan("triton.block", "norm_a", "act")},
            "a cannot absorb act, which runs behind other layers too",
        ),
        (
            Shared(),
            {"a": BlockPlan("triton.block", "norm_b", None)},
            "a is planned with norm_b behind it, and here it is norm_a",
        ),
        (
            nn.Sequential(nn.Linear(32, 32), loka.BlockNorm(32), nn.ReLU(), nn.Linear(32, 1)),
            {"0": BlockPlan("triton.block", None, "2")},
            "0 is planned with 2 behind it, and here it is another",
        ),
        (Branching(), {"a": BlockPlan("triton.block", "norm", None)}, r"a cannot be followed through the model: pass example="),
    ],
)
def test_what_the_data_flow_does_not_allow_is_refused(model: nn.Module, planned: dict, message: str) -> None:
    with pytest.raises(KernelUnavailable, match=message):
        loka.apply_plan(model, plan_for(model, planned))
    assert not any(isinstance(module, FusedBlock) for module in model.modules())


def test_a_function_behind_a_block_runs_behind_it() -> None:
    model = Functional()
    expected = model(batch())
    loka.apply_plan(model, plan_for(model, {site: BlockPlan("triton.block", f"norm_{site}", None) for site in ("a", "b")}))
    assert isinstance(model.a, FusedBlock)
    torch.testing.assert_close(model(batch()), expected)


def test_a_block_needs_no_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    plain = copy.deepcopy(model)
    planned = {site: BlockPlan("triton.block", None, activation) for site, activation in (("0", "1"), ("2", "3"))}
    loka.apply_plan(model, plan_for(model, planned))
    assert [type(module) for module in model] == [FusedBlock, PassThrough, FusedBlock, PassThrough, nn.Linear]
    torch.testing.assert_close(model(batch()), plain(batch()))
    loka.restore(model)
    assert [type(module) for module in model] == [type(module) for module in plain]


def test_an_example_shows_what_a_trace_cannot() -> None:
    model = Branching()
    applied = loka.apply_plan(model, plan_for(model, {"a": BlockPlan("triton.block", "norm", None)}), example=(batch(),))
    assert applied.sites == ("a",)
    assert isinstance(model.norm, PassThrough)


def test_a_chain_through_something_else_is_refused() -> None:
    model = chain()
    plan = plan_for(model, {"layers.0": block(0), "layers.6": block(6, "layers.0")})
    with pytest.raises(KernelUnavailable, match=r"layers.6 is planned to take FP8 from layers.0 alone, and here it does not"):
        loka.apply_plan(model, plan)


def test_who_keeps_a_block_that_was_given_back_keeps_nothing_cast() -> None:
    """Of two that hold a weight's casts neither is written by the step itself."""
    model = chain()
    loka.apply_plan(model, chain_plan(model))
    kept = [model.layers[0], model.layers[3]]
    give_back(model, "layers.3", "drifted")
    holders = only_holders()
    assert holders[id(kept[0].weight)] is model.layers[0]
    assert id(kept[1].weight) not in holders


def test_what_users_put_on_a_chain_stays_when_one_of_its_blocks_goes() -> None:
    """The others are bound anew, as when a Guard gives a site back."""
    model = chain()
    loka.apply_plan(model, chain_plan(model))
    calls: list[str] = []
    model.layers[0].register_forward_hook(lambda *_: calls.append("first"))
    model.layers[0].mine = 1  # type: ignore[assignment]
    give_back(model, "layers.6", "drifted")
    assert isinstance(model.layers[0], FusedBlock)
    model(batch())
    assert (calls, model.layers[0].mine) == (["first"], 1)
    loka.restore(model)
    model(batch())
    assert (calls, model.layers[0].mine) == (["first", "first"], 1)


def test_a_block_that_is_worth_nothing_without_the_one_in_front_falls_back_with_it() -> None:
    """It takes 50 of 100 µs behind the other, and 110 where it casts its own input."""
    model = chain()
    fed = msgspec.structs.replace(block(3, "layers.0"), input_cast_us=60.0)
    plan = plan_for(model, {"layers.0": block(0), "layers.3": fed, "side": ROWWISE})
    model.layers[0].register_forward_hook(lambda module, args, output: None)
    applied = loka.apply_plan(model, plan, on_missing="high_precision")
    assert applied.sites == ("side",)
    assert list(applied.fell_back) == ["layers.0", "layers.3"]
    assert "has hooks" in applied.fell_back["layers.0"]
    assert "without layers.0 in front, under 1.05×" in applied.fell_back["layers.3"]
    assert type(model.layers[3]) is nn.Linear


@pytest.mark.parametrize("name", ["x", "input"])
def test_what_a_block_absorbs_may_be_called_by_the_name_of_its_argument(name: str) -> None:
    class Named(Chain):
        def forward(self, x: Tensor) -> Tensor:
            for index, layer in enumerate(self.layers):
                x = layer(**{name if index % 3 == 1 else "input": x})  # norms, and linear layers and activations
            return self.head(x)

    torch.manual_seed(0)
    model = Named()
    expected = model(batch())
    loka.apply_plan(model, chain_plan(model), example=(batch(),))
    torch.testing.assert_close(model(batch()), expected)
