"""A Mods report in lines that tests can compare."""

from loka.mods.report import ModReport


def reasons(report: ModReport) -> dict[str, str]:
    return {f"{left.mod} {left.name}": left.why for left in report.left_alone}


def changed(report: ModReport) -> list[str]:
    return sorted(f"{change.mod} {change.name}" for change in report.changes)
