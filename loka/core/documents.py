"""JSON documents with a schema, ``{"schema": "loka.plan/1", …}``. The unexpected in one is an error that says what to do."""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from loka.core.errors import InvalidFile
from loka.core.files import atomic_write

Document = TypeVar("Document", bound=msgspec.Struct)


def write_document(path: Path, schema: str, document: msgspec.Struct) -> None:
    """Write ``document`` indented, one field a line, so that two versions can be compared."""
    fields = {"schema": schema, **msgspec.to_builtins(document, str_keys=True)}
    atomic_write(path, msgspec.json.format(msgspec.json.encode(fields), indent=1) + b"\n")


def read_document(path: Path, schema: str, kind: type[Document], *, made_by: str) -> Document:
    """Read what ``write_document`` wrote. ``made_by`` is the command a user runs to get such a file."""
    try:
        fields: Any = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        raise InvalidFile(f"there is no {path}: make it with `{made_by}`") from None
    except msgspec.DecodeError as error:
        raise InvalidFile(f"{path} is not whole JSON ({error}): make it again with `{made_by}`") from error
    _check_schema(path, schema, fields, made_by)
    fields.pop("schema")
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise InvalidFile(f"{path} does not hold what {schema} says ({error}): make it again with `{made_by}`") from error


def _check_schema(path: Path, schema: str, fields: Any, made_by: str) -> None:
    found = fields.get("schema") if isinstance(fields, dict) else None
    name, _, version = schema.rpartition("/")
    found_name, _, found_version = found.rpartition("/") if isinstance(found, str) else ("", "", "")
    if found_name != name or not found_version.isdigit():
        raise InvalidFile(f"{path} is no {name} (its schema is {found!r}): make one with `{made_by}`")
    if int(found_version) > int(version):
        raise InvalidFile(f"{path} was written by a newer LoKA ({found}, this one reads {schema}): update LoKA")
    if found != schema:
        raise InvalidFile(f"{path} is of the older schema {found}, this LoKA reads {schema}: make it again with `{made_by}`")
