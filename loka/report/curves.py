"""Training curves of twins, and their difference with its interval."""

from collections.abc import Sequence
from dataclasses import dataclass

from loka.core.comparison import HIGH, OTHER, PLANNED
from loka.numerics.confidence import estimate_mean
from loka.report.page_data import Curve, CurveDifference, Curves
from loka.report.run import MetricsLine

MOST_POINTS = 200  # more would only blur into each other


@dataclass(frozen=True)
class Window:
    """The examples after the window before, up to ``step``."""

    step: int
    examples: int
    log_loss: float
    best: float | None  # log-loss of the data's own generator, if known


def draw_curves(training: dict[str, list[MetricsLine]], high_precision: str, other: str = "") -> Curves | None:
    """The curves of what was trained. Twins are compared window by window, since in each both saw the same examples."""
    names = {HIGH: high_precision, PLANNED: "LoKA", "training": "log-loss"}
    all_windows = {name: _windows(lines) for name, lines in training.items()}
    windows = {name: _merge(of_one) for name, of_one in all_windows.items()}
    if not any(windows.values()):
        return None
    curves = tuple(
        Curve(names[name], tuple(window.step for window in line), tuple(window.log_loss for window in line))
        for name, line in windows.items()
        if name in names
    )
    known = [(window.step, window.best) for window in next(iter(windows.values())) if window.best is not None]
    best = Curve("best possible", tuple(step for step, _ in known), tuple(loss for _, loss in known)) if known else None
    return Curves(curves, best, _difference(all_windows, PLANNED), _difference(all_windows, OTHER), other)


def _windows(lines: Sequence[MetricsLine]) -> list[Window]:
    """Windows with a finite loss."""
    windows = []
    for line in lines:
        loss, ne, best_ne = line.window.log_loss, line.window.ne, line.window.best_ne
        if loss is not None:
            best = loss * best_ne / ne if best_ne and ne else None  # both are divided by the same entropy
            windows.append(Window(line.step, line.window.examples, loss, best))
    return windows


def _merge(windows: list[Window]) -> list[Window]:
    """Neighbouring windows merged, until there are at most MOST_POINTS; losses are weighted by examples."""
    size = max(1, -(-len(windows) // MOST_POINTS))
    groups = [windows[start : start + size] for start in range(0, len(windows), size)]
    return [_merged(group) for group in groups]


def _merged(group: list[Window]) -> Window:
    examples = sum(window.examples for window in group)
    best = [window.best * window.examples for window in group if window.best is not None]
    return Window(
        step=group[-1].step,
        examples=examples,
        log_loss=sum(window.log_loss * window.examples for window in group) / examples,
        best=sum(best) / examples if len(best) == len(group) else None,
    )


def _difference(twins: dict[str, list[Window]], name: str) -> CurveDifference | None:
    """The difference of the twin ``name`` from the high-precision one, over the windows that both have: merged alike, however
    many more one of them has."""
    of_high, of_twin = ({window.step: window for window in twins.get(twin, ())} for twin in (HIGH, name))
    common = sorted(of_high.keys() & of_twin.keys())
    high, twin = (_merge([of_one[step] for step in common]) for of_one in (of_high, of_twin))
    if not common:
        return None
    changes = [100 * (planned.log_loss / base.log_loss - 1) for planned, base in zip(twin, high, strict=True)]
    means = [estimate_mean(changes[:n]) for n in range(2, len(changes) + 1)]
    return CurveDifference(
        steps=tuple(window.step for window in twin),
        change=tuple(changes),
        mean=tuple(estimate.mean for estimate in means),
        low=tuple(estimate.low for estimate in means),
        high=tuple(estimate.high for estimate in means),
    )
