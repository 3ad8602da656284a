"""Examples in Python that stand by themselves run as they are pasted, and print what the page says."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_what_mods_print_is_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    example = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", (DOCS / "mods.md").read_text(), re.DOTALL)
    assert example
    exec(example[1], {})
    assert capsys.readouterr().out == example[2]


def test_layers_and_blocks_are_made_by_hand() -> None:
    example = re.search(r"## By hand.*?```python\n(.*?)```", (DOCS / "kernels.md").read_text(), re.DOTALL)
    assert example
    names: dict[str, object] = {}
    exec(example[1], names)
    assert names["layer"].weight is names["linear"].weight  # type: ignore[attr-defined]
    assert names["chain"].blocks[0] is names["blocks"][0]  # type: ignore[attr-defined, index]
