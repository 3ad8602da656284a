"""The tables of ``loka bench model``: speed-ups, where a step's time goes, memory, and what was done or could not be."""

from typing import Any

from loka.core.plan import Goal
from loka.core.results import GatheredResults, markdown_table
from loka.train.model_arms import ARMS, BASELINE
from loka.train.step_profile import Kind

Rows = dict[str, dict[str, Any]]  # arm → row
Cells = dict[tuple[str, str, int], Rows]


def make_tables(results: GatheredResults) -> str:
    parts = []
    for goal, what in ((Goal.TRAINING, "Training step"), (Goal.SERVING, "Serving")):
        cells = _cells(results, goal)
        if cells:
            parts.append(f"{what}: speed-up over {BASELINE}\n\n{_speedups(cells)}")
        profiled = {cell: rows for cell, rows in cells.items() if any(_besides(row, rows) is not None for row in rows.values())}
        if profiled:
            parts.append(f"{what}, the dense part alone: speed-up over {BASELINE}\n\n{_dense_speedups(profiled)}")
        if any(row.get("peak_bytes") for rows in cells.values() for row in rows.values()):
            parts.append(f"{what}: peak memory of weights, states and activations, GiB\n\n{_memory(cells)}")
    for goal, what in ((Goal.TRAINING, "training step"), (Goal.SERVING, "serving call")):
        cells = _cells(results, goal)
        if any("shares" in row for rows in cells.values() for row in rows.values()):
            parts.append(f"Where a {what}'s kernel time goes\n\n{_shares(cells)}")
    parts.append(f"What was done, and what could not be\n\n{_deeds(results)}")
    return "\n".join(parts)


def ceiling(shares: dict[str, float]) -> float:
    """How much faster a step could get (Amdahl), with GEMMs at twice the speed and norms and activations for nothing."""
    return 1 / (1 - shares[Kind.GEMM] / 2 - shares[Kind.ELEMENTWISE])


def _cells(results: GatheredResults, goal: Goal) -> Cells:
    """In the order of their names, however they were gathered."""
    cells: Cells = {}
    for row in results.rows.values():
        if row["goal"] == goal:
            cells.setdefault((row["model"], row["preset"], row["batch_size"]), {})[row["arm"]] = row
    return dict(sorted(cells.items()))


def _names(cell: tuple[str, str, int]) -> list[str]:
    model, preset, batch_size = cell
    return [model, preset, str(batch_size)]


def _arms(cells: Cells) -> list[str]:
    """In the order of ``ARMS``."""
    found = {arm for rows in cells.values() for arm in rows}
    return [arm for arm in ARMS if arm in found] + sorted(found - ARMS.keys())


def _speedups(cells: Cells) -> str:
    arms = [arm for arm in _arms(cells) if arm != BASELINE]
    table = []
    for cell, rows in cells.items():
        base = rows.get(BASELINE, {})
        milliseconds = f"{base['time_us']['median_us'] / 1e3:.2f}" if "time_us" in base else "–"
        table.append([*_names(cell), milliseconds, *(_speedup(rows.get(arm)) for arm in arms)])
    return markdown_table(["model", "preset", "batch", f"{BASELINE}, ms", *arms], table)


def _speedup(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if "failed" in row:
        return "–"
    return f"{row['speedup']:.2f}" + ("" if row["is_graph"] else "*")


def _dense_speedups(cells: Cells) -> str:
    arms = [arm for arm in _arms(cells) if arm != BASELINE]
    table = [[*_names(cell), *(_dense_speedup(rows.get(arm), rows) for arm in arms)] for cell, rows in cells.items()]
    return markdown_table(["model", "preset", "batch", *arms], table)


def _besides(row: dict[str, Any], rows: Rows) -> float | None:
    """What no arm changes: the share of embeddings, optimizer and input in a step of the baseline that the row was timed
    beside. Older rows do not keep that one's shares: then those of the cell's baseline."""
    shares = row.get("baseline_shares", rows.get(BASELINE, {}).get("shares"))
    return sum(shares.get(kind, 0.0) for kind in (Kind.EMBEDDING, Kind.OPTIMIZER, Kind.INPUT)) if shares else None


def _dense_speedup(row: dict[str, Any] | None, rows: Rows) -> str:
    if row is None or "failed" in row:
        return _speedup(row)
    besides = _besides(row, rows)
    if besides is None:
        return ""
    left = 1 / row["speedup"] - besides
    if left <= 0:  # the whole step took no longer than the parts that no arm changes: the shares do not hold for it
        return "–"
    return f"{(1 - besides) / left:.2f}" + ("" if row["is_graph"] else "*")


def _memory(cells: Cells) -> str:
    arms = _arms(cells)

    def gibibytes(row: dict[str, Any] | None) -> str:
        return "" if row is None or row.get("peak_bytes") is None else f"{row['peak_bytes'] / 2**30:.1f}"

    table = [[*_names(cell), *(gibibytes(rows.get(arm)) for arm in arms)] for cell, rows in cells.items()]
    return markdown_table(["model", "preset", "batch", *arms], table)


def _shares(cells: Cells) -> str:
    table = []
    for cell, rows in cells.items():
        for arm, row in rows.items():
            shares = row.get("shares")
            if shares:
                most = f"{ceiling(shares):.2f}" if arm == BASELINE else ""
                table.append([*_names(cell), arm, *(_share(shares, kind) for kind in Kind), most])
    return markdown_table(["model", "preset", "batch", "arm", *map(str, Kind), "speed-up at most"], table)


def _share(shares: dict[str, float], kind: Kind) -> str:
    return f"{100 * shares[kind]:.1f} %" if kind in shares else ""  # rows may be from before there was such a kind


def _deeds(results: GatheredResults) -> str:
    """Each outcome of an arm once, with the cells that it holds for."""
    cells: dict[tuple[str, str], list[str]] = {}
    for key, row in results.rows.items():
        text = f"could not run: {row['failed']}" if "failed" in row else row["did"]
        if text:
            cells.setdefault((row["arm"], text), []).append(key.removesuffix(f"/{row['arm']}"))
    return "\n".join(f"- {arm}: {text} ({', '.join(keys)})" for (arm, text), keys in cells.items()) + "\n"
