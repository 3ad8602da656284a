"""Tables of commands on a narrow terminal."""

import io
from dataclasses import fields

from rich.console import Console

from loka.cli.bench import _summary
from loka.cli.kernels import _measured_table
from loka.cli.tables import plain_table
from loka.core.gemm import Role, SiteShape
from loka.measure.gemm import GemmMeasurement
from loka.measure.timing import Timing
from loka.numerics.metrics import ErrorReport


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


def test_shapes_where_the_baseline_could_not_run_are_compared_with_nothing() -> None:
    small, large = SiteShape(8, 16, 16), SiteShape(2048, 16, 16)
    error = ErrorReport(*[0.01] * len(fields(ErrorReport)))

    def measured(kernel: str, site: SiteShape, time_us: float) -> GemmMeasurement:
        timing = Timing(time_us, time_us, time_us, 1)
        return GemmMeasurement(kernel, Role.FPROP, site, "e4m3", gemm=timing, whole=timing, error=error)

    lost = GemmMeasurement("torch.bf16", Role.FPROP, large, "bf16", why_not="failed: out of memory")
    fast = measured("fast", large, 5.0)
    rows = [measured("torch.bf16", small, 20.0), lost, measured("fast", small, 10.0), fast]
    assert "| fast | fprop | 1 | 2.00 | 2.00 | 0.0100 |" in _summary(rows, "torch.bf16")
    assert "| fast |" not in _summary([lost, fast], "torch.bf16")
    out = io.StringIO()
    Console(file=out, width=200).print(_measured_table([lost, fast], "torch.bf16", "8 bits"))
    assert out.getvalue().rstrip().endswith("–")
