"""How a Probe learns what its samples show: in which order, in how much memory, and in which arithmetic."""

import contextlib
import itertools
import logging
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from probed import probe_steps, small_model
from torch import Tensor, nn

import loka
from loka.core.errors import InvalidInput
from loka.core.gemm import Role
from loka.core.moments import Covariance
from loka.core.recipe import Format
from loka.core.record import Record
from loka.probe.budget import WIDEST, plan_memory
from loka.probe.history import LONGEST, History
from loka.probe.site_learning import SiteLearning
from loka.probe.statistics.binades import BINADES, LOWEST, counts_by_binade
from loka.probe.watch import Call, choose_rows


def test_x_and_dy_are_learned_together() -> None:
    """The gradient of the weight, made of both, is that of autograd, and rows that are drawn have it."""
    model, x_MK = nn.Linear(12, 5), torch.randn(64, 12) + 1
    site = probe_steps(model, lambda model: model(x_MK).pow(3).sum()).sites[""]
    gradients = site.statistics["gradients"].tensors
    torch.testing.assert_close(gradients["dw_NK"], model.weight.grad)
    assert (gradients["m"], gradients["steps"], gradients["count"]) == (64, 1, 64)
    assert site.trains
    torch.testing.assert_close(site.mean_K, x_MK.mean(0))
    torch.testing.assert_close(site.weight_NK, model.weight.detach())
    drawn_MK, dy_MN = site.sample(20_000, torch.Generator().manual_seed(0))
    error_NK = dy_MN.t() @ drawn_MK / len(drawn_MK) - model.weight.grad / 64
    assert error_NK.norm() < 0.15 * (model.weight.grad / 64).norm()


def test_the_gradient_of_the_weight_is_of_all_rows_and_all_else_of_those_that_were_chosen() -> None:
    model, calls = nn.Linear(12, 5), [torch.randn(64, 12), torch.randn(32, 12)]
    site = probe_steps(model, lambda model: sum(model(x_MK).pow(3).sum() for x_MK in calls), rows=16).sites[""]
    gradients = site.statistics["gradients"].tensors
    torch.testing.assert_close(gradients["dw_NK"], model.weight.grad)
    assert (gradients["m"], gradients["steps"], gradients["count"]) == (64 + 32, 1, 16 + 16)


def test_older_samples_fade_by_half_life() -> None:
    values = iter([0.0, 8.0, 16.0])
    record = probe_steps(nn.Linear(1, 1), lambda model: model(torch.full((4, 1), next(values))).sum(), 3, half_life=1.0)
    assert float(record.sites[""].mean_K) == pytest.approx((0 * 0.25 + 8 * 0.5 + 16) / 1.75)


def test_a_statistic_that_waited_for_its_turn_fades_by_all_it_missed() -> None:
    """Five samples of four rows: all are in the moments, the first, third and fifth in the quantiles, the ends in the range."""
    record = probe_steps(nn.Linear(1, 1), lambda model: model(torch.ones(4, 1)).sum(), 5, half_life=1.0)
    statistics = record.sites[""].statistics
    assert statistics["moments"].tensors["count"] == 4 * (1 + 1 / 2 + 1 / 4 + 1 / 8 + 1 / 16)
    assert statistics["quantiles"].tensors["count"] == 4 * (1 + 1 / 4 + 1 / 16)
    assert statistics["binades"].tensors["x_B"].sum() == 4 * (1 + 1 / 16)


def test_autocast_is_seen_and_statistics_stay_fp32() -> None:
    x_MK = torch.randn(16, 12) + 1000  # bf16 would round the deviation away

    def step(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x_MK).float().mean()

    record = probe_steps(small_model(), step)
    assert record.dtype is Format.BF16
    torch.testing.assert_close(record.sites["0"].mean_K, x_MK.mean(0))
    assert record.sites["0"].rms_K.dtype == torch.float32


def test_autocast_around_the_step_rounds_no_statistic() -> None:
    """It is on while the Probe learns, too."""
    model, x_MK = nn.Linear(12, 4), torch.randn(16, 12)
    with torch.autocast("cpu", torch.bfloat16):
        site = probe_steps(model, lambda model: model(x_MK).float().square().mean(), steps=2, half_life=None).sites[""]
    moments = site.statistics["moments"].tensors
    centered_MK = x_MK.double() - x_MK.double().mean(0)
    true_KK = 2 * centered_MK.t() @ centered_MK
    torch.testing.assert_close(moments["scatter_DD"][:12, :12].double(), true_KK, rtol=1e-5, atol=1e-5)


