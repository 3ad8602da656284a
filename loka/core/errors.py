"""Every error LoKA raises for a caller's mistake. Each message names what was wrong and what to do next."""


class LokaError(Exception):
    """Base of LoKA's errors: catch this to handle anything a user can mend."""


class UnknownName(LokaError, KeyError):
    """A name that no registry knows; the message lists the known ones."""

    def __str__(self) -> str:  # KeyError would print the message in quotes
        return str(self.args[0])


class InvalidInput(LokaError, ValueError):
    """A tensor, shape, dtype or option that cannot be used as given."""


class KernelUnavailable(LokaError, RuntimeError):
    """A kernel asked for by name that cannot run here; the message carries its ``why_not``."""


class InvalidFile(LokaError, ValueError):
    """A file that is truncated, foreign, of a newer schema, or otherwise not what was expected."""


def require_kind(value: object, kind: type, name: str, remedy: str) -> None:
    """Refuse what is not of ``kind``, such as a path in place of the file's content, before it fails somewhere inside."""
    if not isinstance(value, kind):
        raise InvalidInput(f"{name} must be a {kind.__name__}, got {type(value).__name__}: {remedy}")


def require_count(name: str, value: int) -> None:
    """Refuse all but whole numbers from 1 on; those of other libraries, such as NumPy's, pass too."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
        raise InvalidInput(f"{name} must be a whole number, at least 1, got {value!r}")
