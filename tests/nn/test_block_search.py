"""How blocks are looked for: what a trace cannot follow a run can, and the model does not notice."""

import copy
import random
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from found_lines import lines
from torch import Tensor, nn

from loka.nn import kept_state
from loka.nn.blocks import Consumer, Follower, find_blocks
from loka.nn.graph import Kind, Method


class Fallible(nn.Module):
    """Traceable but for one module deep inside, which branches on a value."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positive = nn.Sequential(nn.Linear(4, 4), nn.SiLU())
            self.negative = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x: Tensor) -> Tensor:
            return self.positive(x) if x.sum() > 0 else self.negative[0](x)

    def __init__(self) -> None:
        super().__init__()
        self.wrapped = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), self.Branch())
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, scale: float = 1.0, bias: Tensor | None = None) -> Tensor:
        y = self.head(self.norm(scale * self.wrapped(x)))
        return y if bias is None else y + bias


def test_one_untraceable_module_costs_only_itself() -> None:
    found = find_blocks(Fallible())
    assert found.graph.method is Method.PARTS
    assert list(found.graph.untraceable) == ["wrapped.2"]
    assert "wrapped.2: TraceError: symbolically traced variables cannot be used as inputs to control flow" in found.how
    assert found.of("wrapped.0").activation == Follower("ReLU", "wrapped.1")
    assert found.of("wrapped.0").consumers == (Consumer(Kind.OTHER, "wrapped.2"),)
    positive, negative = found.of("wrapped.2.positive.0"), found.of("wrapped.2.negative.0")
    assert positive.activation == Follower("SiLU", "wrapped.2.positive.1")
    assert negative.consumers == (Consumer(Kind.UNKNOWN, "wrapped.2"),)
    assert (positive.calls, negative.calls, found.of("head").calls) == (None, None, 1)
    assert [block.is_head for block in found] == [False, False, False, True]  # behind the branch comes a norm
    assert found.of("head").consumers == (Consumer(Kind.OUTPUT, "output"),)  # arguments left out keep their default


def test_a_head_inside_an_untraceable_module_is_known_by_where_that_is_called() -> None:
    found = find_blocks(nn.Sequential(nn.Linear(4, 4), Fallible.Branch(), nn.Flatten()))
    assert {block.site: block.is_head for block in found} == {"0": False, "1.positive.0": False, "1.negative.0": True}


def test_a_run_takes_the_branch_that_the_example_takes() -> None:
    model = Fallible()
    nn.init.ones_(model.wrapped[0].weight)
    found = find_blocks(model, (torch.ones(2, 4),))
    assert (found.of("wrapped.2.positive.0").calls, found.of("wrapped.2.negative.0").calls) == (1, 0)
    assert found.of("wrapped.2.positive.0").consumers == (Consumer(Kind.OTHER, "mul"),)


@dataclass
class Inputs:
    x: Tensor
    extra: list[Tensor]


@dataclass
class Outputs:
    logits: Tensor


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[override, no-untyped-def]
        return x * 2

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:  # type: ignore[override, no-untyped-def]
        return dy * 2


class AnyPython(nn.Module):
    """The user's own types in and out, in-place changes, an autograd function, a written slice, a compiled part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.compiled = torch.compile(lambda x: x.relu() + 1, backend=lambda *_: pytest.fail("compiled in a recorded run"))

    def forward(self, inputs: Inputs) -> Outputs:
        y = self.first(inputs.x)
        y += inputs.extra[0]
        z = torch.zeros_like(y)
        z[:, :2] = self.second(y)[:, :2]
        z = self.compiled(self.third(z))
        return Outputs(self.out(Doubled.apply(z)))


def test_a_run_follows_tensors_through_any_python() -> None:
    found = find_blocks(AnyPython(), (Inputs(torch.randn(3, 4), [torch.randn(3, 4)]),))
    assert lines(found) == ["first ⇒ add", "second ⇒ getitem", "third → relu ⇒ add", "out ⇒ output"]
    assert found.of("first").consumers == (Consumer(Kind.ADD, "add"),)
    assert [block.is_head for block in found] == [False, False, False, True]