def test_features_are_rescaled_by_the_power_of_two_next_to_their_rms() -> None:
    """Their mean is part of it; 1 where there is nothing, and within what FP32 can undo."""
    x_MK = torch.randn(64, 12)
    x_MK[:, 0] += 100
    x_MK[:, 1], x_MK[:, 2], x_MK[:, 3], x_MK[:, 4] = 1.9, 0.0, 1e-19, 1e19
    site = probe_steps(small_model(), lambda model: model(x_MK).mean()).sites["0"]
    torch.testing.assert_close(site.rms_K[:2], torch.tensor([100.0, 1.9]), rtol=0.01, atol=0)
    assert site.rescale_K[:5].tolist() == [128.0, 2.0, 1.0, 2.0**-60, 2.0**60]


def test_rows_that_are_not_finite_are_left_out_and_said() -> None:
    x_MK = torch.randn(16, 12)
    x_MK[3, 1], x_MK[7, 0] = torch.nan, torch.inf
    with torch.no_grad():
        record = _forward_only(nn.Linear(12, 4), x_MK)
    good = [row for row in range(16) if row not in (3, 7)]
    torch.testing.assert_close(record.sites[""].mean_K, x_MK[good].mean(0))
    assert any("NaN or infinite" in note for note in record.sites[""].notes)


def _forward_only(model: nn.Module, x_MK: Tensor) -> Record:
    probe = loka.Probe(model)
    with probe.step():
        model(x_MK)
    return probe.record()


def test_without_gradients_x_alone_is_learned_and_training_starts_afresh() -> None:
    model = nn.Linear(3, 2)
    probe = loka.Probe(model, every=1)
    with torch.no_grad(), probe.step():
        model(torch.ones(4, 3))
    assert not probe.record().sites[""].trains
    assert probe.record().sites[""].sample(5, torch.Generator())[1] is None
    with probe.step():
        model(torch.full((4, 3), 5.0)).sum().backward()
    site = probe.record().sites[""]
    assert site.trains
    assert site.mean_K.tolist() == [5.0] * 3
    assert site.sample(5, torch.Generator())[1].shape == (5, 2)


def test_a_site_of_123200_features_stays_within_its_budget(caplog: pytest.LogCaptureFixture) -> None:
    budget = 48 * 2**20
    model = nn.Linear(123_200, 8, bias=False)
    with caplog.at_level(logging.INFO, logger="loka"):
        probe = loka.Probe(model, every=1, rows=96, memory_budget=budget)
    assert "1 site takes 46.5 MiB of 48.0 MiB (covariance: 1 low-rank + diagonal)" in caplog.text
    x_MK = torch.randn(96, 1) * torch.linspace(1, 2, 123_200) + 0.1 * torch.randn(96, 123_200)
    for _ in range(2):
        with probe.step():
            model(x_MK).sum().backward()
    site = probe.record().sites[""]
    statistics = [tensor for statistic in site.statistics.values() for tensor in statistic.tensors.values()]
    assert sum(tensor.numel() * tensor.element_size() for tensor in statistics) <= 1.01 * probe.memory.bytes <= budget
    drawn_MK, _ = site.sample(50, torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn_MK.std(0).mean(), x_MK.std(0).mean(), rtol=0.2, atol=0)


@pytest.mark.parametrize(
    ("budget", "form"), [(2**30, Covariance.FULL), (800_000, Covariance.BLOCKS), (250_000, Covariance.LOW_RANK)]
)
def test_the_memory_that_is_promised_holds_every_statistic(budget: int, form: Covariance) -> None:
    probe = loka.Probe(model := nn.Linear(300, 200), every=1, memory_budget=budget)
    for _ in range(3):
        with probe.step():
            model(torch.randn(200, 300)).square().sum().backward()
    tensors = [t for statistic in probe.record().sites[""].statistics.values() for t in statistic.tensors.values()]
    assert probe.memory.forms == {"": form}
    taken = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert 0.95 * probe.memory.bytes <= taken <= 1.01 * probe.memory.bytes + 2**11  # and some hundred bytes for counts


