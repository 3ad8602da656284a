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
