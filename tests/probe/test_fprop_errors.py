"""What a Probe notes of outputs in 8 bits: of which samples, by which largest values, and of which weights."""

import pytest
import torch
from torch import Tensor, nn

import loka
from loka.core.moments import Covariance
from loka.numerics.fprop_errors import fprop_errors
from loka.probe.site_learning import SiteLearning
from loka.probe.watch import Call, Close


def test_errors_of_outputs_are_looked_at_every_eighth_sample_and_fade_slowly() -> None:
    """Sums by hand, of the rows and the weight as they were; a sample of a weight that is no number counts for nothing."""
    model = nn.Linear(4, 3, bias=False)
    probe = loka.Probe(model, every=1, half_life=10.0)
    expected: list[Tensor] = []
    for step in range(17):
        x_MK = torch.randn(16, 4)
        if step == 8:
            model.weight.data[0, 0] = torch.nan
        if step in (0, 16):
            weight_NK = model.weight.detach()
            expected.append(fprop_errors(x_MK, x_MK.abs().amax(), weight_NK, weight_NK.abs().amax()).floored_W)
        with probe.step():
            model(x_MK).sum().backward()
        model.weight.data.normal_()
    tensors = probe.record().sites[""].statistics["fprop_errors"].tensors
    fade = 0.5 ** (2 * 8 / 10.0 * 0.1)
    torch.testing.assert_close(tensors["floored_W"], fade * expected[0] + expected[1])
    assert float(tensors["count"]) == pytest.approx(1 + fade)
    assert float(tensors["rows"]) == pytest.approx(16 * (1 + fade))


def test_errors_of_outputs_stay_where_the_weight_is_parametrized_later() -> None:
    """It is made anew in every call then, and none of it is looked at."""
    model = nn.Linear(4, 3, bias=False)
    probe = loka.Probe(model, every=1, half_life=None)
    for step in range(9):
        if step == 8:
            nn.utils.parametrizations.weight_norm(model)
        with probe.step():
            model(torch.randn(16, 4)).sum().backward()
    assert float(probe.record().sites[""].statistics["fprop_errors"].tensors["count"]) == 1.0


def test_a_sample_without_outputs_is_none() -> None:
    """As of a layer that begins at 0: had it counted, errors of later samples would be told half as large."""
    model = nn.Linear(4, 3, bias=False)
    nn.init.zeros_(model.weight)
    probe = loka.Probe(model, every=1, half_life=None)
    for _ in range(9):
        with probe.step():
            model(torch.randn(16, 4)).sum().backward()
        model.weight.data.normal_()
    assert float(probe.record().sites[""].statistics["fprop_errors"].tensors["count"]) == 1.0


def test_errors_of_outputs_begin_with_the_gradients() -> None:
    """What was learned before is thrown away, and with it whose turn it was."""
    model = nn.Linear(4, 3)
    probe = loka.Probe(model, every=1, half_life=None)
    for trains in (False, False, *[True] * 9):
        with probe.step(), torch.set_grad_enabled(trains):
            loss = model(torch.randn(16, 4)).sum()
            if trains:
                loss.backward()
    assert float(probe.record().sites[""].statistics["fprop_errors"].tensors["count"]) == 2.0


def test_a_row_has_the_largest_value_of_its_call() -> None:
    """Of which a few rows alone are taken; where it is no number, of those that were taken, and only there."""
    learning = SiteLearning(nn.Linear(4, 3), Covariance.FULL)
    for values, expected in (([5.0, 7.0], [5.0, 5.0, 7.0, 7.0]), ([5.0, torch.inf], [5.0, 5.0, 1.0, 1.0])):
        close = [Close(torch.ones(2, 4), torch.tensor(value)) for value in values]
        looked = learning.look([Call(8, torch.ones(2, 4), torch.float32, needs_dx=False, x_close=one) for one in close])
        assert looked is not None
        rows = learning.finite(looked)
        assert rows is not None
        assert rows.x_amax_R1 is not None
        assert rows.x_amax_R1.flatten().tolist() == expected


def test_a_weight_of_another_layout_is_not_looked_at() -> None:
    """As a subclass may hold it, packed or transposed."""
    module = nn.Linear(4, 3)
    module.weight = nn.Parameter(torch.randn(4, 3))
    close = Close(torch.ones(2, 4), torch.tensor(1.0))
    call = Call(2, torch.ones(2, 4), torch.float32, needs_dx=False, x_close=close)
    rows = SiteLearning(module, Covariance.FULL).look([call])
    assert rows is not None
    assert rows.weight_JK is None
