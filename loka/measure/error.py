"""The error of every option at a site, from samples of what the Probe learned, until it is known well enough.

Each option is held to the oracle of its recipe on the first sample: one that is far worse than its formats and scales
explain is faulty, whatever its own error says.
"""

import dataclasses
import math
import time
import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loka.core.errors import LokaError
from loka.core.estimate import Estimate
from loka.core.gemm import SOURCES, Role, TensorName, by_frequency
from loka.core.recipe import Accumulation, Format, Transform
from loka.core.site_record import SiteRecord
from loka.core.survey import GATE, Fault
from loka.kernels.contract import is_oracle
from loka.kernels.transforms import checked_vector
from loka.measure.factors import Correction, Factors
from loka.measure.failure import told
from loka.measure.fprop_correction import FpropCorrection
from loka.measure.oracle import Oracle
from loka.measure.parts import Option, SiteParts, SiteTensors
from loka.measure.wgrad_correction import WgradCorrection
from loka.numerics.formats import torch_dtype
from loka.numerics.metrics import ErrorReport, ErrorSamples

WATCHED = (GATE, "relative_rms")  # what must be known well, and be finite
TIGHT = 0.05  # the interval's half-width, relative to the mean,
HARMLESS = 0.01  # unless all of it lies below this
FEWEST_SAMPLES, MOST_SAMPLES = 3, 50
MOST_ROWS = 2048
CPU_PRODUCTS = 4e9  # multiplications of one sample: a core does about 1e10 a second
# For the errors of all sites, and for those of one, at least and at most: past it a site's intervals stay as wide as they are.
# What a site adds to its plain kernels, transforms and a block, has as much again each.
RUN_BUDGET_S = {"cuda": 60.0, "cpu": 180.0}
SITE_BUDGET_S = {"cuda": (0.1, 1.0), "cpu": (0.5, 3.0)}

# How much worse than its recipe's oracle an option may be: sums in fewer bits, casts that break ties another way.
ALLOWED_FACTOR, ALLOWED_MORE = 2.0, 0.02


class BrokenDevice(LokaError, RuntimeError):
    """A kernel left the GPU in a state in which nothing else runs; ``kernel`` is its name."""

    def __init__(self, kernel: str, message: str) -> None:
        super().__init__(message)
        self.kernel = kernel


LOST_SAMPLES = 10  # over which the shares of values that casts lose are averaged


@dataclass
class OptionError:
    """What was learned of one option; where ``why_not`` is set, nothing else counts."""

    samples: ErrorSamples = field(default_factory=ErrorSamples)
    why_not: str | None = None
    flushed: float = 0.0
    saturated: float = 0.0
    silenced: float = 0.0
    factors: Factors = field(default_factory=Factors)  # by which the errors of drawn rows are multiplied
    zeros: int = 0  # samples in which its exact output was 0 throughout: an error relative to that says nothing

    def add_lost(self, flushed: float, saturated: float, silenced: float) -> None:
        """Average in what one more sample's casts lost: a scale hangs on the largest value, which not every batch has."""
        weight = 1 / (len(self.samples) + 1)
        self.flushed += weight * (flushed - self.flushed)
        self.saturated += weight * (saturated - self.saturated)
        self.silenced += weight * (silenced - self.silenced)

    @property
    def is_known(self) -> bool:
        if self.why_not is not None or (self.zeros >= FEWEST_SAMPLES and not len(self.samples)):
            return True
        return len(self.samples) >= FEWEST_SAMPLES and all(
            self.samples.tight(metric, TIGHT) or self.samples.estimate(metric).high < HARMLESS for metric in WATCHED
        )

    def estimates(self) -> dict[str, Estimate]:
        """By metric, those that are numbers: a relative error where the reference is 0 is none."""
        if self.why_not is not None or not len(self.samples):
            return {}
        summary = {metric: self.factors.applied(metric, estimate) for metric, estimate in self.samples.summary().items()}
        return {metric: estimate for metric, estimate in summary.items() if math.isfinite(estimate.high)}

    @property
    def gate(self) -> float:
        """The mean by which options are compared; inf where there is none."""
        if self.why_not is not None or not len(self.samples):
            return math.inf
        return self.factors.applied(GATE, self.samples.estimate(GATE)).mean


def budgets_s(sites: Iterable[SiteRecord], device: torch.device) -> dict[str, float]:
    """How long the errors of each site may take, by its share of all multiplications, and so of a step's time."""
    products = {site.name: site.k * site.n * sum(m * calls for m, calls in site.calls.items()) for site in sites}
    total = sum(products.values()) or 1.0
    least, most = SITE_BUDGET_S[device.type]
    return {name: min(most, max(least, RUN_BUDGET_S[device.type] * own / total)) for name, own in products.items()}


def measure_errors(
    site: SiteRecord, options: Iterable[Option], dtype: Format, device: torch.device, budget_s: float = math.inf
) -> dict[Option, OptionError]:
    """The errors of ``options``, each tried in safety: one that raises or returns nonsense says so in its ``why_not``."""
    errors = {option: OptionError() for option in options}
    transforms = {option.transform for option in errors}
    samples = draw_tensors(site, len(errors), dtype, device, transforms)
    corrections = corrections_of(site)
    for index, tensors in enumerate(until_known(samples, errors.values(), budget_s)):
        unknown = [option for option, error in errors.items() if not error.is_known]
        parts = SiteParts(tensors)
        oracle = Oracle(parts)
        zeros = {role: is_zero(role, tensors) for role in {option.role for option in unknown}}
        for role, is_all_zeros in zeros.items():
            if role in corrections and not is_all_zeros:  # the Probe leaves batches without a gradient out too
                corrections[role].add(tensors)
        for option in unknown:
            if option.is_8bit and zeros[option.role]:
                errors[option].zeros += 1
                continue
            _add_sample(errors[option], option, parts, oracle if index < LOST_SAMPLES else None)
    for option, error in errors.items():
        if error.zeros and not len(error.samples) and error.why_not is None:
            error.why_not = f"{option.role} gave nothing but zeros while the Probe looked: probe more steps"
        if option.role in corrections and option.transform is Transform.NONE:
            error.factors = corrections[option.role].factors(option.recipe, len(error.samples))
    return errors


