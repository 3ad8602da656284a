"""What users hang on their layers, and do with models that hold stand-ins for them."""

import copy
from collections.abc import Callable

import pytest
import torch
from plans import ROWWISE, Tower, batch, plan_for, tower
from torch import nn
from torch.optim.swa_utils import AveragedModel

import loka
from loka.core.errors import InvalidInput, KernelUnavailable
from loka.core.plan import BlockPlan, Goal
from loka.dispatch.apply import give_back
from loka.dispatch.planned import PassThrough, PlannedLinear
from loka.kernels.executor import SiteKernels
from loka.nn.fused_block import FusedBlock
from loka.nn.weight_casts import held

SITES = {"bottom": ROWWISE, "top.0": ROWWISE}


def hang(layer: nn.Linear, what: str) -> None:
    if what == "gain":
        layer.gain = nn.Parameter(torch.ones(32))
    elif what == "seen":
        layer.register_buffer("seen", torch.zeros(()))
    else:
        layer.add_module("lora", nn.Linear(24, 32))


class TestWhatALayerHolds:
    @pytest.mark.parametrize("what", ["gain", "seen", "lora"])
    def test_keeps_it_as_it_is(self, what: str) -> None:
        """A stand-in has the weight and the bias alone: the rest would neither train nor be saved."""
        model = tower()
        hang(model.bottom, what)
        plan = plan_for(model, SITES)
        state = list(model.state_dict())
        with pytest.raises(KernelUnavailable, match=rf"bottom holds {what} too"):
            loka.apply_plan(model, plan)
        assert type(model.bottom) is nn.Linear
        applied = loka.apply_plan(model, plan, on_missing="high_precision")
        assert list(applied.fell_back) == ["bottom"]
        assert list(model.state_dict()) == state

    def test_is_told_by_the_probe(self) -> None:
        model = tower()
        hang(model.bottom, "lora")
        probe = loka.Probe(model, every=1)
        with probe.step():
            model(batch()).sum().backward()
        stays = {name: site.stays for name, site in probe.record().sites.items()}
        probe.detach()
        assert stays["bottom"] is not None
        assert stays["bottom"].startswith("holds lora too")
        assert stays["top.0"] is None

    def test_of_what_a_block_would_absorb(self) -> None:
        model = nn.Sequential(nn.Linear(32, 32, bias=False), loka.BlockNorm(32), nn.Hardswish(), nn.Linear(32, 1))
        model[1].gain = nn.Parameter(torch.ones(32))
        with pytest.raises(KernelUnavailable, match=r"would absorb 1, which holds gain too"):
            loka.apply_plan(model, plan_for(model, {"0": BlockPlan("triton.block", "1", "2", False, None)}))


