"""Blocks found in models whose structure is planted or written down by hand, with an example and without."""

import pytest
import torch
import torch.nn.functional as F
from found_lines import lines
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import loka
from loka.core.errors import InvalidInput, UnknownName
from loka.data.batch import Batch, FeatureSchema
from loka.kernels.executor import SiteKernels
from loka.models.recommender import Recommender
from loka.models.registry import build_model
from loka.nn.blocks import Block, Consumer, Follower, FoundBlocks, Uncovered, find_blocks
from loka.nn.graph import Kind, Method

SCHEMA = FeatureSchema(n_dense=3, onehot_sizes=(7, 11), sequence_size=9, sequence_length=4)


def make_batch(n: int = 4) -> Batch:
    return Batch(
        dense_BD=torch.randn(n, 3),
        onehot_BF=torch.randint(7, (n, 2)),
        label_B=torch.zeros(n),
        sequence_BL=torch.randint(9, (n, 4)),
    )


def parts(name: str) -> tuple[Recommender, tuple[Tensor, ...]]:
    model = build_model(name, "tiny", SCHEMA)
    batch = make_batch()
    with torch.no_grad():
        return model, (batch.dense_BD, *model.embeddings(batch))


class TestOurModels:
    def test_wukong(self) -> None:
        model, example = parts("wukong")
        found = find_blocks(model.dense_part, example)
        assert found.graph.method is Method.RUN
        assert lines(found) == [
            "dense.hidden.0 → LayerNorm → SiLU ⇒ dense.out",
            "dense.out ⇒ unflatten → cat",
            "layers.0.fmb.project ⇒ matmul",
            "layers.0.fmb.hidden.0 → LayerNorm → SiLU ⇒ layers.0.fmb.out",
            "layers.0.fmb.out ⇒ unflatten → cat",
            "layers.0.lcb ⇒ mT",
            "layers.0.residual ⇒ mT",
            "layers.1.fmb.project ⇒ matmul",
            "layers.1.fmb.hidden.0 → LayerNorm → SiLU ⇒ layers.1.fmb.out",
            "layers.1.fmb.out ⇒ unflatten → cat",
            "layers.1.lcb ⇒ mT",
            "top.0 → LayerNorm → SiLU ⇒ head",
            "head ⇒ squeeze → output",
        ]
        assert [str(uncovered) for uncovered in found.uncovered] == ["matmul in layers.0.fmb", "matmul in layers.1.fmb"]

    def test_dcnv2_needs_no_example(self) -> None:
        model, example = parts("dcnv2")
        traced = find_blocks(model.dense_part)
        assert traced.graph.method is Method.TRACE
        assert lines(traced) == [
            "crosses.0.v ⇒ crosses.0.w",
            "crosses.0.w ⇒ mul",
            "crosses.1.v ⇒ crosses.1.w",
            "crosses.1.w ⇒ mul",
            "top.0 → ReLU ⇒ top.2",
            "top.2 → ReLU ⇒ head",
            "head ⇒ squeeze → output",
        ]
        assert traced.blocks == find_blocks(model.dense_part, example).blocks

    def test_interformer(self) -> None:
        model, example = parts("interformer")
        found = find_blocks(model.dense_part, example)
        assert found.of("layers.0.sequence.attention.out").consumers == (Consumer(Kind.ADD, "add"),)
        assert found.of("layers.0.interaction.out").consumers == (Consumer(Kind.ADD, "add", ("view_as",)),)
        assert found.of("layers.1.feature_summary.gate.linear").activation == Follower("sigmoid", None)
        assert found.of("sequence_summary.pma.query").calls == 1  # it reads learned queries only
        assert found.of("layers.1.interaction.hidden.0").norm == Follower("LayerNorm", "layers.1.interaction.hidden.1")
        assert Uncovered("sigmoid", "layers.0.sequence_summary.gate") in found.uncovered

    @pytest.mark.parametrize("name", ["wukong", "dlrm", "dcnv2", "interformer"])
    def test_the_logit_is_the_only_head_and_the_whole_model_works_as_its_dense_part(self, name: str) -> None:
        model, example = parts(name)
        found = find_blocks(model.dense_part, example)
        assert [block.site for block in found if block.is_head] == ["head"]
        assert all(block.is_head is False for block in found if block.site != "head")
        assert all(block.calls == 1 for block in found)
        whole = find_blocks(model, (make_batch(),))
        assert [f"dense_part.{line}".split(" ⇒ ")[0] for line in lines(found)] == [
            line.split(" ⇒ ")[0] for line in lines(whole)
        ]

    @pytest.mark.parametrize("name", ["wukong", "dlrm", "interformer"])
    def test_without_an_example_the_parts_agree_with_a_run(self, name: str) -> None:
        """Their forward branches on the number of dense features: what is known without an example must still be right."""
        model, example = parts(name)
        recorded, traced = find_blocks(model.dense_part, example), find_blocks(model.dense_part)
        assert traced.graph.method is Method.PARTS
        assert "the model's own forward: TraceError" in traced.how
        assert [block.site for block in traced] == [block.site for block in recorded]
        for truth, block in zip(recorded, traced, strict=True):
            if not any(consumer.kind is Kind.UNKNOWN for consumer in block.consumers):
                assert (block.norm, block.activation, block.consumers) == (truth.norm, truth.activation, truth.consumers)
            if name != "interformer" or ".attention." not in block.site:
                assert block.norm == truth.norm
            assert block.is_head in (truth.is_head, None)
            assert block.calls is None

    def test_a_part_inside_an_untraceable_module_is_no_head_where_its_module_is_followed_by_a_norm(self) -> None:
        model, _ = parts("interformer")
        found = find_blocks(model.dense_part)
        assert found.of("layers.0.sequence.attention.out").is_head is False
        assert found.of("dense.out").is_head is None  # goes to the model's own forward, which cannot be traced
        assert found.of("head").is_head is True


