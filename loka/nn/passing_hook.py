"""Hooks that are on modules for one step: a copy or a pickle made meanwhile, for an average of weights or a checkpoint, shall
neither report its calls nor hold what was seen."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


class PassingHook:
    """Calls ``hook``. In copies and pickles of the module there is a hook in its place that does nothing."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        self._hook(*args)

    def __reduce__(self) -> tuple[Any, ...]:  # copies are made by it too
        return _nothing, ()


def on_gradient(y: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call ``hook`` with the gradient of ``y``, a layer's output.

    Of rows in several axes a layer gives a view of its product. Where that is then written in place, by a ReLU or a residual,
    the view gets no gradient any more, but the product does.
    """
    base = y._base if y._is_view() else None
    if base is None or not base.requires_grad or not (base.is_contiguous() and y.is_contiguous()) or base.numel() != y.numel():
        y.register_hook(hook)
        return
    shape = y.shape
    base.register_hook(lambda dy: hook(dy.reshape(shape)))


def nothing(*args: Any) -> None:
    pass


def _nothing() -> Callable[..., None]:
    return nothing
