"""Results on disk: rows gathered in a JSON file that a later call continues, and a Markdown table made from it."""

import json
import platform
import re
import shlex
import sys
from datetime import date
from pathlib import Path

import torch

from loka import __version__
from loka.core.files import atomic_write

FOLDER = Path(__file__).parent / "results"


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device).removeprefix("NVIDIA ")
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


class ResultsFile:
    """Rows under string keys. Each is written at once, so an interrupted benchmark goes on where it stopped."""

    def __init__(self, name: str, device: torch.device, path: Path | None = None) -> None:
        slug = re.sub(r"[^a-z0-9]+", "-", hardware(device).lower()).strip("-")
        self.json_path = path or FOLDER / f"{slug}-{date.today().isoformat()}-{name}.json"
        self.environment = {
            "hardware": hardware(device),
            "date": date.today().isoformat(),
            "loka": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "command": _command(),
        }
        self.rows: dict[str, dict] = json.loads(self.json_path.read_text())["rows"] if self.json_path.exists() else {}

    def add(self, key: str, row: dict) -> None:
        self.rows[key] = row
        atomic_write(self.json_path, json.dumps({"environment": self.environment, "rows": self.rows}, indent=1) + "\n")

    def write_markdown(self, title: str, notes: str, table: str) -> Path:
        facts = "\n".join(
            f"- {name}: {f'`{value}`' if name == 'command' else value}" for name, value in self.environment.items()
        )
        path = self.json_path.with_suffix(".md")
        atomic_write(path, f"# {title}\n\n{notes}\n\n{table}\n\n{facts}\n")
        return path


def _command() -> str:
    """The call without the folders of this machine."""
    words = [Path(word).name if word.startswith(("/", "~", "..")) else word for word in sys.argv[1:]]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Columns padded to their widest cell, so that the table reads in a terminal too."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines)
