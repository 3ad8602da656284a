"""From a run to the page: gather what it shows, and put that into one HTML file with style and script."""

from importlib import resources

import msgspec

from loka.core.comparison import WAITING, Comparison, TimePair, other_precision
from loka.core.environment import Environment
from loka.core.plan import Goal
from loka.core.recipe import Format, Transform
from loka.core.site_record import Finding
from loka.report.curves import draw_curves
from loka.report.distributions import draw_distributions, format_ranges
from loka.report.headline import headline, summarize, tiles
from loka.report.page_data import FindingCard, Page, TimeBar, TimeBars
from loka.report.plan_view import draw_map, list_plan, list_rejected
from loka.report.run import Run
from loka.report.words import number, times_faster

SCRIPTS = ("dom.js", "scales.js", "site_map.js", "plan_table.js", "distributions.js", "curves.js", "times.js", "page.js")


def gather_page(run: Run) -> Page:
    """Everything the page shows of ``run``."""
    high = str(dtype) if (dtype := _dtype(run)) else "high precision"
    return Page(
        title=run.comparison.model if run.comparison else run.path.resolve().name.encode(errors="replace").decode(),
        headline=headline(run),
        summary=summarize(run),
        tiles=tiles(run),
        missing=run.missing,
        goal=str(run.plan.goal) if run.plan else "",
        site_map=draw_map(run.plan, run.survey) if run.plan else None,
        plan=list_plan(run.plan, run.survey) if run.plan else (),
        rejected=list_rejected(run.plan) if run.plan else (),
        distributions=draw_distributions(run.record, run.plan) if run.record else (),
        formats=format_ranges() if run.record else (),
        findings=_findings(run),
        curves=draw_curves(run.training, high, str(other_precision(dtype)) if dtype else ""),
        times=_time_bars(run.comparison) if run.comparison else (),
        uncovered=_uncovered(run),
        environment=_environment(run),
        high_precision=high,
    )


def render_page(page: Page) -> str:
    """One HTML file that needs no other: data, style and script are inside."""
    folder = resources.files("loka.report") / "page"
    texts = {name: (folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", *SCRIPTS)}
    # With "<", a site's name could close the script that it is written into. In a JSON string the escape means the same.
    data = msgspec.json.encode(page).decode().replace("<", "\\u003c")
    parts = {"STYLE": texts["page.css"], "DATA": data, "SCRIPT": "\n".join(texts[name] for name in SCRIPTS)}
    html, *pieces = texts["page.html"].split("/*LOKA:")
    for piece in pieces:
        name, _, rest = piece.partition("*/")
        html += parts[name] + rest
    return html


def _dtype(run: Run) -> Format | None:
    return next((part.dtype for part in (run.plan, run.survey, run.comparison, run.record) if part), None)


def _findings(run: Run) -> tuple[FindingCard, ...]:
    """The Record's findings, which have a site and a remedy; without a Record the Survey's, which are only text."""
    if run.record:
        return tuple(_card(finding) for finding in run.record.findings)
    return tuple(FindingCard(text) for text in run.survey.findings) if run.survey else ()


def _card(finding: Finding) -> FindingCard:
    numbers = ", ".join(f"{name.replace('_', ' ')} {number(value)}" for name, value in finding.numbers.items())
    return FindingCard(finding.message, finding.site, finding.kind.replace("_", " "), numbers, _remedy(finding.remedy))


def _remedy(name: str | None) -> str:
    """What to do: transforms are chosen by the planner, Mods are applied by the user."""
    if name is None:
        return ""
    if name in list(Transform):
        measured = "`loka measure` tries it, and the plan uses it where it pays off."
        return f"The transform {name} fixes this without retraining. {measured}"
    return f'The Mod {name} fixes this: call loka.apply_mods(model, ["{name}"]) before training.'


def _uncovered(run: Run) -> tuple[str, ...]:
    if run.survey and run.survey.ceiling:
        return run.survey.ceiling.uncovered
    return run.record.uncovered if run.record else ()


def _time_bars(comparison: Comparison) -> tuple[TimeBars, ...]:
    return tuple(
        TimeBars(
            goal="training step" if pair.goal is Goal.TRAINING else "serving",
            batch_size=pair.batch_size,
            high_us=pair.high_us,
            planned_us=pair.planned_us,
            speedup=times_faster(pair.speedup.mean),
            kinds=_kinds(pair),
        )
        for pair in comparison.times
    )


def _kinds(pair: TimePair) -> tuple[TimeBar, ...]:
    """Kinds of work that both twins do, longest first; then those of one twin; last the time that the device waits."""
    high, planned = pair.high_by_kind, pair.planned_by_kind
    bars = [TimeBar(kind, high.get(kind, 0.0), planned.get(kind, 0.0), kind == WAITING) for kind in {**high, **planned}]
    return tuple(sorted(bars, key=lambda bar: (bar.is_idle, not (bar.high_us and bar.planned_us), -bar.high_us)))


def _environment(run: Run) -> tuple[tuple[str, str], ...]:
    documents = (run.comparison, run.plan, run.survey, run.record)
    environment: Environment | None = next((document.environment for document in documents if document), None)
    if environment is None:
        return ()
    fingerprint = next(document.fingerprint for document in documents if document)
    rows = [("device", environment.device), ("LoKA", environment.loka), *environment.libraries.items()]
    rows += [("CUDA", environment.cuda)] if environment.cuda else []
    rows += [("times", "of a model under torch.compile")] if run.survey and run.survey.compiled else []
    rows += [("Python", environment.python), ("measured", environment.date), ("fingerprint of the model", fingerprint)]
    return tuple(rows)