class WritesInto(nn.Module):
    """Served without gradients: a residual is added where the linear's output lies."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.norm(torch.add(y, x, out=y))


def test_what_is_written_by_out_stands_between_a_site_and_its_norm() -> None:
    assert lines(find_blocks(WritesInto(), (torch.randn(3, 4),))) == ["linear ⇒ add"]


def shifted(y: Tensor) -> Tensor:
    y += 1
    return y


def relu_by_a_view(y: Tensor) -> Tensor:
    y.view(-1).relu_()
    return y


def module_by_a_view(y: Tensor) -> Tensor:
    nn.ReLU(inplace=True)(y.flatten())
    return y


@torch.library.custom_op("loka_test::halve", mutates_args=("y",))
def halve(y: Tensor) -> None:
    y.mul_(0.5)


def halved_by_an_op(y: Tensor) -> Tensor:
    halve(y)
    return y


def of_the_numbers(y: Tensor) -> Tensor:
    return y if y.tolist() else -y


class Between(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.norm, self.between = nn.Linear(4, 4), nn.LayerNorm(4), between

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.between(self.linear(x)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("between", "found"),
    [
        (partial(F.relu, inplace=True), "linear → relu ⇒ norm"),
        (lambda y: F.relu(y, True), "linear → relu ⇒ norm"),
        (partial(F.dropout, p=0.5, inplace=True), "linear ⇒ dropout → norm"),
        (torch.relu_, "linear → relu ⇒ norm"),
        (shifted, "linear ⇒ add"),
        (relu_by_a_view, "linear ⇒ view → relu"),
        (module_by_a_view, "linear ⇒ flatten → relu"),
        (torch.vmap(torch.sin), "linear ⇒ sin"),
        (lambda y: torch.from_numpy(y.numpy() * 1), "linear ⇒ numpy"),
        (lambda y: torch.from_numpy(y.numpy()), "linear ⇒ numpy, norm"),
        (of_the_numbers, "linear ⇒ tolist, norm"),
    ],
)
def test_whatever_comes_between_a_site_and_its_norm_is_seen(
    mode: type[torch.no_grad], between: Callable[[Tensor], Tensor], found: str
) -> None:
    """Functions that change a tensor and return it, by any way to its memory, and those that read values and return none."""
    with mode():
        assert lines(find_blocks(Between(between), (torch.randn(3, 4),))) == [found]


def test_an_op_of_the_users_that_writes_what_it_is_given_is_seen() -> None:
    assert lines(find_blocks(Between(halved_by_an_op), (torch.randn(3, 4),))) == ["linear ⇒ halve"]


class RunsStatistics(nn.Module):
    """One function's statistics behind two layers: it writes them, and does not read what it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = F.batch_norm(layer(x), self.mean, self.variance, training=True)
        return x


def test_statistics_that_a_function_keeps_are_not_what_it_makes() -> None:
    found = find_blocks(RunsStatistics(), (torch.randn(3, 4),))
    assert lines(found) == ["first → batch_norm ⇒ second", "second → batch_norm ⇒ output"]
    (first, second) = (call for call in found.graph.calls if call.name == "batch_norm")
    assert len(first.reads) == len(second.reads) == 1