class TestPlainAttributes:
    """A number, a name, whatever forward reads."""

    def test_are_on_what_stands_there_and_come_back(self) -> None:
        model = tower()
        model.bottom.scale, model.bottom._note = 3.0, ["mine"]  # type: ignore[assignment]
        loka.apply_plan(model, plan_for(model, SITES))
        assert isinstance(model.bottom, PlannedLinear)
        assert (model.bottom.scale, model.bottom._note) == (3.0, ["mine"])
        assert copy.deepcopy(model).bottom.scale == 3.0
        model.bottom.scale = 4.0  # type: ignore[assignment]
        loka.restore(model)
        assert type(model.bottom) is nn.Linear
        assert model.bottom.scale == 4.0

    def test_are_served(self) -> None:
        model = tower()
        model.bottom.gain = 3.0  # type: ignore[assignment]
        loka.apply_plan(model, plan_for(model, SITES, goal=Goal.SERVING))
        loka.freeze(model, drop_high_precision=True)
        assert model.bottom.gain == 3.0

    def test_of_a_name_that_the_stand_in_uses_itself(self) -> None:
        """Forward would read ours in its place."""
        model = tower()
        model.bottom.rows = 3  # type: ignore[assignment]
        with pytest.raises(KernelUnavailable, match=r"bottom has an attribute 'rows' put on it, which the PlannedLinear"):
            loka.apply_plan(model, plan_for(model, SITES))
        del model.bottom.rows
        model.bottom.scale = 3.0  # type: ignore[assignment]
        loka.apply_plan(model, plan_for(model, SITES, goal=Goal.SERVING))
        with pytest.raises(InvalidInput, match="has an attribute 'scale' put on it, which the FrozenLinear in its place"):
            loka.freeze(model)
        assert model.bottom.scale == 3.0
        assert [type(model.bottom), type(model.top[0])] == [PlannedLinear, PlannedLinear]

    def test_put_on_later_and_taken_away_later(self) -> None:
        """On what stands there: the user's layer, as far as anybody knows."""
        model = tower()
        model.bottom.early = 1  # type: ignore[assignment]
        loka.apply_plan(model, plan_for(model, SITES))
        model.bottom.late, model.top[0].late = 2, 3  # type: ignore[assignment]
        del model.bottom.early
        loka.restore(model)
        assert (model.bottom.late, model.top[0].late) == (2, 3)
        assert not hasattr(model.bottom, "early")
        assert set(vars(model.bottom)) == {*vars(nn.Linear(2, 2)), "late"}

    @pytest.mark.parametrize("leave", [loka.restore, loka.freeze])
    @pytest.mark.parametrize("what", ["seen", "lora"])
    def test_buffers_and_modules_put_on_later_are_not_lost(self, what: str, leave: Callable[[nn.Module], object]) -> None:
        model = tower()
        loka.apply_plan(model, plan_for(model, SITES))
        hang(model.bottom, what)
        with pytest.raises(InvalidInput, match=f"bottom holds {what} too"):
            leave(model)
        assert isinstance(model.bottom, PlannedLinear)

    def test_of_a_layer_that_is_one_of_ours(self) -> None:
        layer = loka.LokaLinear(32, 32, kernels=ROWWISE)
        layer.mine = 1  # type: ignore[assignment]
        block = FusedBlock.from_modules(layer, loka.BlockNorm(32), nn.Hardswish())
        assert block.mine == 1
        assert "executor" not in vars(block)

    def test_of_a_name_that_stands_in_for_what_a_block_absorbs_use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(FusedBlock, "refresh_weight_casts", lambda self: setattr(self, "why_reference", None))
        model = nn.Sequential(nn.Linear(32, 32, bias=False), loka.BlockNorm(32), nn.Hardswish(), nn.Linear(32, 1))
        model[2].absorbed_by = "mine"  # type: ignore[assignment]
        plan = plan_for(model, {"0": BlockPlan("triton.block", "1", "2", False, None)})
        with pytest.raises(KernelUnavailable, match=r"0 would absorb 2, which has an attribute 'absorbed_by' put on it"):
            loka.apply_plan(model, plan)
        assert list(loka.apply_plan(model, plan, on_missing="high_precision").fell_back) == ["0"]

    def test_of_what_a_block_absorbs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(FusedBlock, "refresh_weight_casts", lambda self: setattr(self, "why_reference", None))
        model = nn.Sequential(nn.Linear(32, 32, bias=False), loka.BlockNorm(32), nn.Hardswish(), nn.Linear(32, 1))
        model[0].scale, model[1].mult, model[2].name = 3.0, 2.0, "act"  # type: ignore[assignment]
        loka.apply_plan(model, plan_for(model, {"0": BlockPlan("triton.block", "1", "2", False, None)}))
        assert [type(model[index]) for index in range(3)] == [FusedBlock, PassThrough, PassThrough]
        assert (model[0].scale, model[1].mult, model[2].name) == (3.0, 2.0, "act")
        seen: list[int] = []
        for index in range(3):
            model[index].register_forward_hook(lambda *_, index=index: seen.append(index))
        loka.restore(model)
        model(torch.randn(2, 32))
        assert seen == [0, 1, 2]


class TestADtypeThatNothingCasts:
    def planned(self) -> Tower:
        model = tower()
        loka.apply_plan(model, plan_for(model, SITES))
        return model

    def test_runs_in_high_precision_and_is_counted(self) -> None:
        model, x = self.planned(), batch().double()
        model.double()
        assert {p.dtype for p in model.parameters()} == {torch.float64}
        torch.testing.assert_close(model(x), tower().double()(x), rtol=0, atol=0)
        assert isinstance(model.bottom, PlannedLinear)
        assert int(model.bottom.high_precision_calls) == 1

    def test_learns_and_comes_back(self) -> None:
        model, expected = self.planned(), self.planned()
        before = expected(batch())
        model.double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model(batch().double()).sum().backward()
        optimizer.step()
        model.zero_grad()
        model.float()
        assert torch.equal(model(batch()), before)
        assert isinstance(model.bottom, PlannedLinear)
        assert int(model.bottom.high_precision_calls) == 1

    def test_is_served_by_the_weights_that_were_kept(self) -> None:
        model, x = self.planned(), batch().double()
        loka.freeze(model)
        torch.testing.assert_close(model.double()(x), tower().double()(x), rtol=0, atol=0)

    def test_can_be_restored(self) -> None:
        model = self.planned().double()
        loka.restore(model)
        assert model(batch().double()).dtype is torch.float64


def _step_alone(layer: nn.Module) -> None:
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer(torch.randn(32, 24)).square().mean().backward()
    optimizer.step()


