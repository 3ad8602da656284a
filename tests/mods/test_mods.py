"""Each Mod against its mathematics written out, on a user's model and on our four."""

import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from report_lines import changed
from torch import Tensor, nn

import loka
from loka.data.batch import Batch
from loka.kernels.executor import SiteKernels
from loka.models.dcnv2 import DcnV2DensePart
from loka.models.dlrm import DlrmDensePart
from loka.models.interformer import InterFormerDensePart
from loka.models.recommender import Recommender
from loka.models.wukong import WukongDensePart
from loka.nn.blocks import Uncovered

ALL = ["no_bias", "block_norm", "hard_swish", "insert_norm"]

# The layer that reads the dense features, which in DCNv2 has none to begin with, and the head.
KEEP_THEIR_BIAS: dict[type[nn.Module], list[str]] = {
    WukongDensePart: ["dense.hidden.0", "head"],
    DlrmDensePart: ["dense.0", "head"],
    DcnV2DensePart: ["head"],
    InterFormerDensePart: ["dense.hidden.0", "head"],
}


def block_rms(x: Tensor, eps: float) -> Tensor:
    """By numpy-like steps of its own: as few chunks of at most 256 as will do, each divided by its RMS."""
    chunks = torch.tensor_split(x, math.ceil(x.shape[-1] / 256), dim=-1)
    return torch.cat([chunk / (chunk.pow(2).mean(-1, keepdim=True) + eps).sqrt() for chunk in chunks], dim=-1)


def hard_swish(x: Tensor) -> Tensor:
    return x * (x + 3).clamp(0, 6) / 6


def linear(module: nn.Module, x: Tensor, bias: bool) -> Tensor:
    y = x @ module.weight.T  # type: ignore[operator]
    return y + module.bias if bias else y  # type: ignore[operator]