class Careless(nn.Module):
    """Keeps what it saw, counts its calls, draws random numbers and trains a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.seen, self.count = nn.Linear(4, 4), nn.BatchNorm1d(4), [], 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.last = x
        self.seen.append(x)
        drawn = torch.rand(4) + random.random() + np.random.rand()  # noqa: NPY002
        return F.dropout(self.norm(self.linear(x)) * drawn, 0.5)


@pytest.mark.parametrize("with_example", [True, False])
def test_the_model_and_the_random_state_are_left_as_they_were(with_example: bool) -> None:
    model = Careless()
    model.linear.register_forward_hook(lambda *_: None)
    seen, random_state, before = model.seen, torch.get_rng_state(), copy.deepcopy(model.state_dict())
    of_python, of_numpy = random.getstate(), np.random.get_state()[2:]  # noqa: NPY002
    find_blocks(model, (torch.randn(8, 4, generator=torch.Generator().manual_seed(0)),) if with_example else None)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert (random.getstate(), np.random.get_state()[2:]) == (of_python, of_numpy)  # noqa: NPY002
    assert (model.count, model.seen, hasattr(model, "last"), model.training) == (0, [], False, True)
    assert model.seen is seen
    assert len(model.linear._forward_hooks) == 1
    assert not any(m._forward_pre_hooks for m in model.modules())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    model(torch.randn(8, 4)).sum().backward()
    assert model.linear.weight.grad is not None


class Context:
    """As users' own classes hold what layers leave there, beside what is none of a trace's business."""

    def __init__(self) -> None:
        self.losses, self.last, self.of_layer, self.calls, self.kind = [], None, {"first": 0}, 0, Kind


class LeavesInContext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.context = nn.Linear(4, 4), nn.Linear(4, 2), Context()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.context.losses.append(hidden.square().mean())
        self.context.last, self.context.also = hidden, {"hidden": hidden}
        self.context.of_layer["first"] = hidden
        self.context.calls += 1
        return self.head(hidden)


def test_a_trace_leaves_nothing_in_objects_of_the_users_own() -> None:
    """What it leaves is no tensor: a loss that sums it up would end in an error of torch.fx."""
    model = LeavesInContext()
    losses = model.context.losses
    found = find_blocks(model)
    assert "attribute" in {consumer.name for consumer in found.of("first").consumers}
    assert vars(model.context) == {"losses": [], "last": None, "of_layer": {"first": 0}, "calls": 1, "kind": Kind}
    assert model.context.losses is losses


class KeepsItsCaller(nn.Module):
    """As torch does where it is first asked to compile: what its imports leave behind holds whoever caused them."""

    def __init__(self, kept: list) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.keep = kept.extend

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        self.keep((sys._getframe(1), weakref.ref(hidden)))
        return hidden.relu()


def test_nothing_that_a_run_computed_outlives_it() -> None:
    kept: list = []
    find_blocks(KeepsItsCaller(kept), example=(torch.randn(2, 4),))
    caller, hidden = kept
    assert caller.f_back is not None
    assert hidden() is None


def test_what_the_model_raises_is_raised_and_leaves_no_hook() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        find_blocks(model, (torch.randn(2, 5),))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_is_looked_through() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.SiLU(), nn.Linear(4, 1))
    expected = find_blocks(model).blocks
    assert expected[0].norm == Follower("LayerNorm", "1")
    assert find_blocks(torch.compile(model, backend="eager"), (torch.randn(2, 4),)).blocks == expected  # type: ignore[arg-type]
    model.compile(backend="eager")
    assert find_blocks(model, (torch.randn(2, 4),)).blocks == expected
    assert find_blocks(model).blocks == expected


@pytest.mark.parametrize("example", [None, (torch.randn(2, 4),)])
def test_a_weight_that_a_function_reads_is_read_under_all_its_names(example: tuple[Tensor] | None) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x).relu()) + F.linear(x, self.a.weight))

    found = find_blocks(Tied(), example)
    assert [found.of(site).read_by for site in "abc"] == ["linear", "linear", None]


def test_a_scripted_part_is_traced_around_with_an_example_too() -> None:
    model = nn.Sequential(
        torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)
    )
    for example in (None, (torch.randn(2, 4),)):
        found = find_blocks(model, example)
        assert found.graph.method is Method.TRACE
        assert found.of("1").activation == Follower("ReLU", "2")
        assert found.of("3").is_head


def test_what_is_data_or_has_no_state_is_not_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_state, "_MOST_ITEMS", 99)  # more than a module has attributes
    monkeypatch.setattr(kept_state, "_MOST_BYTES", 16)
    model = nn.Module()
    model.small, model.large, model.fixed = np.zeros(2), np.zeros(3), np.zeros(2)
    model.fixed.flags.writeable = False
    model.grown, model.pair, model.counts = np.ones(2), (torch.zeros(1), [0]), Counter(a=2)
    model.system, model.own = random.SystemRandom(), {"seen": []}
    model.own["self"] = model.own
    model.users = {user: [] for user in range(100)}
    with kept_state.left_as_it_was(model):
        model.small += 1
        model.large += 1
        model.own["seen"].append(1)
        model.grown.resize(1, refcheck=False)
        model.pair[0].add_(1)
        model.pair[1].append(1)
        model.counts["a"] += 1
        model.users[0].append(1)
        model.users[100] = []
    assert (model.small[0], model.large[0], model.own["seen"]) == (0, 1, [])
    assert (model.grown.tolist(), model.pair, model.counts) == ([1.0, 1.0], (torch.zeros(1), [0]), Counter(a=2))
    assert list(model.users.values()) == [[1], *([] for _ in range(99))]
