"""Named things that are added by writing one file: kernels, casters, models, data sets, mods."""

import importlib
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from loka.core.errors import UnknownName
from loka.core.names import did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to objects; a class registered under a name is instantiated once.

    ``package`` names the package whose modules do the registering. They are imported before the first look-up, so that
    listing names costs an import of our own files only and importing this registry costs none.
    """

    def __init__(self, kind: str, package: str | None = None) -> None:
        self._kind = kind
        self._unread = package
        self._is_loading, self._lock = False, threading.RLock()
        self._entries: dict[str, T] = {}
        self._added_by: dict[str, dict[str, Any]] = {}  # globals of the modules that did

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Decorate a class without constructor arguments: one instance of it is registered under ``name``."""

        def decorate(cls: type[T]) -> type[T]:
            self.add(name, cls())
            return cls

        return decorate

    def add(self, name: str, entry: T) -> None:
        """An entry that a module left whose import then failed is replaced, when that is tried again."""
        module = _running_module()
        if name in self._entries and not _is_run_again(self._added_by[name], module):
            raise ValueError(f"{self._kind} {name!r} is registered twice")
        self._entries[name], self._added_by[name] = entry, module

    def remove(self, name: str) -> None:
        del self._entries[name]

    def get(self, name: str) -> T:
        self._load()
        if name not in self._entries:
            hint = did_you_mean(name, self._entries)
            raise UnknownName(f"no {self._kind} is called {name!r}.{hint} Known: {', '.join(self.names())}")
        return self._entries[name]

    def names(self) -> list[str]:
        self._load()
        return sorted(self._entries)

    def items(self) -> Iterator[tuple[str, T]]:
        return ((name, self._entries[name]) for name in self.names())

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._entries

    def __len__(self) -> int:
        return len(self.names())

    def _load(self) -> None:
        """Import what registers entries. Other threads wait meanwhile, and after an import that failed (what it had registered
        is taken back) the next look-up tries again: only those modules themselves ever see some of the entries for all."""
        if self._unread is None:
            return
        with self._lock:
            if self._unread is None or self._is_loading:
                return
            self._is_loading = True
            try:
                for module in pkgutil.iter_modules(importlib.import_module(self._unread).__path__, f"{self._unread}."):
                    importlib.import_module(module.name)
                self._unread = None
            finally:
                self._is_loading = False


def _running_module() -> dict[str, Any]:
    """The globals of the module that is being executed, by which it is told apart from itself executed again."""
    frame = sys._getframe(1)
    while frame.f_code.co_name != "<module>" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals


def _is_run_again(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether both are globals of one module that was executed twice, as it is when its import failed the first time."""
    return before is not now and before.get("__name__") == now.get("__name__")
