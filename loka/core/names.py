"""Names that users give: which of the known ones they mean, or may have meant."""

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from loka.core.errors import InvalidInput


def given_names(given: object, option: str, of_what: str) -> tuple[str, ...]:
    """The names ``of_what`` that ``option`` was given: one, or several in a list."""
    several = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    names = tuple(name for name in several if isinstance(name, str))
    if len(names) < len(several):
        raise InvalidInput(f"{option} takes {of_what}, in a list; got {', '.join(map(repr, several))}")
    return names


def did_you_mean(name: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.5) -> str:
    """A sentence, with a space in front: up to ``most`` of ``known`` that are like ``name``. Empty where none are."""
    close = difflib.get_close_matches(name, list(known), n=most, cutoff=cutoff)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """The names that are ``pattern``, which may hold brackets; if there are none, those that it matches."""
    return [name for name in names if name == pattern] or [name for name in names if fnmatchcase(name, pattern)]
