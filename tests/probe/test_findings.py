"""Each finding fires where its cause is planted, with the number computed by hand, and not on the healthy twin."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from planted_sites import PlantedSite, cancelling_mean, compensated_range
from torch import Tensor, nn

import loka
from loka.core.moments import Covariance
from loka.core.record import Record
from loka.core.site_record import Finding
from loka.mods.contract import MODS
from loka.probe.findings.products import mean_and_variance

ROWS = 512


def probed(model: nn.Module, x_MK: Tensor, steps: int = 1, before: Callable[[int], None] = lambda step: None) -> Record:
    """Behind every model stands a head, so that none of what is planted is one."""
    whole = nn.Sequential(*model, nn.Linear(whole_width(model), 1)) if isinstance(model, nn.Sequential) else model
    probe = loka.Probe(whole, every=1, rows=ROWS, half_life=None)
    for step in range(steps):
        before(step)
        with probe.step():
            whole(x_MK).square().mean().backward()
    probe.detach()
    return probe.record()


def whole_width(model: nn.Sequential) -> int:
    return [module for module in model if isinstance(module, nn.Linear)][-1].out_features


def linear(weight_NK: Tensor, bias_N: Tensor | None = None) -> nn.Linear:
    n, k = weight_NK.shape
    made = nn.Linear(k, n, bias=bias_N is not None)
    with torch.no_grad():
        made.weight.copy_(weight_NK)
        if bias_N is not None:
            made.bias.copy_(bias_N)
    return made


def of_kind(record: Record, kind: str) -> list[Finding]:
    return [finding for finding in record.findings if finding.kind == kind]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_a_healthy_model_has_none() -> None:
    tower = [nn.Linear(48, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 32)]
    model = nn.Sequential(*tower, nn.ReLU())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def learn(step: int) -> None:
        optimizer.step()

    assert probed(model, torch.randn(ROWS, 48), steps=12, before=learn).findings == ()


def test_the_mods_that_findings_name_exist() -> None:
    assert {"no_bias", "block_norm", "hard_swish"} <= set(MODS.names())


def test_a_mean_that_the_weight_ignores_asks_for_center() -> None:
    site = cancelling_mean()
    (finding,) = of_kind(probed(nn.Sequential(linear(site.weight_NK)), site.x_MK), "cancellation")
    assert (finding.site, finding.remedy) == ("0", "center")
    assert finding.numbers["terms_to_output"] == pytest.approx(_terms_to_output(site), rel=0.01)
    assert finding.numbers["centered_terms_to_output"] == pytest.approx(1, abs=0.1)


def _terms_to_output(site: PlantedSite) -> float:
    x_MK, weight_NK = site.x_MK.double(), site.weight_NK.double()
    terms = torch.einsum("mk,nk->", x_MK.square(), weight_NK.square())
    return float((terms / (x_MK @ weight_NK.t()).square().sum()).sqrt())


def test_a_mean_that_the_weight_listens_to_is_none() -> None:
    """The same x; an output that carries the mean is as large as its terms."""
    site = cancelling_mean()
    model = nn.Sequential(linear(torch.randn_like(site.weight_NK)))
    assert not of_kind(probed(model, site.x_MK), "cancellation")


def test_features_that_cancel_each_other_have_no_remedy() -> None:
    weight_NK = torch.randn(32, 64)
    x_MK = 20 * torch.randn(ROWS, 1) + torch.randn(ROWS, 64)
    (finding,) = of_kind(probed(nn.Sequential(linear(weight_NK - weight_NK.mean(1, keepdim=True))), x_MK), "cancellation")
    assert finding.remedy is None
    assert finding.numbers["terms_to_output"] == pytest.approx(20, rel=0.1)


def test_features_over_many_binades_ask_for_rescale() -> None:
    site = compensated_range()
    (finding,) = of_kind(probed(nn.Sequential(linear(site.weight_NK)), site.x_MK), "feature_scales")
    assert finding.remedy == "rescale"
    assert finding.numbers["binades"] == pytest.approx(24, abs=0.5)
    exponent_K = site.vector_K.log2()
    assert finding.numbers["of_features"] == pytest.approx(float((exponent_K < 0).double().mean()), abs=0.1)
    # Every feature has the same say, and each end of the range is out of reach of x's or w's largest.
    assert finding.numbers["of_output"] == pytest.approx(1, abs=0.15)


def test_features_over_a_few_binades_do_not() -> None:
    scale_K = 2.0 ** torch.arange(0, 10).repeat(10)
    record = probed(nn.Sequential(linear(torch.randn(32, 100) / scale_K)), torch.randn(ROWS, 100) * scale_K)
    assert not of_kind(record, "feature_scales")


@pytest.mark.parametrize(
    ("common", "norm", "fires"), [(10.0, nn.LayerNorm, True), (0.5, nn.LayerNorm, False), (10.0, nn.RMSNorm, False)]
)
def test_a_mean_in_front_of_a_layer_norm_asks_for_block_norm(common: float, norm: type[nn.Module], fires: bool) -> None:
    weight_NK, x_MK = torch.randn(64, 48) + common * torch.randn(1, 48), torch.randn(ROWS, 48)
    bias_N = torch.randn(64) + common
    found = of_kind(probed(nn.Sequential(linear(weight_NK, bias_N), norm(64)), x_MK), "layer_norm_mean")
    assert bool(found) == fires
    if fires:
        assert found[0].remedy == "block_norm"
        y_MN = (x_MK.double() @ weight_NK.double().t()) + bias_N.double()
        left = (y_MN - y_MN.mean(1, keepdim=True)).square().mean().sqrt()
        assert found[0].numbers["output_to_what_is_left"] == pytest.approx(float(y_MN.square().mean().sqrt() / left), rel=0.01)


@pytest.mark.parametrize(
    ("norm_at", "fires"),
    [
        (lambda step: 4.0 * step, True),
        (lambda step: 40.0 * (1 - 0.5**step), False),  # large, and at rest
        (lambda step: 40.0 * (1 - 0.8**step), False),  # still grows, and comes to rest
        (lambda step: 0.002 * step, False),  # grows, and is nothing yet
    ],
)
def test_a_bias_that_grows_asks_for_no_bias(norm_at: Callable[[int], float], fires: bool) -> None:
    layer = nn.Linear(32, 16)

    def set_bias(step: int) -> None:
        with torch.no_grad():
            layer.bias.fill_(norm_at(step) / 16**0.5)

    record = probed(nn.Sequential(layer), torch.randn(ROWS, 32), steps=12, before=set_bias)
    assert record.sites["0"].bias_norms == pytest.approx([norm_at(step) for step in range(12)], rel=1e-5)
    found = of_kind(record, "growing_bias")
    assert bool(found) == fires
    if fires:
        assert found[0].remedy == "no_bias"
        assert found[0].numbers["growth_in_later_half"] == pytest.approx((44 - 24) / 44, rel=1e-3)


@pytest.mark.parametrize(
    ("width", "activation", "remedy"),
    [(8.0, nn.SiLU, "hard_swish"), (8.0, nn.Sigmoid, None), (1.0, nn.SiLU, ...), (8.0, nn.Hardswish, ...)],
)
def test_an_exponential_tail_that_stretches_the_range(width: float, activation: type[nn.Module], remedy: object) -> None:
    """Planted are outputs of deviation ``width``; ... stands for no finding."""
    model = nn.Sequential(linear(width * torch.randn(64, 64) / 8), activation(), nn.Linear(64, 64))
    x_MK = torch.randn(ROWS, 64)
    found = of_kind(probed(model, x_MK), "stretched_range")
    assert [finding.remedy for finding in found] == ([] if remedy is ... else [remedy])
    if found:
        sizes = model[1](model[0](x_MK)).detach().abs().double().flatten()
        floor = 2.0 ** (sizes.max().log2().floor() - 12)
        assert found[0].numbers["far_below_the_largest"] == pytest.approx(float((sizes < floor).double().mean()), abs=1e-6)


def test_features_that_say_nothing() -> None:
    x_MK = torch.randn(ROWS, 40)
    x_MK[:, :4] = 0
    x_MK[:, 4:10] = 3.0
    weight_NK, bias_N = torch.randn(20, 40), torch.zeros(20)
    bias_N[:5] = -1000  # dead behind the ReLU
    (finding,) = of_kind(probed(nn.Sequential(linear(weight_NK, bias_N), nn.ReLU()), x_MK), "idle_features")
    assert finding.numbers == {"dead_features": 4, "saturated_features": 6, "outputs_without_gradient": 5}
    assert finding.remedy == "center"
    assert "4 of 40 features of x are always zero" in finding.message


def test_of_a_layer_without_any_gradient_all_outputs_are_told_and_no_more() -> None:
    dead = nn.Sequential(linear(torch.randn(20, 40), torch.full((20,), -1000.0)), nn.ReLU())
    (finding,) = of_kind(probed(dead, torch.randn(ROWS, 40)), "idle_features")
    assert finding.message == "20 of 20 outputs get no gradient"


def test_heads_have_no_findings() -> None:
    record = probed(nn.Sequential(nn.Linear(20, 8)), torch.zeros(ROWS, 20))
    assert {finding.site for finding in record.findings} == {"0"}


def test_findings_are_saved_with_the_record_also_beside_the_training(tmp_path: Path) -> None:
    site = cancelling_mean()
    model = nn.Sequential(linear(site.weight_NK), nn.Linear(192, 1))
    probe = loka.Probe(model, every=1, rows=ROWS)
    with probe.step():
        model(site.x_MK).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):  # which must not round what findings are computed from
        record = probe.record()
    record.save(tmp_path / "now")
    probe.save(tmp_path / "beside").result(timeout=30)
    assert "cancellation" in {finding.kind for finding in record.findings}
    assert Record.load(tmp_path / "now").findings == record.findings
    assert Record.load(tmp_path / "beside").findings == record.findings


@pytest.mark.parametrize(
    ("budget", "form"), [(2**30, Covariance.FULL), (800_000, Covariance.BLOCKS), (250_000, Covariance.LOW_RANK)]
)
def test_variances_of_products_in_every_form_of_covariance(budget: int, form: Covariance) -> None:
    """Few directions inside one block of features: all three forms know them whole."""
    x_MK = torch.zeros(ROWS, 300)
    x_MK[:, :200] = torch.randn(ROWS, 10) @ torch.randn(10, 200) + 3
    model = nn.Linear(300, 200, bias=False)
    probe = loka.Probe(model, every=1, rows=ROWS, memory_budget=budget)
    with torch.no_grad(), probe.step():
        model(x_MK)
    assert set(probe.memory.forms.values()) == {form}
    mean_J, variance_J = mean_and_variance(probe.record().sites[""], model.weight.detach())
    y_MN = x_MK.double() @ model.weight.detach().double().t()
    torch.testing.assert_close(mean_J.double(), y_MN.mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(variance_J.double(), y_MN.var(0), rtol=1e-3, atol=1e-5)
