"""JSON documents with a schema, ``{"schema": "loka.plan/1", …}``. The unexpected in one is an error that says what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from loka.core.errors import InvalidFile
from loka.core.files import atomic_write

Document = TypeVar("Document", bound=msgspec.Struct)
Fields = dict[str, Any]
Migration = Callable[[Fields], Fields]

_MIGRATIONS: dict[str, Migration] = {}  # by the schema they read; each leads to the next version


def migrates(schema: str) -> Callable[[Migration], Migration]:
    """Decorate the function that turns the fields of ``schema`` (``loka.plan/1``) into those of the next version."""

    def decorate(migration: Migration) -> Migration:
        if schema in _MIGRATIONS:
            raise ValueError(f"{schema} has two migrations")
        _MIGRATIONS[schema] = migration
        return migration

    return decorate


def same_fields(*schemas: str) -> None:
    """Read files of each of ``schemas`` as the next version: the fields that are new there have defaults."""
    for schema in schemas:
        migrates(schema)(lambda fields: fields)


def write_document(path: Path, schema: str, document: msgspec.Struct) -> None:
    """Write ``document`` indented, one field a line, so that two versions can be compared."""
    fields = {"schema": schema, **msgspec.to_builtins(document, str_keys=True)}
    atomic_write(path, msgspec.json.format(msgspec.json.encode(fields), indent=1) + b"\n")


def read_document(path: Path, schema: str, kind: type[Document], *, made_by: str) -> Document:
    """Read what ``write_document`` wrote, now or under an older schema that has migrations.

    ``made_by`` is the command a user runs to get such a file.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise InvalidFile(f"there is no {path}: make it with `{made_by}`") from None
    except OSError as error:
        raise InvalidFile(f"{path} cannot be read ({error}): make it again with `{made_by}`") from error
    return parse_document(text, path, schema, kind, made_by=made_by)


def parse_document(text: bytes | str, path: Path, schema: str, kind: type[Document], *, made_by: str) -> Document:
    """``read_document`` of a text that was found in ``path``."""
    try:
        fields: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidFile(f"{path} is not whole JSON ({error}): make it again with `{made_by}`") from error
    fields = _migrate(path, schema, fields, made_by)
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidFile(f"{path} does not hold what {schema} says ({error}): make it again with `{made_by}`") from error


def _migrate(path: Path, schema: str, fields: Any, made_by: str) -> Fields:
    """The fields as ``schema`` has them, without the line that names it."""
    found = fields.get("schema") if isinstance(fields, dict) else None
    name, _, wanted = schema.rpartition("/")
    found_name, _, version = found.rpartition("/") if isinstance(found, str) else ("", "", "")
    if found_name != name or not version.isascii() or not version.isdigit():
        raise InvalidFile(f"{path} is no {name} (its schema is {found!r}): make one with `{made_by}`")
    if int(version) > int(wanted):
        raise InvalidFile(f"{path} was written by a newer LoKA ({found}, this one reads {schema}): update LoKA")
    fields = {key: value for key, value in fields.items() if key != "schema"}
    for older in (f"{name}/{number}" for number in range(int(version), int(wanted))):
        if older not in _MIGRATIONS:
            raise InvalidFile(
                f"{path} is of the older schema {found}, which this LoKA (of {schema}) no longer reads: "
                f"make it again with `{made_by}`"
            )
        try:
            fields = _MIGRATIONS[older](fields)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidFile(f"{path} does not hold what {older} says ({error!r}): make it again with `{made_by}`") from error
    return fields
