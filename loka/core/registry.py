"""Named things that are added by writing one file: kernels, casters, models, data sets, mods."""

import importlib
import pkgutil
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from loka.core.errors import UnknownName
from loka.core.names import did_you_mean

T = TypeVar("T")
_registries: "weakref.WeakSet[Registry[Any]]" = weakref.WeakSet()


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
        _registries.add(self)

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Decorate a class without constructor arguments: one instance of it is registered under ``name``."""

        def decorate(cls: type[T]) -> type[T]:
            self.add(name, cls())
            return cls

        return decorate

    def add(self, name: str, entry: T) -> None:
        if name in self._entries:
            raise ValueError(f"{self._kind} {name!r} is registered twice")
        self._entries[name] = entry

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
                    with _undone_on_failure():
                        importlib.import_module(module.name)
                self._unread = None
            finally:
                self._is_loading = False


@contextmanager
def _undone_on_failure() -> Iterator[None]:
    """What a module that fails has registered, in any registry, is taken back: it would stand in the way of the next try."""
    before = {registry: dict(registry._entries) for registry in list(_registries)}
    try:
        yield
    except BaseException:
        for registry, entries in before.items():
            registry._entries = entries
        raise