class TestOnAUsersModel:
    """The output after each Mod is what the formula gives on the weights from before."""

    def forward(self, mlp: nn.Sequential, x: Tensor, mods: list[str]) -> Tensor:
        bias, blocks, swish = "no_bias" not in mods, "block_norm" in mods, "hard_swish" in mods
        y = linear(mlp[0], x, True)
        shift = mlp[1].bias if bias else None
        y = block_rms(y, 1e-5) if blocks else F.layer_norm(y, (300,), mlp[1].weight, shift)  # type: ignore[arg-type]
        y = hard_swish(y) if swish else y * y.sigmoid()
        y = linear(mlp[3], y, bias)
        y = block_rms(y, 2**-23) if blocks else F.rms_norm(y, (20,), mlp[4].weight)  # type: ignore[arg-type]
        return linear(mlp[6], y.relu(), True)

    @pytest.mark.parametrize("mods", [[], ["no_bias"], ["block_norm"], ["hard_swish"], ALL[:3], None], ids=str)
    def test_output(self, mlp: nn.Sequential, mods: list[str] | None) -> None:
        x = torch.randn(5, 6, dtype=torch.float64)
        mlp.double()
        for norm in (mlp[1], mlp[4]):
            nn.init.constant_(norm.weight, 1.5)  # type: ignore[arg-type]
        expected = self.forward(copy.deepcopy(mlp), x, ALL[:3] if mods is None else mods)
        loka.apply_mods(mlp, mods)
        torch.testing.assert_close(mlp(x), expected, rtol=1e-9, atol=1e-9)

    def test_insert_norm(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(6, 300), nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Linear(300, 8), nn.GELU(), nn.Linear(8, 7)]
        model = nn.Sequential(*layers, nn.ReLU(), nn.Linear(7, 2))
        x = torch.randn(5, 6)
        before = dict(model.state_dict())
        y = block_rms(model[0](x), 1e-5).relu()
        y = F.gelu(block_rms(model[3](y), 1e-5))
        expected = model[7](model[5](y).relu()).detach()  # no norm in front of the head
        report = loka.apply_mods(model, "insert_norm")
        torch.testing.assert_close(model(x), expected)
        assert [(c.name, c.before, c.after) for c in report.changes] == [
            ("1", "behind 0", "BlockNorm(300) inserted"),
            ("4", "behind 3", "BlockNorm(8) inserted"),
        ]
        why = "is read by the prediction head 7 alone, which stays in high precision: it needs no bound"
        assert [(left.name, left.why) for left in report.left_alone] == [("6", why)]
        assert list(model.state_dict()) == list(before)  # checkpoints fit as before
        model(x).sum().backward()  # an in-place ReLU must not spoil the norm's gradient
        assert not loka.apply_mods(model, "insert_norm").changes

    def test_insert_norm_goes_around_what_hard_swish_puts_there(self) -> None:
        for mods in (["insert_norm", "hard_swish"], ["hard_swish", "insert_norm"]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
            x = torch.randn(4, 6)
            expected = model[4](model[2](hard_swish(block_rms(model[0](x), 1e-5))).tanh()).detach()
            loka.apply_mods(model, mods)
            torch.testing.assert_close(model(x), expected)

    def test_what_works_in_place_does_so_behind_hard_swish(self) -> None:
        """Forward may go on with what it has given to the activation."""

        class InPlace(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner, self.act, self.out = nn.Linear(6, 20), nn.SiLU(inplace=True), nn.Linear(20, 1)

            def forward(self, x: Tensor) -> Tensor:
                y = self.inner(x)
                self.act(y)
                return self.out(y)

        model, x = InPlace(), torch.randn(5, 6)
        loka.apply_mods(model, ["hard_swish"])
        torch.testing.assert_close(model(x), model.out(hard_swish(model.inner(x))))

    def test_insert_norm_leaves_bounded_activations_alone(self) -> None:
        gates = nn.Sequential(nn.Linear(6, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        assert not loka.apply_mods(gates, "insert_norm").changes


@given(n=st.integers(1, 600), norm=st.sampled_from([nn.LayerNorm, nn.RMSNorm]), affine=st.booleans(), seed=st.integers(0, 99))
def test_block_norm_of_any_width(n: int, norm: type[nn.Module], affine: bool, seed: int) -> None:
    model = nn.Sequential(norm(n, eps=1e-3, elementwise_affine=affine), nn.Identity())
    report = loka.apply_mods(model, ["block_norm"])
    assert report.n_removed == sum((n, n if norm is nn.LayerNorm else 0)) * affine
    x = torch.randn(3, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(model(x), block_rms(x, 1e-3))


def test_a_shared_bias_is_counted_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    model[1].bias = model[2].bias
    report = loka.apply_mods(model, ["no_bias"])
    assert [change.removed for change in report.changes] == [("1.bias",), ("2.bias",)]
    assert report.n_removed == 8
    assert "8 of 133 parameters" in str(report)


def test_a_bias_that_a_head_keeps_is_not_counted() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))
    model[1].bias = model[3].bias
    before = sum(parameter.numel() for parameter in model.parameters())
    report = loka.apply_mods(model, ["no_bias"])
    assert [change.removed for change in report.changes] == [("1.bias",)]
    assert report.n_removed == before - sum(parameter.numel() for parameter in model.parameters()) == 0


def test_how_large_the_inputs_are_is_not_lost() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 300), nn.LayerNorm(300), nn.SiLU(), nn.Linear(300, 1)).double()
    loka.apply_mods(model)
    without = copy.deepcopy(model)
    for layer in (without[0], without[3]):
        layer.bias = None
    x = torch.randn(20, 6, dtype=torch.float64)
    torch.testing.assert_close(without(10 * x), without(x), rtol=0, atol=1e-4)  # but for the norm's eps
    assert (model(10 * x) - model(x)).abs().mean() > 0.05


class TestOnOurModels:
    def test_all_mods(self, recommender: Recommender, batch: Batch) -> None:
        before = {name: tensor.clone() for name, tensor in recommender.state_dict().items()}
        report = loka.apply_mods(recommender, example=(batch,))
        kinds = {type(module) for module in recommender.modules()}
        assert not kinds & {nn.LayerNorm, nn.SiLU}
        biases = [name for name, _ in recommender.named_parameters() if name.endswith("bias")]
        kept = KEEP_THEIR_BIAS[type(recommender.dense_part)]
        assert biases == [f"dense_part.{name}.bias" for name in kept]
        assert [left.name for left in report.left_alone] == [f"dense_part.{name}" for name in kept]
        after = recommender.state_dict()
        assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())  # what stays is bit for bit the same
        gone = [name for name in before if name not in after]
        assert sorted(gone) == sorted(name for change in report.changes for name in change.removed)
        assert report.n_removed == sum(before[name].numel() for name in gone)
        assert all(name.endswith(("bias", "weight")) for name in gone)

    def test_without_an_example_only_what_is_certain_changes(self, recommender: Recommender, batch: Batch) -> None:
        certain = loka.apply_mods(recommender.dense_part, dry_run=True)
        with torch.no_grad():
            example = (batch.dense_BD, *recommender.embeddings(batch))
        everything = loka.apply_mods(recommender.dense_part, example=example, dry_run=True)
        assert [left.name for left in everything.left_alone] == KEEP_THEIR_BIAS[type(recommender.dense_part)]
        assert set(certain.changes) <= set(everything.changes)
        unsure = {left.name for left in certain.left_alone} - {left.name for left in everything.left_alone}
        assert {c.name for c in everything.changes} == {c.name for c in certain.changes} | unsure

    @pytest.mark.parametrize("mod", ALL)
    def test_one_mod_does_what_it_says_and_no_more(self, recommender: Recommender, batch: Batch, mod: str) -> None:
        becomes = {
            "no_bias": {},
            "block_norm": {nn.LayerNorm: loka.BlockNorm},
            "hard_swish": {nn.SiLU: nn.Hardswish},
            "insert_norm": {nn.ReLU: nn.Sequential},
        }[mod]
        types = {name: type(module) for name, module in recommender.named_modules()}
        if types.get("dense_part.top.3") is nn.ReLU:
            del types["dense_part.top.3"]  # in front of the head, where insert_norm puts none
        parameters = set(dict(recommender.named_parameters()))
        report = loka.apply_mods(recommender, mod, example=(batch,))
        now = {name: type(module) for name, module in recommender.named_modules()}
        assert {name: now[name] for name in types} == {name: becomes.get(kind, kind) for name, kind in types.items()}
        gone = parameters - set(dict(recommender.named_parameters()))
        if mod == "no_bias":
            kept = {f"dense_part.{name}.bias" for name in KEEP_THEIR_BIAS[type(recommender.dense_part)]}
            assert gone == {name for name in parameters if name.endswith("bias")} - kept
        else:
            assert gone == {name for name in parameters if types[name.rpartition(".")[0]] in becomes}
            assert {change.name for change in report.changes} == {name for name, kind in types.items() if kind in becomes}

    @pytest.mark.parametrize("mods", [None, ALL], ids=["default", "all"])
    def test_a_second_time_nothing_changes(self, recommender: Recommender, batch: Batch, mods: list[str] | None) -> None:
        loka.apply_mods(recommender, mods, example=(batch,))
        logits, text = recommender(batch), repr(recommender)
        assert loka.apply_mods(recommender, mods, example=(batch,)).changes == ()
        assert torch.equal(recommender(batch), logits)
        assert repr(recommender) == text

    def test_dry_run_reports_the_same_and_changes_nothing(self, recommender: Recommender, batch: Batch) -> None:
        modules, text = list(recommender.modules()), repr(recommender)
        tensors = {name: (id(tensor), tensor.clone()) for name, tensor in recommender.named_parameters()}
        random_state = torch.get_rng_state()
        promised = loka.apply_mods(recommender, ALL, example=(batch,), dry_run=True)
        assert all(one is other for one, other in zip(recommender.modules(), modules, strict=True))
        assert repr(recommender) == text
        assert torch.equal(torch.get_rng_state(), random_state)
        for name, tensor in recommender.named_parameters():
            assert id(tensor) == tensors[name][0]
            assert torch.equal(tensor, tensors[name][1])
            assert tensor.grad is None
        done = loka.apply_mods(recommender, ALL, example=(batch,))
        assert done.changes == promised.changes
        assert done.left_alone == promised.left_alone
        assert (promised.applied, done.applied) == (False, True)

    def test_it_trains_copies_and_saves(self, recommender: Recommender, batch: Batch) -> None:
        loka.apply_mods(recommender, ALL, example=(batch,))
        optimizer = torch.optim.Adam(recommender.dense_part.parameters(), lr=0.01)
        losses = []
        for _ in range(30):
            loss = F.binary_cross_entropy_with_logits(recommender(batch), batch.label_B)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0]
        assert all(parameter.grad is not None for parameter in recommender.dense_part.parameters())

        other = copy.deepcopy(recommender)
        assert torch.equal(other(batch), recommender(batch))
        buffer = io.BytesIO()
        torch.save(recommender.state_dict(), buffer)
        buffer.seek(0)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        other.load_state_dict(torch.load(buffer, weights_only=True))
        assert torch.equal(other(batch), recommender(batch))

    @pytest.mark.usefixtures("fresh_compiler")
    def test_it_compiles_into_one_graph(self, recommender: Recommender, batch: Batch) -> None:
        with torch.no_grad():
            example = (batch.dense_BD, *recommender.embeddings(batch))
        loka.apply_mods(recommender.dense_part, ALL, example=example)
        compiled = torch.compile(recommender.dense_part, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*example), recommender.dense_part(*example))


