"""What torchao is asked to do in our benchmarks, and what it must not do to those that are timed beside it."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from loka.measure.torchao_peer import quantize_for_serving

TUNED = "coordinate_descent_tuning"


class FakeTorchao(ModuleType):
    """As torchao 0.18 has it: a config that is not told otherwise changes what Inductor does from then on."""

    PerTensor, PerRow = type("PerTensor", (), {}), type("PerRow", (), {})

    def Float8DynamicActivationFloat8WeightConfig(self, *, granularity: object, set_inductor_config: bool = True) -> object:
        return SimpleNamespace(granularity=granularity, set_inductor_config=set_inductor_config)

    def quantize_(self, module: nn.Module, config: SimpleNamespace, filter_fn=None) -> None:
        if config.set_inductor_config:
            torch._inductor.config.coordinate_descent_tuning = True
        for name, part in module.named_modules():
            if isinstance(part, nn.Linear) and (filter_fn is None or filter_fn(part, name)):
                part.granularity = type(config.granularity).__name__


@pytest.mark.parametrize(("recipe", "granularity"), [("tensorwise", "PerTensor"), ("rowwise", "PerRow")])
def test_it_is_quantized_and_the_others_are_compiled_as_before(monkeypatch, recipe, granularity):
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.quantization", FakeTorchao("torchao.quantization"))
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 24))
    with torch._inductor.config.patch({TUNED: False}):
        quantize_for_serving(module, recipe, lambda part, name: name == "1")
        assert not getattr(torch._inductor.config, TUNED)
        assert not hasattr(module[0], "granularity")
        quantize_for_serving(module, recipe)
    assert [part.granularity for part in module] == [granularity, granularity]
