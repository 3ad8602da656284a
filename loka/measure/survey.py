"""``measure``: from a Record the Survey. Ceiling first, then every site: errors, times, blocks; written after each of them."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch

from loka.core.environment import Environment, current_environment
from loka.core.errors import InvalidInput, KernelUnavailable, require_kind
from loka.core.gemm import Role
from loka.core.locking import alone_in
from loka.core.names import given_names, matching
from loka.core.progress import Progress, Silent
from loka.core.recipe import Format, Transform
from loka.core.record import Record
from loka.core.site_record import SiteRecord
from loka.core.survey import BLOCK_KERNEL, GATE, SiteSurvey, Survey, SurveyDocument
from loka.kernels.contract import KERNELS, is_oracle
from loka.kernels.device import device_named, device_of
from loka.measure.amid_model import require_compiler
from loka.measure.block import Blocks, block_shape, is_fused
from loka.measure.block_parts import BlockShape
from loka.measure.ceiling import describe_ceiling, measure_ceiling, with_blocks
from loka.measure.error import BrokenDevice, budgets_s, sample_rows, usual_rows, vector_of
from loka.measure.partial import Partial, identity_of
from loka.measure.parts import Option, baseline_kernel
from loka.measure.site_survey import Bench, plain_options, row_counts, survey_site
from loka.measure.speed import Speeds, TimedShape
from loka.measure.trial import (
    AnyTrial,
    BlockTrial,
    Trial,
    children_for,
    needs_trial,
    one_triton_cache,
    try_kernels,
)

# By the format a model runs in, the formats it has given up for it: more exact, and slower.
WIDER = {Format.FP32: (), Format.TF32: (Format.FP32,), Format.BF16: (Format.FP32, Format.TF32)}


def measure(
    record: Record,
    *,
    kernels: Iterable[str] | None = None,
    device: str | torch.device | None = None,
    compiled: bool = False,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Survey:
    """Measure every able kernel at every site and role of ``record``: its error on what was learned there, its times here.

    ``kernels`` are names or patterns, by default all that make sense on the device; ``device`` is by default the GPU if there
    is one. ``compiled`` is for a model that serves under torch.compile on a CPU: forward is timed as it is compiled amid other
    operations, which takes most of the casts' time away. On a GPU, times hold for compiled models anyway. With a folder
    ``out``, results are written after every site and a measurement that was interrupted goes on; the finished Survey is saved
    there. A kernel that raises, hangs or returns nonsense is listed with its reason; should one break the GPU for this
    process, ``BrokenDevice`` is raised, and the next call with the same ``out`` goes on without it. ``progress``, such as
    ``loka.core.progress.for_this_output()``, shows every site; without it the call is silent.
    """
    require_kind(record, Record, "the record", "load it with loka.Record.load(run)")
    where = device_named(str(device or "auto"))
    names = chosen_kernels(record, kernels, where)
    environment = current_environment(device_of(where))
    compiled = compiled and where.type == "cpu"
    if compiled:
        require_compiler()
    with nullcontext() if out is None else alone_in(out):
        partial = Partial(None if out is None else Path(out), identity_of(record, names, environment, compiled=compiled))
        outside = torch.autocast(where.type, enabled=False)  # under it baseline and reference would run in its dtype
        with progress or Silent() as shown, one_triton_cache(where.type), outside:
            document = _measure(record, names, Speeds(where, compiled=compiled), environment, partial, shown)
        survey = Survey(document, _vectors(record, document))
        if out is not None:
            survey.save(out)
            partial.remove()
    return survey


def chosen_kernels(record: Record, kernels: Iterable[str] | None, device: torch.device) -> tuple[str, ...]:
    """The baseline first, then by default all that may be faster; the oracle's on a CPU alone, where some recipes' errors are
    known by it only."""
    if not record.sites:
        raise InvalidInput("the record has no site: probe a model with linear layers")
    baseline = baseline_kernel(record.dtype)
    if baseline not in KERNELS:
        raise InvalidInput(f"the model's GEMMs run in {record.dtype}, for which there is no baseline: use bf16, tf32 or fp32")
    if kernels is None:
        wider = {baseline_kernel(format) for format in WIDER[record.dtype]}
        names = [name for name in KERNELS.names() if name not in wider]
        names = [name for name in names if device.type == "cpu" or not is_oracle(name)]
    else:
        given = given_names(kernels, "kernels", "names of kernels, or patterns")
        names = [name for one in given for name in matching(one, KERNELS.names()) or [KERNELS.get(one).name]]
        _require_one(names, device)
    return tuple(dict.fromkeys((baseline, *names)))


def _require_one(names: list[str], device: torch.device) -> None:
    """Refuse names of which none can run here: a Survey of nothing would take the place of one that is there."""
    if not names:
        raise InvalidInput("no kernel is named: name some, or leave `kernels` out for all that make sense here")
    where = device_of(device)
    missing = {name: why for name in names if (why := KERNELS.get(name).missing(where))}
    if len(missing) == len(set(names)):
        reasons = "; ".join(f"{name}: {why}" for name, why in missing.items())
        raise KernelUnavailable(
            f"none of the kernels that were named can run on {where}: {reasons}. `loka kernels` lists what can"
        )


def _measure(
    record: Record, names: tuple[str, ...], speeds: Speeds, environment: Environment, partial: Partial, shown: Progress
) -> SurveyDocument:
    device = speeds.device
    ceiling = measure_ceiling(record, speeds, names[0], environment)
    shown.say(describe_ceiling(ceiling, record))
    done = partial.sites
    todo = [site for name, site in record.sites.items() if name not in done]
    failed, failed_blocks = _failed_trials(record, todo, names, device, speeds, partial, shown)
    blocks = Blocks(record.dtype, device, partial.left_out.get(BLOCK_KERNEL), failed_blocks)
    budgets = budgets_s(record.sites.values(), device)
    bench = Bench(names, record.dtype, device, speeds, blocks, record.findings, failed, budgets)
    shown.start(len(record.sites), len(done))
    for site in todo:
        try:
            lines = survey_site(site, bench)
        except BrokenDevice as broken:
            partial.leave_out(broken.kernel, str(broken))
            raise BrokenDevice(
                broken.kernel,
                f"{broken}, at site {site.name}. Measure again, with the same folder: it goes on without {broken.kernel}",
            ) from broken
        partial.add(lines)
        shown.advance(_line(lines))
    surveyed = tuple(partial.sites[name] for name in record.sites)
    return SurveyDocument(
        fingerprint=record.fingerprint,
        environment=environment,
        dtype=record.dtype,
        sites=surveyed,
        ceiling=with_blocks(ceiling, surveyed),
        findings=tuple(f"{finding.site}: {finding.message}" for finding in record.findings),
        record=record.id,
        compiled=speeds.compiled,
    )


Place = tuple[Option, int, int]  # an option, and K and N of the layer


def _failed_trials(
    record: Record,
    sites: Iterable[SiteRecord],
    names: tuple[str, ...],
    device: torch.device,
    speeds: Speeds,
    partial: Partial,
    shown: Progress,
) -> tuple[dict[Place, str], dict[BlockShape, str]]:
    """What failed, in a process of its own or in an earlier attempt: kernels by option and shape of the layer, and blocks."""
    called = [site for site in sites if site.was_called and site.calls]
    left_out = {
        (option, site.k, site.n): partial.left_out[option.kernel]
        for site in called
        for option in plain_options(site, names)
        if option.kernel in partial.left_out
    }
    blocks = [
        BlockTrial(block_shape(site, m, record.dtype), str(device), _error_rows(site, device))
        for site in called
        if BLOCK_KERNEL not in partial.left_out and is_fused(site, record.dtype, device)
        for m in row_counts(site)
    ]
    left = tuple(name for name in names if name not in partial.left_out)
    places = {
        trial: (Option(trial.kernel, trial.role), site.k, site.n)
        for site in called
        for rows in {*row_counts(site), _error_rows(site, device)}
        for trial in _kernel_trials(site, TimedShape.of(site, rows, record.dtype), left, device, speeds)
    }
    trials: list[AnyTrial] = [*dict.fromkeys(blocks), *places]  # blocks in front, for they take longest
    if trials:
        kernels = _kernels({trial.kernel for trial in trials})
        shown.say(f"trying {kernels} at {len(trials)} problems in processes of their own")
    speeds.release()  # memory left from measuring the ceiling, or from looking for blocks: the children need it
    failures = try_kernels(trials, children=children_for(device.type))
    for kernel in dict.fromkeys(trial.kernel for trial in failures):
        shown.say(f"  {kernel}: {next(why for trial, why in failures.items() if trial.kernel == kernel)}")
    failed_blocks = {trial.shape: why for trial, why in failures.items() if isinstance(trial, BlockTrial)}
    failed = {places[trial]: why for trial, why in failures.items() if isinstance(trial, Trial)}
    return left_out | failed, failed_blocks


def _kernel_trials(
    site: SiteRecord, shape: TimedShape, names: tuple[str, ...], device: torch.device, speeds: Speeds
) -> Iterator[Trial]:
    """Trials of the site's options that can take the shape. Of kernels that read the same forms only one also tries pairs with
    the forms of others: a plan may mix them, and what is compiled for a pair of forms serves all."""
    options = plain_options(site, names)
    able = [option for option in options if needs_trial(option.kernel) and speeds.refusal(option, shape) is None]
    readers: dict[object, str] = {}
    for option in able:
        readers.setdefault(tuple(Option(option.kernel, role).forms for role in Role), option.kernel)
    beside = tuple(readers.values())
    transforms = (Transform.CENTER, Transform.RESCALE) if device.type == "cuda" else ()  # a CPU compiles nothing for them
    for option in able:
        module = type(KERNELS.get(option.kernel)).__module__
        others = beside if option.kernel in beside else ()
        yield Trial(
            option.kernel, module, option.role, shape.shape, shape.dtype, shape.weight_dtype, str(device), shape.has_bias,
            others, transforms, shape.cast_in_step,
        )  # fmt: skip


def _error_rows(site: SiteRecord, device: torch.device) -> int:
    """How many rows errors are taken from: on a GPU a kernel may be compiled for just that number. A CPU compiles none, so
    there it is the usual number."""
    return sample_rows(site, 0, device) if device.type == "cuda" else usual_rows(site)


def _vectors(record: Record, document: SurveyDocument) -> dict[str, torch.Tensor]:
    """The vectors of the transforms that were surveyed, as ``<site>/center`` and ``<site>/rescale``."""
    used = {
        (site.site, candidate.transform)
        for site in document.sites
        for candidate in site.candidates
        if candidate.transform is not Transform.NONE
    }
    return {f"{name}/{transform}": vector_of(record.sites[name], transform) for name, transform in sorted(used)}


def _line(site: SiteSurvey) -> str:
    """The site's best 8-bit kernel in fprop, or those of high precision beside the baseline, for the eye that watches."""
    fprop = [c for c in site.candidates if c.role is Role.FPROP and c.error and c.kernel != site.baseline]
    able = [c for c in fprop if Option(c.kernel, c.role).is_8bit]
    if not able and fprop:
        return f"{site.site}: {_kernels({c.kernel for c in fprop})} able, of high precision"
    if not able:
        return f"{site.site}: {site.notes[-1] if site.notes else 'no kernel is able'}"
    best = min(able, key=lambda candidate: candidate.error[GATE].mean)
    behind = f" behind {best.transform}" if best.transform is not Transform.NONE else ""
    count = _kernels({candidate.kernel for candidate in able})  # each once, however many transforms it was tried behind
    return f"{site.site}: {count} able, at best {GATE} {best.error[GATE].mean:.3g} ({best.recipe}{behind})"


def _kernels(names: set[str]) -> str:
    return "1 kernel" if len(names) == 1 else f"{len(names)} kernels"
