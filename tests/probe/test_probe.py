"""What a Probe learns of a model that trains, and that the model does not notice."""

import itertools
import logging
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import loka
from loka.core.errors import InvalidInput
from loka.core.gemm import Role
from loka.core.moments import Covariance
from loka.core.recipe import Format
from loka.core.record import Record
from loka.probe.history import LONGEST, History
from loka.probe.statistics.binades import BINADES, LOWEST, counts_by_binade
from loka.probe.watch import choose_rows

Step = Callable[[nn.Module], Tensor]


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.LayerNorm(20), nn.SiLU(), nn.Dropout(0.2), nn.Linear(20, 1))


def probe_steps(model: nn.Module, step: Step, steps: int = 1, **options: object) -> Record:
    probe = loka.Probe(model, every=1, **options)
    for _ in range(steps):
        with probe.step():
            step(model).backward()
    probe.detach()
    return probe.record()


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


def test_the_gradient_of_a_shared_or_a_frozen_weight_is_nobodys() -> None:
    """Of a shared weight it is the sum over both sites; both are learned from their rows alone."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    model[2].weight.requires_grad_(False)
    record = probe_steps(model, lambda model: model(torch.randn(32, 6)).sum())
    for site in record.sites.values():
        assert site.statistics["gradients"].tensors["steps"] == 0
        assert site.sample(8, torch.Generator())[1].shape == (8, 6)


class TiedEmbedding(nn.Module):
    """Scores of items by the very vectors that they are looked up with."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.scores = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.scores.weight = self.items.weight

    def forward(self, item_M: Tensor) -> Tensor:
        return self.scores(self.items(item_M)).square().sum()


def test_the_gradient_of_a_weight_that_is_an_embedding_too_is_nobodys() -> None:
    site = probe_steps(TiedEmbedding(), lambda model: model(torch.arange(10))).sites["scores"]
    assert site.statistics["gradients"].tensors["steps"] == 0
    assert not site.statistics["gradients"].tensors["dw_NK"].any()


def test_an_input_by_its_name_is_seen() -> None:
    x_MK = torch.randn(8, 4)
    site = probe_steps(nn.Linear(4, 2), lambda model: model(input=x_MK).sum()).sites[""]
    torch.testing.assert_close(site.mean_K, x_MK.mean(0))


def test_one_step_in_every_so_many_is_sampled() -> None:
    model = nn.Linear(4, 2)
    probe = loka.Probe(model, every=3)
    hooked = []
    for _ in range(7):
        with probe.step():
            hooked.append(bool(model._forward_hooks))
            model(torch.randn(5, 4)).sum().backward()
    assert hooked == [True, False, False, True, False, False, True]
    assert probe.record().sites[""].statistics["moments"].tensors["count"] > 10
    assert probe.record().steps_seen == 7
    assert probe.record().step_us > 0


def test_older_samples_fade_by_half_life() -> None:
    values = iter([0.0, 8.0, 16.0])
    record = probe_steps(nn.Linear(1, 1), lambda model: model(torch.full((4, 1), next(values))).sum(), 3, half_life=1.0)
    assert float(record.sites[""].mean_K) == pytest.approx((0 * 0.25 + 8 * 0.5 + 16) / 1.75)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_training_under_a_probe_is_bit_identical_to_training_without(is_compiled: bool) -> None:
    """Dropout draws the same numbers, gradients are the same, and no hook is left behind."""

    def train(model: nn.Module, probe: loka.Probe | None) -> dict[str, Tensor]:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        torch.manual_seed(1)
        for x_MK in torch.randn(9, 32, 12, generator=torch.Generator().manual_seed(2)):
            with probe.step() if probe else torch.enable_grad():
                model(x_MK).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return model.state_dict()

    plain, probed = small_model(), small_model()
    if is_compiled:
        plain.compile(backend="eager")
        probed.compile(backend="eager")
    probe = loka.Probe(probed, every=2)
    before = {name: dict(module.__dict__) for name, module in probed.named_modules()}
    expected, found = train(plain, None), train(probed, probe)
    probe.detach()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    for name, module in probed.named_modules():
        assert module.__dict__.keys() == before[name].keys()
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_parametrized_weight_is_read_without_a_trace() -> None:
    """A spectral norm takes a step of its iteration whenever its weight is read in training."""

    def train(*, probed: bool) -> tuple[nn.Module, Record | None]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Linear(6, 1))
        probe = loka.Probe(model, every=2, weights_over_time=True) if probed else None
        for x_MK in torch.randn(5, 8, 6, generator=torch.Generator().manual_seed(1)):
            with probe.step() if probe else torch.enable_grad():
                model(x_MK).sum().backward()
        return model, probe.record() if probe else None

    (plain, _), (probed, record) = train(probed=False), train(probed=True)
    assert all(torch.equal(value, probed.state_dict()[name]) for name, value in plain.state_dict().items())
    assert Role.WGRAD in record.sites["0"].roles
    torch.testing.assert_close(record.sites["0"].weight_NK, probed[0].weight.detach(), atol=0.1, rtol=0)