@pytest.mark.usefixtures("fresh_compiler")
def test_a_model_that_was_compiled_and_run_before_runs_the_changed_one(mlp: nn.Sequential) -> None:
    x = torch.randn(4, 6)
    compiled = torch.compile(mlp, backend="eager")
    compiled(x)
    report = loka.apply_mods(compiled)  # type: ignore[arg-type]
    assert [change.name for change in report.changes] == ["1", "4", "2", "3"]
    torch.testing.assert_close(compiled(x), mlp(x))
    assert isinstance(mlp[1], loka.BlockNorm)


def test_a_loka_linear_loses_its_bias_too() -> None:
    linear = loka.LokaLinear(8, 4, kernels=SiteKernels.same("reference.rowwise"))
    model = nn.Sequential(nn.Linear(8, 8), linear, nn.SiLU(), nn.Linear(4, 1))
    x = torch.randn(3, 8)
    expected = (linear(x) - linear.bias).detach()
    loka.apply_mods(model)
    assert model[1] is linear
    assert linear.bias is None
    torch.testing.assert_close(linear(x), expected)


def test_modes_are_kept(mlp: nn.Sequential) -> None:
    mlp.eval()
    mlp[2].train()
    loka.apply_mods(mlp)
    assert [module.training for module in mlp] == [False, False, True, False, False, False, False]


def test_functions_that_do_the_same_are_reported() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(F.silu(F.layer_norm(self.linear(x), (4,)))))

    model = nn.Sequential(Functional())
    report = loka.apply_mods(model)
    assert set(report.not_covered) == {Uncovered("layer_norm", "0"), Uncovered("silu", "0")}
    assert "silu in 0" in str(report)
    assert loka.apply_mods(model, "hard_swish").not_covered == (Uncovered("silu", "0"),)


@pytest.mark.parametrize(("norm", "name"), [(nn.LayerNorm(8), "input"), (nn.RMSNorm(8), "x")])
def test_a_norm_and_an_activation_that_are_called_by_the_names_of_their_arguments(norm: nn.Module, name: str) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.activation, self.head = nn.Linear(6, 8), copy.deepcopy(norm), nn.SiLU(), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.activation(input=self.norm(**{name: self.first(input=x)})))

    model, x = Named(), torch.randn(4, 6)
    report = loka.apply_mods(model, example=(x,))
    assert changed(report) == ["block_norm norm", "hard_swish activation"]
    y = model.first(x)
    y = F.hardswish(y / (y.square().mean(1, keepdim=True) + model.norm.eps).sqrt())
    torch.testing.assert_close(model(x), model.head(y))