class TestWhereAModelLies:
    def test_casts_are_shared_with_other_processes_as_the_weight_is(self) -> None:
        """A step in one of them is then seen by all."""
        model = tower()
        loka.apply_plan(model, plan_for(model, SITES))
        model.share_memory()
        before = held(model.bottom)
        assert before
        assert all(tensor.is_shared() for tensor in before.values())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(batch()).sum().backward()
        optimizer.step()
        assert {name: tensor.data_ptr() for name, tensor in held(model.bottom).items()} == {
            name: tensor.data_ptr() for name, tensor in before.items()
        }

    def test_what_another_process_wrote_is_read_after_refresh(self) -> None:
        """It wrote weight and casts, but not the versions by which this process knows what it has packed."""
        model, x_24 = tower(), torch.randn(32, 24)
        loka.apply_plan(model, plan_for(model, {"bottom": SiteKernels.same("onednn.int8")}))
        model.share_memory()
        before = model.bottom(x_24)
        process = torch.multiprocessing.get_context("fork").Process(target=_step_alone, args=(model.bottom,))
        process.start()
        process.join()
        assert process.exitcode == 0
        loka.refresh(model)
        assert not torch.equal(model.bottom(x_24), before)
        assert torch.equal(model.bottom(x_24), copy.deepcopy(model.bottom)(x_24))

    def test_made_nowhere_and_filled_later(self) -> None:
        with torch.device("meta"):
            model = tower()
        loka.apply_plan(model, plan_for(tower(), SITES), on_missing="high_precision")
        centered = plan_for(tower(), SITES, vectors={"bottom/center": torch.ones(24)})
        with torch.device("meta"):
            fell_back = loka.apply_plan(tower(), centered, on_missing="high_precision").fell_back
        assert "would be lost on the meta device" in fell_back["bottom"]
        model.to_empty(device="cpu")
        model.load_state_dict(tower().state_dict())
        expected = tower()
        loka.apply_plan(expected, plan_for(expected, SITES))
        assert torch.equal(model(batch()), expected(batch()))


class TestBuffers:
    """A model's own, whatever is planned: averages of models go through those of both, and torch sends them between ranks."""

    def test_are_those_of_the_model(self) -> None:
        model = normed()
        names = [name for name, _ in model.named_buffers()]
        vector = {"bottom/center": torch.zeros(24)}
        loka.apply_plan(model, plan_for(model, SITES, vectors=vector))
        assert [name for name, _ in model.named_buffers()] == names
        assert [name for name, _ in copy.deepcopy(model).named_buffers()] == names

    @pytest.mark.parametrize("use_buffers", [False, True])
    def test_an_average_lives_through_a_plan(self, use_buffers: bool) -> None:
        """Made before it, updated under it, when a site is given back, and behind it."""
        model, twin = normed(), normed()
        average, expected = AveragedModel(model, use_buffers=use_buffers), AveragedModel(twin, use_buffers=use_buffers)

        def update() -> None:
            with torch.no_grad():
                for one in (model, twin):
                    for parameter in one.parameters():
                        parameter.mul_(1.01)
                    one.top[4].running_mean.add_(1.0)
            average.update_parameters(model)
            expected.update_parameters(twin)
            for found, right in zip(average.state_dict().values(), expected.state_dict().values(), strict=True):
                torch.testing.assert_close(found, right)

        update()
        loka.apply_plan(model, plan_for(model, SITES))
        update()
        give_back(model, "bottom", "drifted")
        update()
        loka.restore(model)
        update()

    def test_an_average_may_be_planned_itself(self) -> None:
        model = normed()
        average = AveragedModel(model)
        loka.apply_plan(average, plan_for(model, SITES))
        for _ in range(2):
            with torch.no_grad():
                model.bottom.weight.mul_(3.0)
            average.update_parameters(model)
        expected = copy.deepcopy(average.module)
        loka.refresh(expected)
        assert torch.equal(average(batch()), expected(batch()))
        assert isinstance(average.module.bottom, PlannedLinear)
        torch.testing.assert_close(average.module.bottom.weight, model.bottom.weight * 2 / 3)  # of 3 and 9 times, 6

    def test_a_compiled_graph_knows_that_casts_stay_where_they_are(self, fresh_compiler: None) -> None:
        """Or CUDA graphs would copy them before every replay."""
        model = tower()
        loka.apply_plan(model, plan_for(model, SITES))
        static: list[bool] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
            static.extend(hasattr(one, "_dynamo_static_input_type") for one in inputs if one.dtype is torch.float8_e4m3fn)
            return graph

        torch.compile(model, backend=backend, fullgraph=True)(batch())
        assert len(static) >= 2
        assert all(static)


def normed() -> Tower:
    model = tower()
    model.top.append(nn.BatchNorm1d(32))
    return model


@pytest.mark.parametrize("leave", [loka.restore, loka.freeze, lambda model: give_back(model, "bottom", "drifted")])
def test_hooks_of_every_kind_go_on_when_a_stand_in_goes(leave: Callable[[nn.Module], object]) -> None:
    model = tower()
    loka.apply_plan(model, plan_for(model, SITES))
    ran: list[str] = []
    model.bottom.register_forward_pre_hook(lambda *_: ran.append("before"))
    model.bottom.register_forward_hook(lambda *_, **__: ran.append("behind"), with_kwargs=True)
    model.bottom.register_full_backward_pre_hook(lambda *_: ran.append("gradient"))
    model.bottom.register_full_backward_hook(lambda *_: ran.append("gradient passed"))
    leave(model)
    assert not isinstance(model.bottom, PlannedLinear)
    if leave is loka.freeze:
        model(batch())
        assert ran == ["before", "behind"]
    else:
        model(batch().requires_grad_()).sum().backward()
        assert ran == ["before", "behind", "gradient", "gradient passed"]
