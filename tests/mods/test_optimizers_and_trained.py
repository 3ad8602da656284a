"""Mods on a model that has an optimizer already, or that has been trained."""

import copy

import pytest
import torch
from torch import nn

import loka
from loka.core.errors import InvalidInput
from loka.train.optim import RowWiseAdagrad


class TestOptimizer:
    def parameters(self, optimizer: torch.optim.Optimizer) -> list[int]:
        return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]

    @pytest.mark.parametrize(
        "make",
        [
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            lambda p: torch.optim.AdamW(p, lr=0.1),
            lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
            lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
        ],
        ids=["sgd", "adamw", "fused", "adagrad"],
    )
    def test_made_before_it_goes_on_with_what_is_left(self, mlp: nn.Sequential, make) -> None:  # type: ignore[no-untyped-def]
        matrices = [parameter for parameter in mlp.parameters() if parameter.ndim == 2]
        vectors = [parameter for parameter in mlp[1:6].parameters() if parameter.ndim < 2]
        optimizer = make([{"params": matrices}, {"params": vectors}, {"params": [mlp[0].bias, mlp[6].bias]}])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        report = loka.apply_mods(mlp, optimizer=optimizer)
        assert sorted(self.parameters(optimizer)) == sorted(id(parameter) for parameter in mlp.parameters())
        assert [len(group["params"]) for group in optimizer.param_groups] == [3, 0, 2]
        assert report.n_removed == sum(parameter.numel() for parameter in vectors)
        assert all(id(parameter) in self.parameters(optimizer) for parameter in optimizer.state)
        before = [parameter.clone() for parameter in mlp.parameters()]
        mlp(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        assert not any(torch.equal(one, other) for one, other in zip(before, mlp.parameters(), strict=True))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def test_several_go_on_with_what_is_left_to_each(self, mlp: nn.Sequential) -> None:
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (mlp[:3], mlp[3:])]
        loka.apply_mods(mlp, optimizer=(optimizer for optimizer in optimizers))
        left = [self.parameters(optimizer) for optimizer in optimizers]
        assert left == [[id(parameter) for parameter in part.parameters()] for part in (mlp[:3], mlp[3:])]

    @pytest.mark.parametrize("wrong", [3, [None], "adam"])
    def test_what_is_none_is_told(self, mlp: nn.Sequential, wrong: object) -> None:
        with pytest.raises(InvalidInput, match="give the optimizer, or a list of them"):
            loka.apply_mods(mlp, optimizer=wrong)  # type: ignore[arg-type]

    def test_names_of_parameters_follow(self, mlp: nn.Sequential) -> None:
        optimizer = torch.optim.SGD(mlp.named_parameters(), lr=0.1)
        loka.apply_mods(mlp, optimizer=optimizer)
        assert optimizer.param_groups[0]["param_names"] == [name for name, _ in mlp.named_parameters()]
        optimizer.load_state_dict(optimizer.state_dict())

    def test_state_of_a_trained_one_is_dropped_with_its_parameters(self, mlp: nn.Sequential) -> None:
        optimizer = torch.optim.Adam(mlp.parameters())
        mlp(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = {name: optimizer.state[parameter]["exp_avg"].clone() for name, parameter in mlp.named_parameters()}
        loka.apply_mods(mlp, optimizer=optimizer, retrain=True)
        assert {id(parameter) for parameter in optimizer.state} == {id(parameter) for parameter in mlp.parameters()}
        for name, parameter in mlp.named_parameters():
            assert torch.equal(optimizer.state[parameter]["exp_avg"], state[name])

    def test_a_bias_that_another_module_shares_stays(self) -> None:
        model = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
        model[3].bias = nn.Parameter(torch.zeros(1))
        model[1].bias = nn.Parameter(torch.zeros(2))
        model.append(nn.Linear(1, 2, bias=False))
        model[4].bias = model[1].bias  # the head's, so it is still in the model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loka.apply_mods(model, optimizer=optimizer)
        assert model[1].bias is None
        assert id(model[4].bias) in self.parameters(optimizer)


def train_one_step(model: nn.Module, lr: float = 1e-3) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model(torch.randn(16, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class TestTrained:
    def test_a_norm_tells_after_one_step(self, mlp: nn.Sequential) -> None:
        train_one_step(mlp)
        before = copy.deepcopy(mlp.state_dict())
        message = r"looks trained: 1 \(LayerNorm\) has a weight that differs from feature to feature.*retrain=True"
        with pytest.raises(InvalidInput, match=message):
            loka.apply_mods(mlp)
        assert list(mlp.state_dict()) == list(before)
        assert isinstance(mlp[1], nn.LayerNorm)
        promised = loka.apply_mods(mlp, dry_run=True)
        assert "looks trained: 1 (LayerNorm)" in str(promised)
        assert loka.apply_mods(mlp, retrain=True).changes == promised.changes

    def test_where_nothing_would_change_a_trained_model_is_welcome(self, mlp: nn.Sequential) -> None:
        loka.apply_mods(mlp)
        train_one_step(mlp)
        mlp(torch.randn(4, 6)).sum().backward()
        assert not loka.apply_mods(mlp).changes

    def test_biases_tell_where_there_is_no_norm(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 256), nn.ReLU(), nn.Linear(256, 8), nn.ReLU(), nn.Linear(8, 1))
        loka.apply_mods(copy.deepcopy(model))
        train_one_step(model, lr=0.01)
        with pytest.raises(InvalidInput, match=r"0 \(Linear\) has a bias outside its initial ±0.408"):
            loka.apply_mods(model)

    def test_a_gradient_a_batch_norm_or_an_optimizer_tells(self, mlp: nn.Sequential) -> None:
        fresh = copy.deepcopy(mlp)
        fresh(torch.randn(4, 6)).sum().backward()
        with pytest.raises(InvalidInput, match=r"0.weight has a gradient"):
            loka.apply_mods(fresh)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.SiLU())
        model(torch.randn(4, 6))
        with pytest.raises(InvalidInput, match=r"1 \(BatchNorm1d\) has seen batches"):
            loka.apply_mods(model)
        other = nn.Linear(4, 4)
        optimizer = torch.optim.SGD([*mlp.parameters(), *other.parameters()], lr=0.1, momentum=0.9)
        other(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        with pytest.raises(InvalidInput, match="its optimizer has made steps"):
            loka.apply_mods(mlp, optimizer=optimizer)

    @pytest.mark.parametrize(
        "initialize",
        [
            lambda model: None,
            lambda model: nn.init.zeros_(model[0].bias),
            lambda model: nn.init.constant_(model[3].bias, -3.0),
            lambda model: nn.init.constant_(model[1].weight, 0.1),
            lambda model: nn.init.xavier_normal_(model[3].weight),
            lambda model: model.bfloat16(),
            lambda model: model.to("meta"),
        ],
        ids=["default", "zero bias", "base rate", "small gain", "xavier", "bf16", "meta"],
    )
    def test_initial_values_of_many_kinds_do_not(self, mlp: nn.Sequential, initialize) -> None:  # type: ignore[no-untyped-def]
        initialize(mlp)
        optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(mlp.parameters()), torch.optim.Adagrad(mlp.parameters())]
        optimizers.append(RowWiseAdagrad([nn.Parameter(torch.zeros(3, 2))], lr=0.1))  # has its state from the start
        for optimizer in optimizers:
            assert loka.apply_mods(mlp, optimizer=optimizer, dry_run=True).trained is None
        kept = int(bool((mlp[3].bias == -3).all())) if not mlp[3].bias.is_meta else 0  # set on purpose
        assert len(loka.apply_mods(mlp).changes) == 4 - kept

    def test_rounding_an_initial_bias_to_bf16_does_not(self) -> None:
        layer = nn.Linear(5, 2)
        layer.bias = nn.Parameter(torch.tensor([0.1, 0.4472]).bfloat16())  # below 1/√5, and above once rounded
        assert layer.bias.max().item() > 5**-0.5
        assert loka.apply_mods(nn.Sequential(layer, nn.SiLU()), dry_run=True).trained is None
