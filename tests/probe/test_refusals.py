"""What a Probe refuses: models, options and steps that nothing could be learned from."""

import pytest
import torch
from torch import nn

import loka
from loka.core.errors import InvalidInput


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be a whole number, at least 1"),
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_model_that_could_not_be_measured_is_refused_before_it_trains(dtype: torch.dtype) -> None:
    told = f"0 runs in {str(dtype)[6:]}, for which there is no baseline to compare with, nor .*: use float32 or bfloat16"
    with pytest.raises(InvalidInput, match=told):
        loka.Probe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(dtype))


def test_autocast_that_could_not_be_measured_is_refused_at_the_first_step() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    probe = loka.Probe(model)
    in_half = torch.autocast("cpu", torch.float16)
    with pytest.raises(InvalidInput, match="0 runs in float16, for which there is no baseline"), probe.step(), in_half:
        model(torch.randn(4, 2)).float().sum().backward()
    probe.detach()


def test_steps_without_a_forward_are_told() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    probe = loka.Probe(model, every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(4, 2)).sum().backward()
        with probe.step():
            optimizer.step()
    with pytest.raises(InvalidInput, match=r"sampled, 3 of 3: put `with probe.step\(\):` around forward and backward"):
        probe.record()


def test_a_layer_without_a_shape_is_refused() -> None:
    with pytest.raises(InvalidInput, match="1 has no shape yet: run the model once on a batch, then probe it"):
        loka.Probe(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)))


def test_a_model_without_values_is_refused() -> None:
    with pytest.raises(InvalidInput, match="the model lies on the meta device, without values: fill it first, then probe it"):
        loka.Probe(nn.Sequential(nn.Linear(2, 2, device="meta")))


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(InvalidInput, match="Conv1d has no linear layer"):
        loka.Probe(nn.Conv1d(2, 2, 1))
