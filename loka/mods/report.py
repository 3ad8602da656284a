"""What Mods changed, or would change, and what they left alone and why."""

from dataclasses import dataclass

from loka.nn.blocks import Uncovered


@dataclass(frozen=True)
class Change:
    """One module changed by one Mod."""

    mod: str
    name: str  # fully qualified
    before: str
    after: str
    removed: tuple[str, ...]  # fully qualified names of the parameters that are gone
    n_removed: int  # their elements


@dataclass(frozen=True)
class LeftAlone:
    """A module that a Mod is about, and why it stayed as it was."""

    mod: str
    name: str
    why: str


@dataclass(frozen=True)
class ModReport:
    """Every change, every refusal, and every function call that would have been changed if it were a module."""

    model: str  # its class
    mods: tuple[str, ...]
    changes: tuple[Change, ...]
    left_alone: tuple[LeftAlone, ...]
    not_covered: tuple[Uncovered, ...]
    n_parameters: int  # of the model before
    applied: bool  # False for a dry run
    trained: str | None  # why the model looks trained
    how: str  # where the knowledge of its data flow comes from

    @property
    def n_removed(self) -> int:
        return sum(change.n_removed for change in self.changes)

    def __str__(self) -> str:
        changes = f"{len(self.changes)} change{'s' * (len(self.changes) != 1)} {'made' if self.applied else 'would be made'}"
        share = 100 * self.n_removed / max(self.n_parameters, 1)
        gone = f", {self.n_removed:,} of {self.n_parameters:,} parameters ({share:.2g} %) removed"
        lines = [f"{self.model}: {changes} by {', '.join(self.mods) or 'no mods'}" + gone]
        lines += _aligned([(c.mod, c.name, c.before, f"→ {c.after}", _removed(c)) for c in self.changes])
        if self.left_alone:
            lines += ["left alone:", *_aligned([(left.mod, left.name, left.why) for left in self.left_alone])]
        if self.not_covered:
            lines += ["not covered, being function calls (use modules to have them changed):"]
            lines += [f"  {uncovered}" for uncovered in self.not_covered]
        if self.trained and not self.applied:
            lines += [f"looks trained: {self.trained}; retrain=True would be needed"]
        return "\n".join([*lines, f"({self.how})"])


def _removed(change: Change) -> str:
    parameters = ", ".join(name.rpartition(".")[2] for name in change.removed)
    return f"−{change.n_removed:,} ({parameters})" if change.removed else ""


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns padded to their widest cell, the last as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