@pytest.mark.parametrize("compile_first", [True, False])
def test_compiled_graphs_stay_between_samples(compile_first: bool) -> None:
    """One whole graph, compiled once: neither hooks nor a counter make it anew, and sampled steps learn all the same."""
    model, graphs = small_model(), []

    def backend(graph: torch.fx.GraphModule, example: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    probe = None if compile_first else loka.Probe(model, every=4)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    probe = probe or loka.Probe(compiled, every=4)
    for _ in range(13):
        with probe.step():
            compiled(torch.randn(32, 12)).mean().backward()
    assert len(graphs) == 1
    record = probe.record()
    assert record.sites["0"].calls == {32: 1.0}
    assert record.sites["0"].trains


def test_a_step_that_fails_leaves_no_hook_and_teaches_nothing() -> None:
    model = small_model()
    probe = loka.Probe(model)
    with pytest.raises(RuntimeError), probe.step():
        model(torch.randn(3, 11))
    assert not model[0]._forward_hooks
    with pytest.raises(InvalidInput, match="has seen no step"):
        probe.record()


class Unusual(nn.Module):
    """Sites with 3-D inputs, called twice, with a shared weight, inside a checkpoint, and never."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.twice, self.tied, self.unused, self.saved, self.head = (nn.Linear(8, 8) for _ in range(6))
        self.tied.weight = self.twice.weight

    def forward(self, x_BTK: Tensor) -> Tensor:
        x_BK = self.tokens(x_BTK).mean(1)
        x_BK = self.tied(self.twice(torch.relu(self.twice(x_BK))))
        return self.head(checkpoint(self.saved, x_BK, use_reentrant=False)).sum()


@pytest.fixture(scope="module")
def unusual() -> Record:
    torch.manual_seed(0)
    return probe_steps(Unusual(), lambda model: model(torch.randn(6, 5, 8)), steps=2)


def test_rows_of_3d_inputs_are_those_of_all_their_leading_axes(unusual: Record) -> None:
    assert unusual.sites["tokens"].calls == {30: 1.0}


def test_a_site_called_twice_learns_from_both_calls(unusual: Record) -> None:
    site = unusual.sites["twice"]
    assert site.calls == {6: 2.0}
    assert "called 2 times" in site.notes
    assert site.statistics["moments"].tensors["count"] > 2 * 6


def test_a_shared_weight_is_said(unusual: Record) -> None:
    assert unusual.sites["tied"].notes == ("shares its weight with twice",)


def test_a_checkpointed_site_counts_once_and_trains(unusual: Record) -> None:
    assert unusual.sites["saved"].calls == {6: 1.0}
    assert unusual.sites["saved"].trains


def test_a_site_never_called_is_said(unusual: Record) -> None:
    site = unusual.sites["unused"]
    assert "never called" in site.notes
    assert site.calls == {}
    assert not site.was_called
    with pytest.raises(InvalidInput, match="site unused was never called"):
        _ = site.mean_K


def test_autocast_is_seen_and_statistics_stay_fp32() -> None:
    x_MK = torch.randn(16, 12) + 1000  # bf16 would round the deviation away

    def step(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x_MK).float().mean()

    record = probe_steps(small_model(), step)
    assert record.dtype is Format.BF16
    torch.testing.assert_close(record.sites["0"].mean_K, x_MK.mean(0))
    assert record.sites["0"].rms_K.dtype == torch.float32


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


def test_only_gradients_that_somebody_asks_for_are_a_sites_roles() -> None:
    """Nothing learns in front of the first layer, the second is frozen, and the third is not trained at all."""
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    model[1].requires_grad_(False)

    def step(model: nn.ModuleList) -> Tensor:
        with torch.no_grad():
            model[2](torch.randn(4, 8))
        return model[1](model[0](torch.randn(4, 8))).sum()

    record = probe_steps(model, step)
    assert [site.roles for site in record.sites.values()] == [
        (Role.FPROP, Role.WGRAD),
        (Role.FPROP, Role.DGRAD),
        (Role.FPROP,),
    ]
    merged = record.merge(probe_steps(model, lambda model: model[0](torch.randn(4, 8, requires_grad=True)).sum()))
    assert merged.sites["0"].roles == tuple(Role)


def test_neighbours_are_recorded() -> None:
    sites = probe_steps(small_model(), lambda model: model(torch.randn(8, 12)).sum()).sites
    assert (sites["0"].norm_kind, sites["0"].activation_kind) == ("LayerNorm", "SiLU")
    assert (sites["0"].norm, sites["0"].activation) == ("1", "2")
    assert sites["4"].is_head


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
    drawn_MK, _ = site.sample(200, torch.Generator().manual_seed(0))
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
    assert statistics["quantiles"].tensors["count"] == 16  # of samples 1, for nothing was known with gradients, and 2


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be at least 1"),
        ({"rows": 0}, "rows must be"),
        ({"half_life": 0.0}, "half_life must be above 0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        loka.Probe(nn.Linear(2, 2), **options)


def test_a_model_on_two_devices_and_one_that_moved_are_refused() -> None:
    with pytest.raises(InvalidInput, match="the model lies on cpu, meta: probe the part on one"):
        loka.Probe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))
    probe = loka.Probe(model := nn.Linear(2, 2))
    model.to("meta")
    with pytest.raises(InvalidInput, match="moved from cpu to meta: make the Probe behind"), probe.step():
        pytest.fail("a step that cannot be learned from was begun")


def test_a_model_in_float64_is_refused_before_it_trains() -> None:
    with pytest.raises(InvalidInput, match="float64 is none of LoKA's formats"):
        loka.Probe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()))


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(InvalidInput, match="Conv1d has no linear layer"):
        loka.Probe(nn.Conv1d(2, 2, 1))


@given(m=st.integers(1, 5000), rows=st.integers(1, 300), seed=st.integers(0, 99))
def test_chosen_rows_are_different_and_from_everywhere(m: int, rows: int, seed: int) -> None:
    chosen = choose_rows(m, rows, torch.Generator().manual_seed(seed)).tolist()
    assert len(set(chosen)) == len(chosen) == min(m, rows)
    assert all(0 <= row < m for row in chosen)
    gaps = [b - a for a, b in itertools.pairwise(chosen)]
    assert all(gap <= 2 * m / min(m, rows) + 1 for gap in gaps)


def test_values_are_counted_by_binade() -> None:
    values = torch.tensor([[0.0, 1.0, 1.99, -2.0, 2.0**-60, 2.0**60, 0.75]])
    counts = counts_by_binade(values).tolist()
    found = {("zero" if index == BINADES else index + LOWEST): count for index, count in enumerate(counts) if count}
    assert found == {"zero": 1, 0: 2, 1: 1, LOWEST: 1, LOWEST + BINADES - 1: 1, -1: 1}


def test_a_history_keeps_even_intervals_from_the_first() -> None:
    history = History()
    for value in range(5 * LONGEST):
        history.add(torch.tensor(float(value)))
    numbers = history.numbers()
    assert len(numbers) <= LONGEST
    assert numbers[0] == 0
    assert {b - a for a, b in itertools.pairwise(numbers)} == {8.0}
    assert numbers[-1] > 5 * LONGEST - 9


@pytest.mark.gpu
@pytest.mark.parametrize("is_compiled", [False, True])
def test_idle_steps_never_wait_for_the_gpu(is_compiled: bool) -> None:
    model = small_model().cuda()
    if is_compiled:
        model.compile()
    probe = loka.Probe(model, every=10)
    x_MK = torch.randn(256, 12, device="cuda")

    def step() -> None:
        with probe.step():
            model(x_MK).square().mean().backward()

    for _ in range(41):  # the compiler's work, and a sample in which it is every statistic's turn
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(9):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not probe._unlearned
    assert probe.record().step_us > 0
