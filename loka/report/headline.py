"""The answer first: one sentence and a few large numbers, from the last stage that was reached."""

from collections import Counter

from loka.core.comparison import Comparison, QualityPair, TimePair, other_precision
from loka.core.plan import Goal, PlanDocument, SitePlan
from loka.core.survey import Ceiling
from loka.report.page_data import Tile
from loka.report.plan_view import shares
from loka.report.run import Run
from loka.report.words import NBSP, change_percent, duration, percent, times_faster

NEUTRAL = 0.0002  # a relative change of log-loss that recommendation teams call significant


def headline(run: Run) -> str:
    """What was measured of the whole model; without that, what the plan promises; otherwise how far the run has come."""
    if run.comparison and run.comparison.times:
        best = main_times(run.comparison, run.plan)
        quality = next((pair for pair in run.comparison.quality if pair.goal is best.goal), None)
        return _speed_words(best) + (f" at {change_percent(quality.change)} log-loss" if quality else "")
    if run.plan:
        if not any(run.plan.moves(site) for site in run.plan.sites):
            return f"All {len(run.plan.sites)} sites stay in {run.plan.dtype}: {_why_nothing_moves(run)}"
        speedup = times_faster(planned_speedup(run.plan))
        return f"The plan puts {run.plan.count_moved()}, and promises {speedup} over all sites"
    if run.survey:
        return f"{len(run.survey.sites)} sites measured, no plan yet"
    if run.record:
        return f"{len(run.record.sites)} sites probed, nothing measured yet"
    return "Nothing measured yet"


def main_times(comparison: Comparison, plan: PlanDocument | None) -> TimePair:
    """The times for the plan's own goal, or the first where those were not taken."""
    goals = {pair.goal: pair for pair in comparison.times}
    return goals.get(plan.goal if plan else Goal.SERVING, comparison.times[0])


def planned_speedup(plan: PlanDocument) -> float:
    """The speed-up of all sites together, casts included, by the Survey's times."""
    after = sum(site.time_us for site in plan.sites)
    return sum(site.baseline_us for site in plan.sites) / after if after else 1.0


def summarize(run: Run) -> tuple[str, ...]:
    """A few sentences below the headline."""
    sentences = []
    if run.comparison and run.comparison.quality:
        sentences.append(_comparison_words(run.comparison))
    if run.plan:
        sentences.append(_plan_words(run.plan))
    if run.survey and run.survey.ceiling:
        sentences.append(_ceiling_words(run.survey.ceiling))
    return tuple(sentences)


def _ceiling_words(ceiling: Ceiling) -> str:
    step = f"the {duration(ceiling.step_us)} step that was probed"
    if ceiling.covered >= 0.995:
        return f"Sites and blocks take nearly all of {step}."
    most = f"If they took no time at all, the step would be at most {1 / (1 - ceiling.covered):.1f}× as fast."
    return f"Sites and blocks take {percent(ceiling.covered)} of {step}. {most}"


def _comparison_words(comparison: Comparison) -> str:
    sentences = [f"{comparison.model}, compared with the same model in {comparison.dtype}."]
    for pair in comparison.quality:
        if pair.goal is Goal.SERVING:
            sentences.append(f"Serving: the same weights in both, {pair.examples:,} held-out examples.")
        else:
            other = f" ({other_precision(comparison.dtype)}: {change_percent(pair.other)})" if pair.other else ""
            steps = f"{comparison.training_steps:,} steps each on the same batches"
            sentences.append(f"Training: {steps}, log-loss {change_percent(pair.change)}{other}.")
    return " ".join(sentences)


def _plan_words(plan: PlanDocument) -> str:
    low = [site for site in plan.sites if site.is_low_precision]
    share = sum(shares(plan)[site.site] for site in low)
    limits = f"error at most {max(plan.max_error.values()):g}, speed-up at least {plan.min_speedup:g}×, casts included"
    moved = f"{len(low)} of {len(plan.sites)} sites ({percent(share)} of all sites' time)"
    exact = sum(map(plan.moves, plan.sites)) - len(low)
    others = f", and {exact} to another kernel in it" if exact else ""
    return f"The plan for {plan.goal} moves {moved} out of {plan.dtype}{others}. Limits: {limits}."


def tiles(run: Run) -> tuple[Tile, ...]:
    found = []
    if run.comparison:
        for pair in run.comparison.times:
            label = "training step" if pair.goal is Goal.TRAINING else "serving"
            note = f"{duration(pair.high_us)} → {duration(pair.planned_us)} a batch of {pair.batch_size:,}"
            spread = (pair.speedup.high - pair.speedup.low) / 2
            found.append(Tile(label, times_faster(pair.speedup.mean), f"± {spread:.2f}; {note}", pair.speedup.low > 1))
        found += [_quality_tile(pair) for pair in run.comparison.quality]
    if run.plan:
        low = [site for site in run.plan.sites if site.is_low_precision]
        share = sum(shares(run.plan)[site.site] for site in low)
        note = f"{percent(share)} of the sites' time{_kernels_chosen(low)}"
        found.append(Tile("sites in low precision", f"{len(low)} of {len(run.plan.sites)}", note))
        if any(map(run.plan.moves, run.plan.sites)) and not run.comparison:  # a comparison of whole models says more
            note = "sum of their GEMMs and casts, each measured separately"
            found.append(Tile("all sites, by the plan", times_faster(planned_speedup(run.plan)), note, True))
    return tuple(found)


def _quality_tile(pair: QualityPair) -> Tile:
    """Bad where the loss is known to have risen, and by more than ``nothing``; good where it is known to have risen by no more.
    ``nothing`` is a change that teams do not count, or as much as another high precision may change."""
    value, _, spread = change_percent(pair.change).partition(f" ±{NBSP}")
    note = f"± {spread}; {pair.high_log_loss:.5f} → {pair.planned_log_loss:.5f}"
    nothing = max(NEUTRAL, abs(pair.other.low), abs(pair.other.high)) if pair.other else NEUTRAL
    is_worse = pair.change.low > 0 and pair.change.mean > nothing
    is_known_good = pair.change.high <= nothing
    return Tile(f"log-loss, {pair.goal}", value, note, False if is_worse else is_known_good or None)


def _why_nothing_moves(run: Run) -> str:
    others = [c for site in run.survey.sites for c in site.candidates if c.kernel != site.baseline] if run.survey else []
    if others and all(candidate.why_not for candidate in others):
        return "no low-precision kernel can run here"
    of_all = f", of the kernels to plan from ({', '.join(run.plan.kernels)})" if run.plan and run.plan.kernels else ""
    return f"nothing was both safe and faster{of_all}"


def _kernels_chosen(sites: list[SitePlan]) -> str:
    """The kernels that were chosen, most sites first."""
    chosen = Counter(kernel for site in sites for kernel in {choice.kernel for choice in site.kernels.values() if choice.error})
    names = ", ".join(name for name, _ in chosen.most_common(2))
    more = f" and {len(chosen) - 2} more" if len(chosen) > 2 else ""
    return f"; {names}{more}" if names else ""


def _speed_words(pair: TimePair) -> str:
    what, speed = "Training" if pair.goal is Goal.TRAINING else "Serving", times_faster(pair.speedup.mean)
    if pair.speedup.low > 1:
        return f"{what} {speed} as fast"
    if pair.speedup.high < 1:
        return f"{what} slower ({speed} the speed)"
    return f"{what} as fast as before ({speed})"
