"""Results of benchmarks: one JSON file for programs and one Markdown file for readers, named by hardware and date."""

from pathlib import Path

import msgspec

from loka.core.environment import Environment
from loka.core.files import atomic_write


def write_results(
    folder: str | Path, name: str, environment: Environment, command: str, rows: object, tables: str
) -> tuple[Path, Path]:
    """Write ``<hardware>-<date>-<name>.json`` and ``.md`` into ``folder``; returns both paths."""
    stem = Path(folder) / f"{environment.slug}-{name}"
    document = {"schema": "loka.results/1", "name": name, "environment": environment, "command": command, "rows": rows}
    json_path, markdown_path = Path(f"{stem}.json"), Path(f"{stem}.md")
    atomic_write(json_path, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    atomic_write(markdown_path, f"# {name}\n\n{environment}\n\nMade by `{command}`\n\n{tables}")
    return json_path, markdown_path


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A table with its first column left-aligned and numbers to the right."""
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"
