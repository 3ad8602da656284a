"""Tables of commands on a narrow terminal."""

import io

from rich.console import Console

from loka.cli.tables import plain_table


def test_a_narrow_table_folds_names_and_keeps_numbers() -> None:
    table = plain_table("a plan", ["site", "in×out", "fprop", "dgrad", "wgrad", "µs a step", "was", "×"])
    name, kernel = "layers.0.sequence_summary.pma.key_value", "torch.tensorwise_fast 0.078"
    table.add_row(name, "21248×8192", kernel, kernel, kernel, "2,178", "4,063", "1.87")
    out = io.StringIO()
    Console(file=out, width=80).print(table)
    text = out.getvalue()
    assert all(number in text for number in ("21248×8192", "2,178", "4,063", "1.87"))
    assert "…" not in text
    first = "".join(line[2:].split("  ")[0] for line in text.splitlines()[4:])
    assert first == name
