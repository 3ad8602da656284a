"""Hooks that are on modules for one step: a copy or a pickle made meanwhile, for an average of weights or a checkpoint, shall
neither report its calls nor hold what was seen."""

from collections.abc import Callable
from typing import Any


class PassingHook:
    """Calls ``hook``. In copies and pickles of the module there is a hook in its place that does nothing."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        self._hook(*args)

    def __reduce__(self) -> tuple[Any, ...]:  # copies are made by it too
        return _nothing, ()


def nothing(*args: Any) -> None:
    pass


def _nothing() -> Callable[..., None]:
    return nothing
