"""Results of benchmarks: one JSON file for programs and one Markdown file for readers, named by hardware and date."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from loka.core.environment import Environment
from loka.core.files import atomic_write


def write_results(
    folder: str | Path, name: str, environment: Environment, command: str, rows: Sequence[object], tables: str
) -> tuple[Path, Path]:
    """Write ``<hardware>-<date>-<name>.json`` and ``.md`` into ``folder``; returns both paths."""
    stem = Path(folder) / f"{environment.slug}-{name}"
    json_path, markdown_path = Path(f"{stem}.json"), Path(f"{stem}.md")
    header = {"schema": "loka.results/1", "name": name, "environment": environment, "command": command}
    lines = b",\n".join(msgspec.json.encode(row) for row in rows)  # a row a line, for those who compare two files
    atomic_write(json_path, msgspec.json.encode(header)[:-1] + b',"rows":[\n' + lines + b"\n]}\n")
    atomic_write(markdown_path, f"# {name}\n\n{environment}\n\nMade by `{command}`\n\n{tables}")
    return json_path, markdown_path


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A table with its first column left-aligned and numbers to the right."""
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"