def test_a_sample_is_learned_behind_the_steps_that_follow_and_the_record_holds_it_at_once() -> None:
    """Eleven layers, three of them behind each step; what is learned is what would have been learned at once."""

    def train(*, record_at: int) -> tuple[list[int], Record]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(10)), nn.Linear(6, 1))
        probe = loka.Probe(model, every=20)
        left, record = [], None
        for step in range(41):
            with probe.step():
                model(torch.randn(32, 6)).square().mean().backward()
            if step == record_at:
                record = probe.record()
            left.append(len(probe._unlearned))
        return left, probe.record() if record is None else record

    left, _ = train(record_at=-1)
    assert left[:20] == [0] * 20  # the first sample is learned at once
    assert left[20:26] == [11, 8, 5, 2, 0, 0]
    left, early = train(record_at=20)
    assert left[20:22] == [0, 0]
    _, late = train(record_at=39)
    for name, site in early.sites.items():
        for key, statistic in site.statistics.items():
            for part, tensor in statistic.tensors.items():
                assert torch.equal(tensor, late.sites[name].statistics[key].tensors[part]), (name, key, part)


@pytest.mark.gpu
def test_beside_the_steps_is_learned_what_is_learned_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a stream of its own and in the training's, on layers wide enough for work to be left when a step has been launched;
    steps ask for memory all the time, and would get that of rows that were let go too early."""

    def learned() -> Record:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6)), nn.Linear(2048, 1)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        probe = loka.Probe(model, every=20)
        for step in range(60):
            with probe.step():
                model(torch.randn(1024, 2048, device="cuda") * (1 + step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return probe.record()

    beside = learned()
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    between = learned()
    for name, site in between.sites.items():
        for key, statistic in site.statistics.items():
            for part, tensor in statistic.tensors.items():
                found = beside.sites[name].statistics[key].tensors[part]
                torch.testing.assert_close(found, tensor, msg=lambda text, where=(name, key, part): f"{where}: {text}")


def test_what_one_sample_showed_is_learned_before_the_next() -> None:
    """Where all steps are sampled none follows behind which it could be: rows of all would be kept."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
    probe = loka.Probe(model, every=1)
    for _ in range(5):
        with probe.step():
            model(torch.randn(32, 6)).square().mean().backward()
        assert len(probe._unlearned) <= 2


def test_quantiles_are_looked_at_every_second_sample_and_from_the_first_with_gradients() -> None:
    model = nn.Linear(4, 2)
    probe = loka.Probe(model, every=1, half_life=None)
    with torch.no_grad(), probe.step():
        model(torch.zeros(8, 4))
    for value in (1.0, 2.0, 3.0):
        with probe.step():
            model(torch.full((8, 4), value)).sum().backward()
    statistics = probe.record().sites[""].statistics
    assert statistics["moments"].tensors["count"] == 24
    assert statistics["quantiles"].tensors["count"] == 16  # of the first with gradients, and of the third
    assert statistics["quantiles"].tensors["values_LD"][:, :4].unique().tolist() == [1.0, 3.0]


def test_turns_are_those_of_the_site_not_of_the_probe() -> None:
    """Of two layers that are trained in turn, the second is called at odd samples alone."""
    model = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
    probe = loka.Probe(model, every=1, half_life=None)
    for step in range(8):
        with probe.step():
            model[step % 2](torch.full((8, 4), float(step))).sum().backward()
    for site in probe.record().sites.values():
        assert site.statistics["quantiles"].tensors["count"] == 16


def test_the_range_of_a_wide_site_is_that_of_all_its_calls() -> None:
    x_MK = torch.randn(512, 1024)
    record = probe_steps(nn.Linear(1024, 2), lambda model: (model(x_MK) + model(2.0**30 * x_MK)).sum())
    counts_B = record.sites[""].statistics["binades"].tensors["x_B"]
    small, large = counts_B[: 10 - LOWEST].sum(), counts_B[10 - LOWEST : -1].sum()
    assert small == large > 0