LAYERS = st.lists(
    st.tuples(
        st.integers(2, 9),
        st.sampled_from([None, nn.LayerNorm, nn.RMSNorm, loka.BlockNorm, nn.BatchNorm1d]),
        st.sampled_from([None, nn.ReLU, nn.SiLU, nn.GELU, nn.Hardswish]),
        st.booleans(),  # an Identity in front of the norm, which must not hide it
        st.booleans(),  # dropout behind
    ),
    min_size=1,
    max_size=5,
)


@given(layers=LAYERS, nested=st.booleans(), with_example=st.booleans())
def test_planted_chains_are_found(layers: list, nested: bool, with_example: bool) -> None:
    n_in, modules, planted = 4, [], []
    for width, norm, activation, identity, dropout in layers:
        block = [nn.Linear(n_in, width)]
        block += [nn.Identity()] if identity else []
        block += [norm(width)] if norm else []
        block += [activation()] if activation else []
        planted.append((norm.__name__ if norm else None, activation.__name__ if activation else None, dropout))
        block += [nn.Dropout(0.1)] if dropout else []
        modules += [nn.Sequential(*block)] if nested else block
        n_in = width
    model = nn.Sequential(*modules, nn.Linear(n_in, 3))
    found = find_blocks(model, (torch.randn(5, 4),) if with_example else None)
    assert found.graph.method is (Method.RUN if with_example else Method.TRACE)
    kinds = [(b.norm and b.norm.kind, b.activation and b.activation.kind, len(b.consumers[0].through) == 1) for b in found]
    assert kinds[:-1] == planted
    sites = [block.site for block in found]
    assert [block.consumers[0].name for block in found] == [*sites[1:], "output"]
    assert [block.is_head for block in found] == [False] * len(layers) + [True]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.norm(self.second(F.silu(y)) + y)


