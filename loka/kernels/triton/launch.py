"""Where Triton launches: on the current GPU, whatever its tensors lie on."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

Others = ParamSpec("Others")
Result = TypeVar("Result")
Launch = Callable[Concatenate[Tensor, Others], Result]


def on_its_gpu(launch: Launch[Others, Result]) -> Launch[Others, Result]:
    """``launch`` with the GPU of its first argument as the current one."""

    @functools.wraps(launch)
    def run(first: Tensor, *others: Others.args, **named: Others.kwargs) -> Result:
        if not first.is_cuda or first.get_device() == torch.cuda.current_device():
            return launch(first, *others, **named)
        with torch.cuda.device(first.device):
            return launch(first, *others, **named)

    return run
