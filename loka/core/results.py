"""Results of benchmarks: one JSON file for programs and one Markdown file for readers, named by hardware and date."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from loka.core.environment import Environment
from loka.core.errors import InvalidFile
from loka.core.files import atomic_write, require_folder
from loka.core.locking import in_turn

SCHEMA = "loka.results/1"


def write_results(
    folder: str | Path, name: str, environment: Environment, command: str, rows: Sequence[object], tables: str
) -> tuple[Path, Path]:
    """Write ``<hardware>-<date>-<name>.json`` and ``.md`` into ``folder``; returns both paths."""
    json_path = Path(folder) / f"{environment.slug}-{name}.json"
    _write_json(json_path, name, environment, command, rows)
    return json_path, _write_markdown(json_path.with_suffix(".md"), name, environment, command, tables)


class GatheredResults:
    """Rows under keys, each written at once: a benchmark that was interrupted goes on where it stopped, and two at a time add
    to the same file.

    ``path`` continues another day's file, of the same device; without it the file is today's in ``folder``.
    """

    def __init__(self, folder: str | Path, name: str, environment: Environment, command: str, path: Path | None = None) -> None:
        self.json_path = path or Path(folder) / f"{environment.slug}-{name}.json"
        self._about = (name, environment, command)
        require_folder(self.json_path.parent)  # before hours of work
        self.rows = self._read()

    def add(self, key: str, row: dict[str, Any]) -> None:
        self.add_all({key: row})

    def add_all(self, rows: dict[str, dict[str, Any]]) -> None:
        with in_turn(self.json_path.parent):
            self.rows |= self._read()  # another process may have added to them
            self.rows |= {key: {"key": key, **row} for key, row in rows.items()}
            _write_json(self.json_path, *self._about, list(self.rows.values()))

    def write_markdown(self, tables: str) -> Path:
        return _write_markdown(self.json_path.with_suffix(".md"), *self._about, tables)

    def _read(self) -> dict[str, dict[str, Any]]:
        if not self.json_path.exists():
            return {}
        try:
            found = msgspec.json.decode(self.json_path.read_bytes())
            rows = {row["key"]: row for row in found["rows"]}
            kind, device = (found["schema"], found["name"]), found["environment"]["device"]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError) as error:
            raise InvalidFile(f"{self.json_path} holds no gathered results ({error}): move it away or name another") from error
        name, environment, _ = self._about
        if kind != (SCHEMA, name):
            raise InvalidFile(f"{self.json_path} holds {kind[1]} by {kind[0]}, not {name} by {SCHEMA}: name another file")
        if device != environment.device:
            raise InvalidFile(
                f"{self.json_path} holds results of {device}, and this is {environment.device}: name another file"
            )
        return rows


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A table with its first column left-aligned and numbers to the right."""
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def _write_json(path: Path, name: str, environment: Environment, command: str, rows: Sequence[object]) -> None:
    header = {"schema": SCHEMA, "name": name, "environment": environment, "command": command}
    lines = b",\n".join(msgspec.json.encode(row) for row in rows)  # a row a line, for those who compare two files
    atomic_write(path, msgspec.json.encode(header)[:-1] + b',"rows":[\n' + lines + b"\n]}\n")


def _write_markdown(path: Path, name: str, environment: Environment, command: str, tables: str) -> Path:
    atomic_write(path, f"# {name}\n\n{environment}\n\nMade by `{command}`\n\n{tables}")
    return path