class Calls(nn.Module):
    """A layer called twice with different things behind it, an unused one, one under two names, two with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.unused, self.tied, self.other = (nn.Linear(8, 8) for _ in range(4))
        self.alias = self.twice
        self.other.weight = self.tied.weight
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.other(self.act(self.twice(self.twice(x)))))


class ReadsParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.functional, self.by_hand, self.dtype_only, self.head = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.functional.weight, self.functional.bias)
        x = F.relu(x @ self.by_hand.weight.t() + self.by_hand.bias)
        return self.head(self.dtype_only(x.to(self.dtype_only.weight.dtype)))


@pytest.mark.parametrize("with_example", [True, False])
class TestOddModels:
    def find(self, model: nn.Module, with_example: bool, width: int = 8) -> FoundBlocks:
        return find_blocks(model, (torch.randn(3, width),) if with_example else None)

    def test_a_residual_keeps_the_block_open(self, with_example: bool) -> None:
        found = self.find(Residual(), with_example)
        first, second = found
        assert (first.norm, first.activation) == (None, None)  # two read it: nothing may be fused over its output
        assert set(first.consumers) == {Consumer(Kind.ACTIVATION, "silu"), Consumer(Kind.ADD, "add")}
        assert second.consumers == (Consumer(Kind.ADD, "add"),)
        assert found.uncovered == (Uncovered("silu", ""),)

    def test_sites_that_are_unlike_others_say_so(self, with_example: bool) -> None:
        found = self.find(Calls(), with_example)
        twice = found.of("twice")
        assert (twice.calls, twice.aliases, twice.activation) == (2, ("alias",), None)
        assert twice.notes == ("called 2 times", "also known as alias")
        assert found.of("alias") is twice
        assert {(c.kind, c.name) for c in twice.consumers} == {(Kind.SITE, "twice"), (Kind.ACTIVATION, "act")}
        assert found.of("unused").notes == ("never called",)
        assert found.of("unused").is_head is None
        assert (found.of("tied").same_weight, found.of("other").same_weight) == (("other",), ("tied",))
        assert found.of("tied").notes == ("head", "shares its weight with other")

    def test_what_follows_must_be_the_same_in_every_call(self, with_example: bool) -> None:
        class TwoActivations(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
                self.relu, self.silu = nn.ReLU(), nn.SiLU()

            def forward(self, x: Tensor) -> Tensor:
                return self.silu(self.norm(self.linear(self.relu(self.norm(self.linear(x))))))

        (block,) = self.find(TwoActivations(), with_example)
        assert (block.norm, block.activation) == (Follower("LayerNorm", "norm"), None)
        assert {consumer.name for consumer in block.consumers} == {"relu", "silu"}

    def test_parameters_read_past_their_module(self, with_example: bool) -> None:
        found = self.find(ReadsParameters(), with_example, 4)
        assert (found.of("functional").calls, found.of("functional").read_by) == (0, "linear")
        assert found.of("by_hand").read_by in ("t", "add")
        assert found.of("dtype_only").read_by is None
        assert [block.read_by for block in found if block.calls == 1] == [None, None]
        assert {u.function for u in found.uncovered} == {"linear", "matmul", "relu"}

    def test_shapes_are_no_readers(self, with_example: bool) -> None:
        class Reshapes(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.act, self.second = nn.Linear(8, 6), nn.SiLU(), nn.Linear(3, 2)

            def forward(self, x: Tensor) -> Tensor:
                y = self.first(x)
                z = self.act(y).view(y.shape[0], y.size(1) // 3, 3)
                return self.second(z)

        first = self.find(Reshapes(), with_example).of("first")
        assert first.activation == Follower("SiLU", "act")
        assert first.consumers == (Consumer(Kind.SITE, "second", ("view",)),)

    def test_a_product_reads_what_a_site_gives_or_what_is_behind_it(self, with_example: bool) -> None:
        class Products(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.read, self.viewed, self.turned, self.behind_relu, self.joined = (nn.Linear(8, 8) for _ in range(5))
                self.relu = nn.ReLU()

            def forward(self, x: Tensor) -> Tensor:
                y = x @ self.read(x) + torch.bmm(x[None], self.viewed(x).unsqueeze(0))[0]
                return y @ self.turned(x).mT @ self.relu(self.behind_relu(x)) + self.joined(x)

        found = find_blocks(Products(), (torch.randn(8, 8),) if with_example else None)
        assert [block.site for block in found if block.feeds_product] == ["read", "viewed"]

    def test_a_loka_linear_is_a_site(self, with_example: bool) -> None:
        linear = loka.LokaLinear(8, 4, kernels=SiteKernels.same("reference.rowwise"))
        found = self.find(nn.Sequential(linear, nn.LayerNorm(4), nn.Linear(4, 4)), with_example)
        assert lines(found) == ["0 → LayerNorm ⇒ 2", "2 ⇒ output"]

    def test_a_norm_of_the_users_own_counts_by_its_name(self, with_example: bool) -> None:
        class MyRMSNorm(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x / x.square().mean(-1, keepdim=True).sqrt()

        found = self.find(nn.Sequential(nn.Linear(8, 4), MyRMSNorm(), nn.Linear(4, 2)), with_example)
        assert found.of("0").norm == Follower("MyRMSNorm", "1")

    def test_a_single_linear_layer_is_a_model(self, with_example: bool) -> None:
        (block,) = self.find(nn.Linear(8, 4), with_example)
        assert (block.site, block.is_head, block.calls) == ("", True, 1)

    def test_a_model_without_sites(self, with_example: bool) -> None:
        assert len(self.find(nn.Sequential(nn.ReLU()), with_example)) == 0


def branches(*heads: nn.Module) -> nn.Module:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Linear(8, 8)
            self.heads = nn.ModuleList(heads)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.trunk(x).relu()
            return {str(i): head(y) for i, head in enumerate(self.heads)}

    return Branches()


class Stream(nn.Module):
    """A residual stream that is its own output: every second layer reaches it by additions alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(up(x).relu())
        return x