def test_inference_mode_before_after_or_around_a_record_changes_nothing() -> None:
    model, x_MK = nn.Linear(4, 2), torch.randn(8, 4)
    probe = loka.Probe(model, every=2)
    with torch.inference_mode(), probe.step():
        model(x_MK)
    for _ in range(4):
        with torch.no_grad(), probe.step():
            model(x_MK)
    with torch.inference_mode():
        site = probe.record().sites[""]
    assert not site.weight_NK.is_inference()
    torch.testing.assert_close(site.mean_K, x_MK.mean(0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_is_for_models_not_for_statistics(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x_MK = nn.Linear(4, 3), torch.randn(64, 4)

    def learn() -> Record:
        return probe_steps(model, lambda model: model(x_MK).square().sum(), steps=5)

    expected = learn().sites[""].statistics
    torch.set_default_dtype(dtype)
    try:
        site = learn().sites[""]
        site.sample(5, torch.Generator())
    finally:
        torch.set_default_dtype(torch.float32)
    for name, statistic in site.statistics.items():
        for part, tensor in statistic.tensors.items():
            torch.testing.assert_close(tensor, expected[name].tensors[part])


def test_counts_stay_on_the_cpu_whatever_the_default_device() -> None:
    """Else every merge behind an idle step would wait for the device."""
    model, x_MK = nn.Linear(4, 3), torch.randn(64, 4)
    with torch.device("meta"):
        site = probe_steps(model, lambda model: model(x_MK).square().sum(), steps=5).sites[""]
    numbers = [t for statistic in site.statistics.values() for t in statistic.tensors.values() if not t.ndim]
    assert {number.device.type for number in numbers} == {"cpu"}


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_precision_of_products_is_left_as_it_was(precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    try:
        probe_steps(nn.Linear(4, 2), lambda model: model(torch.randn(8, 4)).sum())
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_largest_sites_fall_back_first() -> None:
    model = nn.Sequential(nn.Linear(700, 700), nn.Linear(700, 64), nn.Linear(64, 64))
    forms = loka.Probe(model, memory_budget=6 * 2**20).memory.forms
    assert list(forms.values()) == [Covariance.BLOCKS, Covariance.FULL, Covariance.FULL]
    with pytest.raises(InvalidInput, match=r"memory_budget=0\.0 MiB is too small"):
        loka.Probe(model, memory_budget=1000)


def test_of_the_widest_sites_no_budget_keeps_all() -> None:
    sites = {"narrow": nn.Linear(WIDEST - 2, 1), "wide": nn.Linear(WIDEST - 1, 1)}
    assert plan_memory(sites, 2**40).forms == {"narrow": Covariance.FULL, "wide": Covariance.BLOCKS}


def test_values_are_counted_by_binade() -> None:
    values = torch.tensor([[0.0, 1.0, 1.99, -2.0, 2.0**-60, 2.0**60, 0.75]])
    counts = counts_by_binade(values).tolist()
    found = {("zero" if index == BINADES else index + LOWEST): count for index, count in enumerate(counts) if count}
    assert found == {"zero": 1, 0: 2, 1: 1, LOWEST: 1, LOWEST + BINADES - 1: 1, -1: 1}


@given(values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=30))
def test_any_value_is_counted_where_its_exponent_says(values: list[float]) -> None:
    """``math.frexp`` of a Python number says it too; subnormal numbers are no zeros."""
    expected = [0.0] * (BINADES + 1)
    for value in values:
        place = math.frexp(value)[1] - 1 - LOWEST
        expected[BINADES if value == 0 else min(max(place, 0), BINADES - 1)] += 1
    assert counts_by_binade(torch.tensor([values], dtype=torch.float32)).tolist() == expected


def test_a_history_keeps_even_intervals_from_the_first() -> None:
    history = History()
    for value in range(5 * LONGEST):
        history.add(torch.tensor(float(value)))
    numbers = history.numbers()
    assert len(numbers) <= LONGEST
    assert numbers[0] == 0
    assert {b - a for a, b in itertools.pairwise(numbers)} == {8.0}
    assert numbers[-1] > 5 * LONGEST - 9


def test_an_evaluation_behind_training_changes_nothing_that_was_learned() -> None:
    """x without its dy cannot be paired with any."""
    model = small_model()
    probe = loka.Probe(model, every=1, half_life=None)
    with probe.step():
        model(torch.randn(64, 12)).mean().backward()
    before = probe.record().sites["0"]
    with probe.step(), torch.no_grad():
        model(1000 + torch.randn(64, 12))
    behind = probe.record().sites["0"]
    assert behind.trains
    torch.testing.assert_close(behind.mean_K, before.mean_K)


def test_one_call_that_hands_on_a_gradient_is_enough_to_need_it() -> None:
    model = nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 1))

    def step(model: nn.Module) -> Tensor:
        return model(torch.randn(8, 12, requires_grad=True)).mean() + model(torch.randn(8, 12)).mean()

    site = probe_steps(model, step).sites["0"]
    assert site.needs_dx
    assert site.calls == {8: 2.0}


def test_a_layer_over_another_axis_is_told_by_how_its_rows_lie() -> None:
    class OverBoth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.over_rows, self.over_features = nn.Linear(6, 5), nn.Linear(12, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.over_features(self.over_rows(x.mT).mT.contiguous())

    sites = probe_steps(OverBoth(), lambda model: model(torch.randn(8, 6, 12)).mean()).sites
    assert {name: site.across for name, site in sites.items()} == {"over_rows": 12, "over_features": None}
    assert sites["over_rows"].calls == {96: 1.0}


def test_a_layer_whose_rows_lie_now_so_now_so_lies_neither_way() -> None:
    x = torch.randn(8, 12, 12)
    site = probe_steps(nn.Linear(12, 12), lambda model: (model(x) + model(x.mT)).mean()).sites[""]
    assert site.across is None


@pytest.mark.parametrize("value", [1.0, torch.inf, torch.nan])
def test_a_weight_gradient_that_is_not_finite_is_not_averaged(value: float) -> None:
    learning = SiteLearning(nn.Linear(4, 3), Covariance.FULL)
    dw_NK = torch.ones(3, 4)
    dw_NK[1, 2] = value
    x_MK = torch.randn(8, 4)
    call = Call(8, x_MK, torch.float32, needs_dx=True, dy_RN=torch.randn(8, 3))
    looked = learning.look([call], dw_NK)
    assert looked is not None
    rows = learning.finite(looked)
    assert rows is not None
    assert (rows.dw_NK is not None) is (value == 1.0)
    learning.learn(rows, fade=1.0)
    gradients = learning._statistics["gradients"].tensors
    known = 1.0 if value == 1.0 else 0.0
    assert (gradients["m"], gradients["steps"], gradients["dw_NK"].sum()) == (8 * known, known, 12 * known)


def test_a_history_ends_where_numbers_do() -> None:
    history = History()
    for value in (1.0, 2.0, torch.inf, torch.nan):
        history.add(torch.tensor(value))
    assert history.numbers() == (1.0, 2.0)


def test_what_is_taken_already_leaves_less_for_covariances() -> None:
    sites = {"a": nn.Linear(64, 64), "b": nn.Linear(8, 8)}
    whole = plan_memory(sites, 2**30).bytes
    assert set(plan_memory(sites, whole).forms.values()) == {Covariance.FULL}
    less = plan_memory(sites, whole, taken=1)
    assert less.forms["a"] is not Covariance.FULL
    assert less.bytes <= whole


def test_gradients_that_are_not_finite_are_left_out_where_no_weight_shows_them() -> None:
    """The layer itself does not learn, but what lies in front of it does."""
    model, x_MK = nn.Linear(12, 4).requires_grad_(False), torch.randn(16, 12, requires_grad=True)
    factor_M = torch.ones(16, 1)
    factor_M[3] = torch.inf
    site = probe_steps(model, lambda model: (factor_M * model(x_MK)).sum()).sites[""]
    good = [row for row in range(16) if row != 3]
    torch.testing.assert_close(site.mean_K, x_MK.detach()[good].mean(0))
    assert any("NaN or infinite" in note for note in site.notes)


def test_rows_are_chosen_from_all_there_are() -> None:
    """Also where they do not share out evenly: one from each of four stretches of ten."""
    generator = torch.Generator().manual_seed(0)
    draws = [choose_rows(10, 4, generator).tolist() for _ in range(200)]
    assert all(sorted(set(draw)) == draw for draw in draws)
    assert {row for draw in draws for row in draw} == set(range(10))


def test_the_gradient_of_the_weight_is_of_all_backward_passes_of_a_step() -> None:
    model = nn.Linear(12, 5)
    probe = loka.Probe(model, every=1)
    with probe.step():
        y_MN = model(torch.randn(64, 12))
        y_MN[:, 0].sum().backward(retain_graph=True)
        y_MN[:, 1].square().sum().backward()
    torch.testing.assert_close(probe.record().sites[""].statistics["gradients"].tensors["dw_NK"], model.weight.grad)


def test_a_bias_that_learns_beside_a_weight_that_does_not_asks_for_no_wgrad() -> None:
    model, x_MK = nn.Linear(12, 5), torch.randn(16, 12)
    model.weight.requires_grad_(False)
    site = probe_steps(model, lambda model: model(x_MK).sum()).sites[""]
    assert (site.trains, site.needs_dw, site.roles) == (True, False, (Role.FPROP,))
