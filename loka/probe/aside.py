"""Where a Probe works: outside the training's arithmetic, and on a GPU beside its steps, in a stream of its own, with nobody
waiting for it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from loka.numerics.float32_products import float32_products


@contextmanager
def exactly(device: torch.device) -> Iterator[None]:
    """No gradients, and no inference mode either: tensors made in that may not be changed outside of it. Matrix products of
    FP32 tensors on ``device`` are FP32, neither TF32 nor autocast, whatever the training around them uses."""
    with torch.inference_mode(False), torch.no_grad(), float32_products("highest"), torch.autocast(device.type, enabled=False):
        yield


class Aside:
    """Runs many small kernels, which would delay the next step, beside the training's own, in what those leave idle."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def follow(self, tensors: Iterable[Tensor] = ()) -> None:
        """Work from now on runs after all that was launched so far; ``tensors`` keep their memory until it is done."""
        if self._stream is None:
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in tensors:
            tensor.record_stream(self._stream)

    @contextmanager
    def work(self) -> Iterator[None]:
        with exactly(self._device), nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield


class Answer:
    """A truth value that a GPU may still have to find out: it can be read once the GPU is done with all before it."""

    def __init__(self, value: Tensor) -> None:
        self._value, self._found = value, None
        if value.device.type == "cuda":
            self._value = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(value, non_blocking=True)
            self._found = torch.cuda.current_stream(value.device).record_event()

    def is_there(self) -> bool:
        return self._found is None or self._found.query()

    def get(self) -> bool:
        """Waits for it."""
        if self._found is not None:
            self._found.synchronize()
        return bool(self._value)