@pytest.mark.parametrize("with_example", [True, False])
@pytest.mark.parametrize(
    ("model", "heads"),
    [
        (branches(nn.Linear(8, 3), nn.Linear(8, 1)), ["heads.0", "heads.1"]),
        (branches(nn.Sequential(nn.Linear(8, 3), nn.Sigmoid()), nn.Linear(8, 2)), ["heads.0.0", "heads.1"]),
        (branches(nn.Sequential(nn.Linear(8, 3), nn.Tanh())), []),
        (branches(nn.Sequential(nn.Linear(8, 3), nn.LayerNorm(3))), []),
        (branches(nn.Sequential(nn.Linear(8, 1), nn.ReLU(), nn.Linear(1, 4))), ["heads.0.0", "heads.0.2"]),
        (branches(nn.Sequential(nn.Linear(8, 8), nn.Unflatten(1, (2, 4)), nn.LSTM(4, 4))), []),
        (Stream(), ["down.2"]),
        (nn.Sequential(nn.Linear(8, 4), nn.Dropout(), nn.Flatten()), ["0"]),
    ],
)
def test_heads(model: nn.Module, heads: list[str], with_example: bool) -> None:
    found = find_blocks(model, (torch.randn(2, 8),) if with_example else None)
    assert [block.site for block in found if block.is_head] == heads
    assert all(block.is_head is not None for block in found)


def test_printed_it_reads_as_a_list_of_chains() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 1))
    assert str(find_blocks(model)) == (
        "data flow traced without an example\n  0 4×8 → LayerNorm → SiLU ⇒ 3\n  3 8×1 ⇒ output   (head)"
    )


def test_mistakes_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 1))
    with pytest.raises(InvalidInput, match=r"example must be a tuple of forward's arguments, .*, got a Tensor"):
        find_blocks(model, torch.randn(2, 4))  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match=r"the model has no site 'top'. It has: 0"):
        find_blocks(model).of("top")


def test_blocks_can_be_compared_and_stored() -> None:
    block = find_blocks(nn.Sequential(nn.Linear(4, 1))).of("0")
    assert block == Block("0", 4, 1, None, None, (Consumer(Kind.OUTPUT, "output"),), is_head=True, calls=1, is_first=True)
    assert len({block, block}) == 1