def is_zero(role: Role, tensors: SiteTensors) -> bool:
    """Whether the product of ``role`` is 0 throughout, as gradients behind a layer that starts at 0 are."""
    named = {TensorName.X: tensors.x, TensorName.DY: tensors.dy, TensorName.W: tensors.weights[0]}
    read = [named[source.tensor] for source in SOURCES[role]]
    return any(tensor is not None and not bool(tensor.any()) for tensor in read)


def corrections_of(site: SiteRecord) -> dict[Role, Correction]:
    """By the roles whose errors the Probe measured on real rows."""
    return {Role.FPROP: FpropCorrection(site), Role.WGRAD: WgradCorrection(site)}


def until_known(samples: Iterator[SiteTensors], errors: Collection[OptionError], budget_s: float) -> Iterator[SiteTensors]:
    """As many samples as it takes to know all ``errors``, within ``budget_s``, but FEWEST_SAMPLES in any case."""
    start = time.perf_counter()
    for index in range(MOST_SAMPLES):
        is_over = index >= FEWEST_SAMPLES and time.perf_counter() - start > budget_s
        if is_over or all(error.is_known for error in errors):
            return
        yield next(samples)


def draw_tensors(
    site: SiteRecord, n_options: int, dtype: Format, device: torch.device, transforms: Iterable[Transform] = ()
) -> Iterator[SiteTensors]:
    """Endless samples of the site's tensors in the model's dtype, the same in every run."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(site.name.encode()))
    rows = sample_rows(site, n_options, device)
    features = {transform: vector_of(site, transform).to(device) for transform in {*transforms} - {Transform.NONE}}
    weight = site.weight_NK.detach().to(device, torch_dtype(site.weight_format))
    while True:
        x, dy = site.sample(rows, generator)
        x, dy = (None if tensor is None else tensor.to(device, torch_dtype(dtype)) for tensor in (x, dy))
        assert x is not None
        yield SiteTensors(x, dy, [weight], features=features)


def on_device(site: SiteRecord, device: torch.device) -> SiteRecord:
    """The site with its statistics on ``device``, where drawing from them is prepared."""
    moved = {
        name: dataclasses.replace(statistic, tensors={key: tensor.to(device) for key, tensor in statistic.tensors.items()})
        for name, statistic in site.statistics.items()
    }
    return dataclasses.replace(site, statistics=moved)


def vector_of(site: SiteRecord, transform: Transform) -> Tensor:
    """The vector of a transform, as the Record knows it and the executor takes it."""
    return checked_vector(transform, site.mean_K if transform is Transform.CENTER else site.rescale_K, site.k)


def usual_rows(site: SiteRecord) -> int:
    """The M that the site is called with most often."""
    return by_frequency(site.calls)[0]


def sample_rows(site: SiteRecord, n_options: int, device: torch.device) -> int:
    """As many rows as the site is called with, where affordable. With fewer, wgrad averages less: its error is no smaller."""
    rows = min(usual_rows(site), MOST_ROWS)
    if device.type == "cuda":
        return rows
    products_a_row = (site.k + site.n) ** 2 + n_options * site.k * site.n  # to draw a row of x and dy, and to multiply it
    return min(rows, max(64, int(CPU_PRODUCTS / products_a_row)))


def _add_sample(error: OptionError, option: Option, parts: SiteParts, oracle: Oracle | None) -> None:
    try:
        report = parts.error(option)
    except Exception as failure:  # any library's any error: the reason is the result
        error.why_not = told(failure)
        require_device(option.kernel, parts.tensors.x.device, error.why_not)
        return
    if not all(math.isfinite(getattr(report, metric)) for metric in WATCHED):
        error.why_not = f"{Fault.RETURNED} NaN or inf"
        return
    if oracle is not None:
        if not len(error.samples):
            error.why_not = _why_nonsense(option, report, oracle)
            if error.why_not is not None:
                return
        error.add_lost(*oracle.lost(option), oracle.silenced(option))
    error.samples.add(report)


def _why_nonsense(option: Option, report: ErrorReport, oracle: Oracle) -> str | None:
    """Why a product cannot be what its recipe means, or None."""
    expected = report.relative_rms if is_oracle(option.kernel) else oracle.relative_rms(option)
    if report.relative_rms <= ALLOWED_FACTOR * expected + ALLOWED_MORE:
        return None
    is_fast = option.recipe.accumulation is Accumulation.FAST
    how = "loses in its short sums what they add up to" if is_fast else f"{Fault.RETURNED} nonsense"
    return f"{how}: relative RMS error {report.relative_rms:.3g}, where {option.recipe} gives {expected:.3g}"


def require_device(kernel: str, device: torch.device, reason: str) -> None:
    """Raise where ``kernel`` broke the GPU: after some failures every later call on it fails, until the process ends."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except Exception as failure:
        raise BrokenDevice(kernel, f"{kernel} broke the GPU for this process ({reason})") from failure
