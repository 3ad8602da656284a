"""A line chart as one SVG file without scripts or fonts of its own: it opens in any browser and beside any table."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 36, 48
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")


@dataclass(frozen=True)
class Line:
    """One curve; ``low`` and ``high``, where given, are drawn as a band around it. Values that are not finite are left out."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


def line_chart(lines: Sequence[Line], *, title: str, x_label: str, y_label: str) -> str:
    """The SVG's text. The y axis always includes 0, so that a difference does not look larger than it is."""
    xs = [x for line in lines for x in line.x] or [0.0]
    ys = [y for line in lines for y in (*line.y, *line.low, *line.high) if math.isfinite(y)]
    x_axis = _Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y_axis = _Axis(min([0.0, *ys]), max([0.0, *ys]), HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
        *(_grid_line(y_axis.place(tick), _tick_text(tick)) for tick in y_axis.ticks),
        *(_text(x_axis.place(tick), HEIGHT - BOTTOM + 18, _tick_text(tick), "middle") for tick in x_axis.ticks),
        f'<path d="M{LEFT} {y_axis.place(0):.1f}H{WIDTH - RIGHT}" stroke="black"/>',
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_label, "middle"),
        f'<g transform="translate(16 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)">{_text(0, 0, y_label, "middle")}</g>',
    ]
    for number, line in enumerate(lines):
        color = COLORS[number % len(COLORS)]
        parts += _curve(line, x_axis, y_axis, color)
        y = TOP + 18 * number + 6
        parts.append(f'<path d="M{WIDTH - RIGHT + 12} {y}h20" stroke="{color}" stroke-width="2"/>')
        parts.append(_text(WIDTH - RIGHT + 38, y + 4, line.name, "start"))
    return "\n".join([*parts, "</svg>\n"])


class _Axis:
    """A linear scale with round ticks."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        if low == high:
            low, high = low - 1, high + 1
        step = 10 ** math.floor(math.log10((high - low) / 4))
        step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (factor * step) <= 6)
        self._low, self._high, self._start, self._end = low, high, start, end
        self.ticks = [step * i for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]

    def place(self, value: float) -> float:
        return self._start + (value - self._low) / (self._high - self._low) * (self._end - self._start)


def _curve(line: Line, x_axis: _Axis, y_axis: _Axis, color: str) -> list[str]:
    def points(values: Sequence[float]) -> list[str]:
        return [f"{x_axis.place(x):.1f},{y_axis.place(y):.1f}" for x, y in zip(line.x, values, strict=True) if math.isfinite(y)]

    curve = [f'<polyline points="{" ".join(points(line.y))}" fill="none" stroke="{color}" stroke-width="1.5"/>']
    if line.low:
        band = " ".join([*points(line.low), *reversed(points(line.high))])
        curve.insert(0, f'<polygon points="{band}" fill="{color}" fill-opacity="0.15"/>')
    return curve


def _grid_line(y: float, label: str) -> str:
    return f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>' + _text(LEFT - 8, y + 4, label, "end")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _tick_text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
