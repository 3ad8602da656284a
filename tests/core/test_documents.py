"""Documents: foreign, newer and older files, and how older ones are read."""

from pathlib import Path

import msgspec
import pytest

from loka.core import documents
from loka.core.documents import migrates, read_document, write_document
from loka.core.errors import InvalidFile


class Note(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    times_us: dict[int, float] = {}


SCHEMA = "loka.note/3"


def read(path: Path) -> Note:
    return read_document(path, SCHEMA, Note, made_by="loka note run")


@pytest.fixture
def migrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Note had ``words`` in its first version, ``text`` and times in ms in its second."""
    monkeypatch.setattr(documents, "_MIGRATIONS", {})

    @migrates("loka.note/1")
    def _(fields: dict) -> dict:
        return {"text": " ".join(fields["words"])}

    @migrates("loka.note/2")
    def _(fields: dict) -> dict:
        return {"text": fields["text"], "times_us": {m: 1e3 * ms for m, ms in fields.get("times_ms", {}).items()}}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    note = Note("µs", {2048: 1.5})
    write_document(tmp_path / "note.json", SCHEMA, note)
    assert read(tmp_path / "note.json") == note


@pytest.mark.usefixtures("migrations")
@pytest.mark.parametrize(
    ("text", "note"),
    [
        ('{"schema": "loka.note/1", "words": ["two", "words"]}', Note("two words")),
        ('{"schema": "loka.note/2", "text": "t", "times_ms": {"64": 0.5}}', Note("t", {64: 500.0})),
        ('{"schema": "loka.note/3", "text": "t"}', Note("t")),
    ],
)
def test_older_schemas_are_migrated_step_by_step(tmp_path: Path, text: str, note: Note) -> None:
    path = tmp_path / "note.json"
    path.write_text(text)
    assert read(path) == note
    assert path.read_text() == text  # reading changes no file


@pytest.mark.usefixtures("migrations")
def test_a_damaged_older_file_is_an_error_too(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    path.write_text('{"schema": "loka.note/1", "text": "no words"}')
    with pytest.raises(InvalidFile, match=r"does not hold what loka.note/1 says .*make it again with `loka note run`"):
        read(path)


def test_one_migration_a_schema() -> None:
    with pytest.raises(ValueError, match=r"loka\.note/1 has two migrations"):
        migrates("loka.note/1")(migrates("loka.note/1")(lambda fields: fields))
    documents._MIGRATIONS.pop("loka.note/1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not whole JSON"),
        ('{"schema": "loka.note/3", "te', "is not whole JSON"),
        ("[" * 5000, "is not whole JSON"),
        ("[]", "is no loka.note"),
        ("{}", "is no loka.note .its schema is None"),
        ('{"schema": "loka.plan/3"}', "is no loka.note .its schema is 'loka.plan/3'"),
        ('{"schema": "loka.note/x"}', "is no loka.note"),
        ('{"schema": "loka.note/²"}', "is no loka.note"),
        ('{"schema": 3}', "is no loka.note"),
        ('{"schema": "loka.note/4", "text": "t"}', "was written by a newer LoKA .*update LoKA"),
        ('{"schema": "loka.note/10", "text": "t"}', "was written by a newer LoKA .*update LoKA"),
        (
            '{"schema": "loka.note/2", "text": "t"}',
            "older schema loka.note/2, which this LoKA .of loka.note/3. no longer reads",
        ),
        ('{"schema": "loka.note/3"}', "does not hold what loka.note/3 says .*missing required field `text`"),
        ('{"schema": "loka.note/3", "text": "t", "more": 1}', "does not hold what .*unknown field `more`"),
        ('{"schema": "loka.note/3", "text": "t", "times_us": {"many": 1}}', "does not hold what"),
    ],
)
def test_the_unexpected_says_what_to_do(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "note.json"
    path.write_text(text)
    with pytest.raises(InvalidFile, match=message):
        read(path)


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidFile, match=r"there is no .*note.json: make it with `loka note run`"):
        read(tmp_path / "note.json")
    with pytest.raises(InvalidFile, match="cannot be read"):
        read(tmp_path)
