"""Names that users give: which of the known ones they mean, or may have meant."""

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from loka.core.errors import InvalidInput


def given_names(given: object, option: str, of_what: str) -> tuple[str, ...]:
    """What ``option`` was given as names or patterns ``of_what``: one, or several in a list."""
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    for name in names:
        if not isinstance(name, str) or not name:
            raise InvalidInput(f"{option} takes names of {of_what}, or patterns, in a list; got {given!r}")
    return names


def did_you_mean(name: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.5) -> str:
    """A sentence, with a space in front: up to ``most`` of ``known`` that are like ``name``. Empty where none are."""
    close = difflib.get_close_matches(name, list(known), n=most, cutoff=cutoff)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """The names that are ``pattern``, which may hold brackets; if there are none, those that it matches."""
    return [name for name in names if name == pattern] or [name for name in names if fnmatchcase(name, pattern)]
