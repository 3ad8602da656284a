"""The tables of ``loka bench block`` and ``loka bench casts``."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from loka.core.results import markdown_table
from loka.measure.block_bench import BlockMeasurement
from loka.measure.block_ways import BASELINE, WEIGHT_CASTS
from loka.measure.cast_bench import COMPILED, COPY, FBGEMM, CastMeasurement

LARGE_BYTES = 16 << 20  # past it a cast is bound by memory alone
NOTES = (
    f"{BASELINE} is Linear + LayerNorm + SiLU, static shapes; weights are read from memory, activations from the cache. "
    "LoKA is the fused block in a chain: serving reads and writes FP8, training is forward, backward and the casts of the "
    "weight, with gradients between blocks in bf16. The limit is the machine's own for FP8, flops or bytes."
)


def block_tables(rows: Sequence[BlockMeasurement]) -> str:
    """Speed-ups in serving and training, memory held for backward, the share of weight casts, and who could not run."""
    serving = _speedups([(row, row.serving_us, row.serving_limit_us) for row in rows])
    training = _speedups([(row, row.training_us, row.training_limit_us) for row in rows])
    saved_by = _names(row.saved_bytes for row in rows)
    saved = [[str(row.site), *(_cell(row.saved_bytes, way, 2**-20, ".1f") for way in saved_by)] for row in rows]
    casts_us = [row.training_us[WEIGHT_CASTS] for row in rows if WEIGHT_CASTS in row.training_us]
    casts = f"Casts of the weight in both layouts: {min(casts_us):.1f} to {max(casts_us):.1f} µs a step." if casts_us else ""
    return "\n\n".join(
        [
            NOTES,
            f"Serving: times as fast as {BASELINE}\n\n{serving}",
            f"Training: times as fast as {BASELINE}\n\n{training}",
            casts,
            f"Held for backward besides the output, MiB\n\n{markdown_table(['rows×in×out', *saved_by], saved)}",
            _reasons(row.why_not for row in rows),
        ]
    )


def cast_tables(rows: Sequence[CastMeasurement]) -> str:
    """Times in the cache, the means of their ratios to the references, and from memory the share of a copy's bandwidth."""
    names = _names(row.warm_us for row in rows)
    header = ["rows×cols", *names]
    warm = [[f"{row.rows}×{row.cols}", *(_cell(row.warm_us, name, 1.0, ".1f") for name in names)] for row in rows]
    shares = []
    for row in (row for row in rows if row.bytes[COPY] // 2 >= LARGE_BYTES):
        share = {name: row.share_of_copy(name) for name in row.cold_us}
        shares.append([f"{row.rows}×{row.cols}", *(_cell(share, name, 100.0, ".0f") for name in names)])
    return "\n\n".join(
        [
            f"µs, the matrix in the cache as an activation is\n\n{markdown_table(header, warm)}",
            f"Times as fast as the references, geometric means over all shapes\n\n{_cast_ratios(rows, names)}",
            f"From memory, matrices past 16 MiB: % of a copy's bandwidth\n\n{markdown_table(header, shares)}",
            _reasons(row.why_not for row in rows),
        ]
    )


def _speedups(rows: Sequence[tuple[BlockMeasurement, Mapping[str, float], float | None]]) -> str:
    """One line a shape, then the geometric mean and the least of each column."""
    rows = [row for row in rows if BASELINE in row[1]]
    columns = [*(way for way in _names(times for _, times, _ in rows) if way not in (BASELINE, WEIGHT_CASTS)), "limit"]
    found: dict[str, list[float]] = {column: [] for column in columns}
    table = []
    for row, times, limit_us in rows:
        times = {**times, "limit": limit_us} if limit_us else times
        ratios = {column: times[BASELINE] / times[column] for column in columns if column in times}
        for column, ratio in ratios.items():
            found[column].append(ratio)
        table.append([str(row.site), f"{times[BASELINE]:.1f}", *(_cell(ratios, column, 1.0, ".2f") for column in columns)])
    for label, summary in (("**geometric mean**", statistics.geometric_mean), ("**least**", min)):
        summaries = {column: summary(ratios) for column, ratios in found.items() if ratios}
        table.append([label, "", *(_cell(summaries, column, 1.0, ".2f") for column in columns)])
    return markdown_table(["rows×in×out", f"{BASELINE}, µs", *columns], table)


def _cast_ratios(rows: Sequence[CastMeasurement], names: Sequence[str]) -> str:
    references = [name for name in (FBGEMM, COMPILED, COPY) if name in names]
    table = []
    for name in names:
        cells = [name]
        for reference in references:
            both = [row.warm_us for row in rows if name in row.warm_us and reference in row.warm_us]
            ratios = [times[reference] / times[name] for times in both]
            cells.append(f"{statistics.geometric_mean(ratios):.2f}" if ratios else "–")
        table.append(cells)
    return markdown_table(["cast", *(f"× {reference}" for reference in references)], table)


def _names(columns: Iterable[Mapping[str, object]]) -> list[str]:
    return list(dict.fromkeys(name for column in columns for name in column))


def _cell(values: Mapping[str, float], name: str, unit: float, form: str) -> str:
    return f"{values[name] * unit:{form}}" if name in values else "–"


def _reasons(refusals: Iterable[Mapping[str, str]]) -> str:
    told = dict.fromkeys(f"- {name}: {reason}" for refused in refusals for name, reason in refused.items())
    return "Not measured, and why\n\n" + ("\n".join(told) or "- nothing") + "\n"
