"""Numbers as the page, the terminal and the headline write them."""

import math

from loka.core.estimate import Estimate

MINUS = "−"
NBSP = "\N{NO-BREAK SPACE}"  # a number and its unit stay on one line


def number(value: float) -> str:
    """Three significant digits, whole from 1,000 on; with an exponent below 0.001 and from a million on."""
    if value == 0:
        return "0"
    size = abs(value)
    text = f"{value:.2e}" if not 1e-3 <= size < 1e6 else f"{value:.3g}" if size < 999.5 else f"{value:,.0f}"
    return text.replace("-", MINUS)


def with_interval(mean: float, low: float, high: float) -> str:
    """0.0104 ± 0.0009: as many decimals as the interval's first digit needs."""
    half = (high - low) / 2
    if not 0 < half < 1:
        return f"{number(mean)} ± {number(half)}" if half else number(mean)
    decimals = min(6, -math.floor(math.log10(half)))
    return f"{mean:.{decimals}f} ± {half:.{decimals}f}".replace("-", MINUS)


def times_faster(speedup: float) -> str:
    """1.83×"""
    return f"{speedup:.2f}×" if speedup < 10 else f"{speedup:.1f}×"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.0f}{NBSP}%".replace("-", MINUS)


def change_percent(change: Estimate) -> str:
    """+0.003 % ± 0.020 %, of a relative change."""
    text = f"{100 * change.mean:+.3f} % ± {50 * (change.high - change.low):.3f} %"
    return text.replace("-", MINUS).replace(" %", f"{NBSP}%").replace("± ", f"±{NBSP}")


def duration(time_us: float) -> str:
    """Three digits, in the unit that reads best."""
    value, unit = (time_us, "µs") if time_us < 999.5 else (time_us / 1e3, "ms") if time_us < 999.5e3 else (time_us / 1e6, "s")
    return f"{value:.3g}{NBSP}{unit}" if value < 999.5 else f"{value:,.0f}{NBSP}{unit}"