class Unread(nn.Module):
    """A layer whose output nobody reads, such as what is left of an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.aux, self.head = nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.aux(x)
        return self.head(x)


@pytest.mark.parametrize("with_example", [False, True])
def test_what_nobody_reads_is_not_taken_for_a_prediction(with_example: bool) -> None:
    found = find_blocks(Unread(), (torch.randn(5, 8),) if with_example else None)
    assert {block.site: block.is_head for block in found} == {"aux": None, "head": True}


class Products(nn.Module):
    """One of each kind that no linear layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(16, 16), nn.Linear(16, 1)
        self.attention, self.conv = nn.MultiheadAttention(16, 2, batch_first=True), nn.Conv1d(4, 4, 1)
        self.table = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.attention(*[self.inner(x)] * 3)
        x = torch.einsum("btd,de->bte", self.conv(x), self.table) @ self.table
        x = torch.bmm(x, x.transpose(1, 2)).softmax(-1) @ x
        return self.head(F.scaled_dot_product_attention(x, x, x))


@pytest.mark.parametrize("example", [None, (torch.randn(2, 4, 16),)], ids=["traced", "run"])
def test_products_that_are_no_linear_layers_are_told(example: tuple[Tensor, ...] | None) -> None:
    told = {str(uncovered) for uncovered in find_blocks(Products(), example).uncovered}
    functions = ("einsum", "matmul", "bmm", "scaled_dot_product_attention")
    assert told >= {"MultiheadAttention in attention", "Conv1d in conv", *(f"{name} in the model" for name in functions)}
    assert not any(one.startswith("linear") for one in told)


class Output:
    """A user's own class for what a model gives."""

    def __init__(self, logits: Tensor, extra: dict[str, Tensor]) -> None:
        self.logits, self.extra = logits, extra


class Keyed(nn.Module):
    """Called by names, branching on a value, and giving an object."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.aux = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, dense: Tensor, *, mask: Tensor) -> Output:
        y = self.body(dense).relu()
        y = y * mask if mask.sum() > 0 else y
        return Output(self.head(y), {"aux": self.aux(y)})


def test_arguments_by_name_and_outputs_of_any_class() -> None:
    found = find_blocks(Keyed(), {"dense": torch.randn(5, 4), "mask": torch.ones(5, 1)})
    assert {block.site: block.is_head for block in found} == {"body": False, "head": True, "aux": True}


@pytest.mark.parametrize("with_example", [True, False])
def test_what_modules_keep_for_later_has_a_reader(with_example: bool) -> None:
    """For an auxiliary loss, say: a block would put the activation's output in place of the layer's."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.head = (nn.Linear(4, 4) for _ in range(4))
            self.norm, self.act = nn.LayerNorm(4), nn.ReLU()
            self.seen: dict[str, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            self.pre = self.a(x)
            normed = self.norm(self.pre)
            self.seen["hidden"] = self.b(self.act(normed))
            return self.head(torch.relu(self.c(self.seen["hidden"])))

    model = Keeps()
    found = find_blocks(model, (torch.randn(3, 4),) if with_example else None)
    known = {block.site: (block.norm, block.activation, set(map(str, block.consumers))) for block in found}
    assert known["a"] == (None, None, {"norm", "attribute"})
    assert known["b"] == (None, None, {"c", "attribute"})
    assert known["c"] == (None, Follower("relu", None), {"head"})
    assert not hasattr(model, "pre")
    assert model.seen == {}


@pytest.mark.parametrize("with_example", [True, False])
def test_whatever_modules_hold_is_no_hindrance(with_example: bool) -> None:
    class Closed(dict):
        def values(self):  # type: ignore[no-untyped-def,override]
            raise RuntimeError("the store is closed")

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    model.config = {"name": "x"}  # type: ignore[assignment]
    model.config["self"] = model.config  # type: ignore[index]
    if with_example:
        model.store = Closed(a=1)  # type: ignore[assignment]
    found = find_blocks(model, (torch.randn(3, 4),) if with_example else None)
    assert lines(found) == ["0 → ReLU ⇒ 2", "2 ⇒ output"]
