"""What the page shows, as plain data. Every number and word is decided in Python; the page's scripts only draw."""

from loka.core.survey import Struct


class Tile(Struct, frozen=True):
    """One number of the headline, large."""

    label: str
    value: str
    note: str = ""
    is_good: bool | None = None  # None: neither


class MissingPart(Struct, frozen=True):
    """A part of the run that is not there, cannot be read, or does not fit the rest; and the command that makes it."""

    part: str
    why: str
    command: str


class MapPoint(Struct, frozen=True):
    """A site on the map: with the kernels that the plan chose, or with the one that came closest."""

    site: str
    shape: str
    kernel: str
    error: float  # on the map's axis
    error_text: str
    speedup: float
    share: float  # of the time of all sites in high precision
    is_safe: bool
    is_fast: bool
    is_chosen: bool
    reason: str


class SiteMap(Struct, frozen=True):
    points: tuple[MapPoint, ...]
    max_error: float
    min_speedup: float
    error_axis: str
    off_the_map: tuple[tuple[str, str], ...] = ()  # sites without numbers to place them by: name, reason


class PlanRow(Struct, frozen=True):
    """One role of one site."""

    site: str
    role: str
    shape: str
    kernel: str
    is_low_precision: bool
    speedup: float  # of the whole site, casts included
    share: float
    reason: str
    transform: str = ""
    fused: str = ""  # the norms and activation that its block absorbs
    error: float | None = None
    error_low: float | None = None
    error_high: float | None = None
    limit: float | None = None


class RejectedFor(Struct, frozen=True):
    """One reason, and the sites and roles it was given at."""

    reason: str
    count: int
    where: tuple[str, ...]  # the first of these places


class Rejection(Struct, frozen=True):
    """Kernels that were refused for the same reasons at the same places, and those reasons."""

    kernels: tuple[str, ...]
    count: int  # of refusals of all these kernels
    reasons: tuple[RejectedFor, ...]


class Histogram(Struct, frozen=True):
    """The share of a tensor's values in each binade [2^first, 2^(first+1)), [2^(first+1), …); the rest are exact zeros."""

    first: int
    shares: tuple[float, ...]
    zeros: float
    below: float  # the upper end of the last binade: no |value| was larger


class SiteDistribution(Struct, frozen=True):
    site: str
    format: str  # in which the plan casts x; the device's usual one if it does not
    x: Histogram | None = None
    dy: Histogram | None = None
    notes: tuple[str, ...] = ()


class FormatRange(Struct, frozen=True):
    """An 8-bit format, in binades below its largest value. A tensorwise scale puts that at the tensor's largest."""

    name: str
    normal: float  # down to here values keep all the format's bits
    flush: float  # further down they become zero


class FindingCard(Struct, frozen=True):
    message: str
    site: str = ""
    kind: str = ""
    numbers: str = ""
    remedy: str = ""


class Curve(Struct, frozen=True):
    name: str
    steps: tuple[int, ...]
    log_loss: tuple[float, ...]


class CurveDifference(Struct, frozen=True):
    """Relative change of log-loss in %, window by window; from the second on, the mean so far with its 95 % interval."""

    steps: tuple[int, ...]
    change: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


class Curves(Struct, frozen=True):
    curves: tuple[Curve, ...]
    best: Curve | None = None  # what the data's own generator would reach
    difference: CurveDifference | None = None  # of the planned twin from the high-precision one
    other: CurveDifference | None = None  # of a twin in another high precision
    other_name: str = ""


class TimeBar(Struct, frozen=True):
    kind: str
    high_us: float
    planned_us: float
    is_idle: bool = False  # time in which the device waits


class TimeBars(Struct, frozen=True):
    """A batch before and after, split by kind of work."""

    goal: str
    batch_size: int
    high_us: float
    planned_us: float
    speedup: str
    kinds: tuple[TimeBar, ...]


class Page(Struct, frozen=True):
    title: str
    headline: str
    summary: tuple[str, ...]
    tiles: tuple[Tile, ...] = ()
    missing: tuple[MissingPart, ...] = ()
    goal: str = ""
    site_map: SiteMap | None = None
    plan: tuple[PlanRow, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    distributions: tuple[SiteDistribution, ...] = ()
    formats: tuple[FormatRange, ...] = ()
    findings: tuple[FindingCard, ...] = ()
    curves: Curves | None = None
    times: tuple[TimeBars, ...] = ()
    uncovered: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    high_precision: str = "high precision"  # fp32, bf16, …
