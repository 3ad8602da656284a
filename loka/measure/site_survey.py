"""One site's lines of the Survey: which options are able, their errors, and the times of their parts."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch

from loka.core.gemm import SOURCES, Role, TensorName, by_frequency
from loka.core.recipe import Format, Transform
from loka.core.site_record import NOT_FINITE, Finding, SiteRecord
from loka.core.survey import Candidate, CastTime, SiteSurvey, Times
from loka.kernels.contract import is_oracle
from loka.kernels.operand import Form
from loka.measure.block import Blocks
from loka.measure.error import OptionError, measure_errors, on_device, vector_of
from loka.measure.parts import SHARERS, Option, is_worth_sharing
from loka.measure.speed import Speeds, TimedShape
from loka.numerics.formats import torch_dtype

MOST_ROW_COUNTS = 6  # of a site, the most frequent: the planner takes the nearest above for the others
UNHEALTHY = 0.1  # mere_floored of a healthy e4m3 site is 0.08: past this a transform may help
NEVER_CALLED = "never called while the Probe looked, or with no rows"
NOTHING_LEARNED = "every row that the Probe saw here was NaN or infinite: probe a model that computes numbers"
WORTH_TIMING = 0.5  # of the gate: an option past it is not timed, so no limit on the error lets it in


@dataclass(frozen=True)
class Bench:
    """What the measurement of every site shares."""

    kernels: tuple[str, ...]  # the baseline first
    dtype: Format
    device: torch.device
    speeds: Speeds
    blocks: Blocks
    findings: tuple[Finding, ...] = ()
    failed: Mapping[tuple[Option, int, int], str] = field(default_factory=dict)  # in trial: by option, K and N
    budgets_s: Mapping[str, float] = field(default_factory=dict)  # for the errors of each site; unlimited if not given

    @property
    def baseline(self) -> str:
        return self.kernels[0]

    def budget_s(self, site: SiteRecord) -> float:
        return self.budgets_s.get(site.name, math.inf)


def survey_site(site: SiteRecord, bench: Bench) -> SiteSurvey:
    """Everything the Survey says of one site."""
    if not site.was_called or not site.calls:
        return _site_survey(site, bench, (), (), notes=(_why_nothing_is_known(site),))
    site = on_device(site, bench.device)
    shapes = {m: TimedShape.of(site, m, bench.dtype, compiled=bench.speeds.compiled) for m in row_counts(site)}
    errors: dict[Option, OptionError] = {}
    able = []
    for option in plain_options(site, bench.kernels):
        reason = bench.failed.get((option, site.k, site.n)) or _refusal(option, shapes, bench.speeds)
        if reason:
            errors[option] = OptionError(why_not=reason)
        else:
            able.append(option)
    errors |= measure_errors(site, able, bench.dtype, bench.device, bench.budget_s(site))
    transformed = [
        Option(option.kernel, option.role, transform)
        for transform in suggested_transforms(site, errors, bench.findings)
        for option in able
        if option.is_8bit and errors[option].why_not is None and _is_touched(option.role, transform)
    ]
    errors |= measure_errors(site, transformed, bench.dtype, bench.device, bench.budget_s(site))
    timed = [option for option, error in errors.items() if is_worth_timing(option, error, bench.baseline)]
    times, failed = _product_times(timed, shapes, bench)
    casts, failed_casts = _cast_times([option for option in timed if times[option]], errors, shapes, bench.speeds)
    failed = {option: why for option in timed for why in _why_its_casts_failed(option, failed_casts)} | failed
    candidates = tuple(_candidate(option, error, times.get(option, {}), failed.get(option)) for option, error in errors.items())
    bench.speeds.release()
    return _site_survey(site, bench, candidates, casts)


def row_counts(site: SiteRecord) -> list[int]:
    """The M to time at: the most frequent, and the largest, for which nothing above could stand in."""
    return sorted({*by_frequency(site.calls)[:MOST_ROW_COUNTS], max(site.calls)})


def plain_options(site: SiteRecord, kernels: Iterable[str]) -> list[Option]:
    return [Option(kernel, role) for kernel in kernels for role in site.roles]


def suggested_transforms(
    site: SiteRecord, errors: Mapping[Option, OptionError], findings: Iterable[Finding]
) -> list[Transform]:
    """Those that a finding names; all where at fprop or wgrad no 8-bit option is healthy, or in fprop each silences features.
    None that would change nothing."""
    named = {finding.remedy for finding in findings if finding.site == site.name}
    best = {
        role: min((error.gate for option, error in errors.items() if option.role is role and option.is_8bit), default=math.inf)
        for role in site.roles
        if role is not Role.DGRAD
    }
    heard = [error.silenced for option, error in errors.items() if option.role is Role.FPROP and option.is_8bit]
    is_unhealthy = any(UNHEALTHY < gate < math.inf for gate in best.values()) or min(heard, default=0.0) > 0
    wanted = [t for t in (Transform.CENTER, Transform.RESCALE) if is_unhealthy or t.value in named]
    return [transform for transform in wanted if _changes_something(site, transform)]


def is_worth_timing(option: Option, error: OptionError, baseline: str) -> bool:
    """The oracle has no time of its own, and what no plan can choose needs none."""
    if error.why_not is not None or is_oracle(option.kernel):
        return False
    return option.kernel == baseline or error.gate < WORTH_TIMING


def _changes_something(site: SiteRecord, transform: Transform) -> bool:
    vector_K = vector_of(site, transform)
    return bool(vector_K.any() if transform is Transform.CENTER else (vector_K != vector_K[0]).any())


def _is_touched(role: Role, transform: Transform) -> bool:
    """Centering x leaves dgrad, which does not read x, as it is."""
    return transform is Transform.RESCALE or role is not Role.DGRAD


def _refusal(option: Option, shapes: Mapping[int, TimedShape], speeds: Speeds) -> str | None:
    """Why the option takes none of the shapes, or None."""
    reasons = [speeds.refusal(option, shape) for shape in shapes.values()]
    return None if None in reasons else reasons[-1]


def _product_times(
    options: Sequence[Option], shapes: Mapping[int, TimedShape], bench: Bench
) -> tuple[dict[Option, Times], dict[Option, str]]:
    """By option and M; an M that the kernel refuses is left out. And the failures: nothing would keep a model from running a
    kernel where it fails, so that one has no times at all. (The baseline is what the model runs: it keeps those it has.)"""
    times: dict[Option, Times] = {option: {} for option in options}
    failed: dict[Option, str] = {}
    for m, shape in shapes.items():
        able = [option for option in options if bench.speeds.refusal(option, shape) is None]
        for option, time in bench.speeds.products_us(able, shape).items():
            if isinstance(time, str):
                failed[option] = f"{time} (at {m} rows)"
            else:
                times[option][m] = time
    failed = {option: why for option, why in failed.items() if option.kernel != bench.baseline or not times[option]}
    return times | {option: {} for option in failed}, failed


def _why_its_casts_failed(option: Option, failed: Mapping[tuple[TensorName, Form], str]) -> Iterator[str]:
    for source, form in zip(SOURCES[option.role], option.forms, strict=True):
        if why := failed.get((source.tensor, form)):
            yield f"{why}, its cast of {source.tensor} to {form.key}"


def _candidate(option: Option, error: OptionError, times: Times, failure: str | None) -> Candidate:
    why_not = error.why_not or failure
    estimates = error.estimates()
    if why_not is None and not estimates:
        why_not = "its error is not a number"
    return Candidate(
        kernel=option.kernel,
        role=option.role,
        recipe=str(option.recipe),
        transform=option.transform,
        why_not=why_not,
        error=estimates if why_not is None else {},
        flushed=error.flushed,
        saturated=error.saturated,
        silenced=error.silenced,
        forms=tuple(form.key for form in option.forms),
        gemm_us=times if why_not is None else {},
    )


def _cast_times(
    options: Sequence[Option], errors: Mapping[Option, OptionError], shapes: Mapping[int, TimedShape], speeds: Speeds
) -> tuple[tuple[CastTime, ...], dict[tuple[TensorName, Form], str]]:
    """The casts that a choice of these options can ask for: each form, and pairs of forms of two roles that share a tensor. And
    the failures of single forms. What failed at any M has no times."""
    casts = []
    failed: dict[tuple[TensorName, Form], str] = {}
    for name in TensorName:
        by_set: dict[tuple[Form, ...], Times] = {}
        in_step: dict[tuple[Form, ...], Times] = {}
        broken: set[tuple[Form, ...]] = set()
        for m, shape in shapes.items():
            sets = _cast_sets(name, options, errors, shape, speeds)
            for forms, time in speeds.casts_us(name, sets, shape).items():
                if not isinstance(time, str):
                    by_set.setdefault(forms, {})[m] = time
                    continue
                broken.add(forms)
                if len(forms) == 1:
                    failed[name, forms[0]] = f"{time} (at {m} rows)"
            if name is TensorName.W and not in_step:  # a weight's casts do not depend on M
                in_step = {forms: {m: time} for forms, time in speeds.in_step_us(sets, shape).items()}
        for forms, times in by_set.items():
            if forms not in broken:
                casts.append(CastTime(name, tuple(sorted(form.key for form in forms)), times, in_step.get(forms, {})))
    return tuple(casts), failed


def _cast_sets(
    name: TensorName, options: Sequence[Option], errors: Mapping[Option, OptionError], shape: TimedShape, speeds: Speeds
) -> list[tuple[Form, ...]]:
    stored = shape.weight_dtype if name is TensorName.W else shape.dtype
    by_role: dict[Role, dict[Form, None]] = {role: {} for role in SHARERS[name]}

    def is_compiled(form: Form) -> bool:
        return speeds.is_compiled(name, form, shape)

    def waits(option: Option) -> bool:
        read = zip(SOURCES[option.role], option.forms, strict=True)
        return any(speeds.is_compiled(source.tensor, form, shape) for source, form in read)

    for option in options:
        form = option.form_of(name)
        if form is None or _is_free(form, stored):
            continue
        if not (is_compiled(form) and _is_matched(option, errors, waits)):
            by_role[option.role][form] = None
    first, second = (list(forms) for forms in by_role.values())
    # Casts that torch compiles are timed one by one: a compilation for every pair would take minutes.
    paired = [[form for form in forms if not is_compiled(form)] for forms in (first, second)]
    pairs = [(a, b) for a, b in product(*paired) if is_worth_sharing(a, b)]
    return [*((form,) for form in dict.fromkeys((*first, *second))), *pairs]


def _is_free(form: Form, stored: Format) -> bool:
    """A tensor in high precision read as it is stored: at most a view."""
    same_dtype = torch_dtype(form.spec.format) is torch_dtype(stored)
    return same_dtype and form.transform is Transform.NONE and not form.spec.format.is_8bit


def _is_matched(option: Option, errors: Mapping[Option, OptionError], waits: Callable[[Option], bool]) -> bool:
    """Whether another kernel is as accurate by casts that nobody waits for: then this one's are not worth compiling."""
    return any(
        error.gate <= errors[option].gate
        for other, error in errors.items()
        if (other.role, other.transform) == (option.role, option.transform) and other.is_8bit and not waits(other)
    )


def _why_nothing_is_known(site: SiteRecord) -> str:
    if not site.calls:
        return NEVER_CALLED
    if NOT_FINITE in site.notes or site.stays is None:
        return NOTHING_LEARNED
    return site.stays  # such as a layer in a dtype that nothing is compared with


def _site_survey(
    site: SiteRecord,
    bench: Bench,
    candidates: tuple[Candidate, ...],
    casts: tuple[CastTime, ...],
    notes: tuple[str, ...] = (),
) -> SiteSurvey:
    return SiteSurvey(
        site=site.name,
        k=site.k,
        n=site.n,
        has_bias=site.has_bias,
        is_head=site.is_head,
        calls=site.calls,
        baseline=bench.baseline,
        candidates=candidates,
        casts=casts,
        blocks=bench.blocks.survey(site, row_counts(site), bench.budget_s(site)) if candidates else (),
        producer=site.producer,
        notes=(*site.notes, *notes),
        stays=site.stays,
        stays_serving=site.stays_serving,
        read_by=site.read_by,
        feeds_product=site.feeds_product,
    )
