"""torchao's FP8 for serving, as the benchmarks of blocks and of whole models time it beside ours."""

import importlib
from collections.abc import Callable

from torch import nn

_GRANULARITY = {"tensorwise": "PerTensor", "rowwise": "PerRow"}


def quantize_for_serving(module: nn.Module, recipe: str, takes: Callable[[nn.Module, str], bool] | None = None) -> None:
    """torchao's dynamic quantization of the linear layers in ``module``, or of those that ``takes`` says it takes; in place.

    By default it also tells Inductor to search for tiles step by step, in all that this process compiles from then on: for one
    shape that took more than 100 s on an H200 (2026-11-16), and would time its training recipes, and whatever comes after, by
    other rules than the baseline. All are compiled alike here, so that is left off.
    """
    quantization = importlib.import_module("torchao.quantization")
    config = quantization.Float8DynamicActivationFloat8WeightConfig(
        granularity=getattr(quantization, _GRANULARITY[recipe])(), set_inductor_config=False
    )
    quantization.quantize_(module, config, filter_fn=takes)
