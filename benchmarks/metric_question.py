"""Which error of a site says how much log-loss it costs? One site at a time in each 8-bit recipe, and rank correlations.

    python benchmarks/metric_question.py

A model is trained on the synthetic stream. Then one site at a time computes its fprop in one recipe, with all else in fp32, and
log-loss is compared with that of fp32 on the same held-out examples. Every metric is taken at that site on other batches. Two
are weighted by gradients: with g the gradient of an example's loss at the site's output and δ the error there, the loss changes
by E[g·δ] in first order, and for a calibrated model by ½·E[(g·δ)²] in second.

Labels are noisy, and that hides small changes. The stream's teacher knows every example's true probability, so changes are
given in expectation over labels; and, for comparison, on the labels that were drawn.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.core.environment import current_command, current_environment
from loka.core.results import markdown_table, write_results
from loka.data.batch import Batch
from loka.data.dataset import open_dataset
from loka.kernels.device import device_of
from loka.kernels.executor import SiteKernels
from loka.models.recommender import Recommender
from loka.nn.linear import LokaLinear
from loka.numerics.confidence import estimate_mean
from loka.numerics.metrics import METRICS, measure_error
from loka.train.config import TrainConfig
from loka.train.loop import train

FOLDER = Path(__file__).parent / "results"
MODELS = ("dcnv2", "wukong")
DENSE = ("log", "raw")  # raw counts suffer most in 8 bits
RECIPES = ("tensorwise", "rowwise", "blockwise", "static", "int8_tensorwise", "int8_rowwise")
SECOND_ORDER, BOTH_ORDERS = "½·E[(g·δ)²]", "E[g·δ] + ½·E[(g·δ)²]"
BATCH, OBSERVED = 2048, 8  # examples in a batch, batches on which the metrics are taken


@dataclass(frozen=True)
class Row:
    """One site in one recipe."""

    model: str
    dense: str  # how the stream gives its counts
    site: str
    recipe: str
    change: float  # of log-loss on the labels drawn
    change_error: float  # half of its 95 % interval over batches
    expected_change: float  # of log-loss over all labels, by the teacher's probabilities
    metrics: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batches", type=int, default=8, help=f"held-out batches of {BATCH}")
    arguments = parser.parse_args()
    rows = [
        row
        for model, dense in product(arguments.models, DENSE)
        for row in study(model, dense, arguments.preset, arguments.steps, arguments.batches)
    ]
    environment = current_environment(device_of(torch.device("cpu")))
    tables = correlations(rows) + "\n" + by_recipe(rows)
    paths = write_results(FOLDER, "metric-question", environment, current_command(), [asdict(row) for row in rows], tables)
    print(tables)
    print("\n".join(map(str, paths)))


def study(name: str, dense: str, preset: str, steps: int, n_batches: int) -> Iterator[Row]:
    stream: dict[str, str | float] = {"base_rate": 0.25, "dense": dense}
    config = TrainConfig(
        name,
        preset,
        data_options=stream,
        steps=steps,
        decay_steps=steps // 2,
        batch_size=512,
        device="cpu",
        log_every=10_000,
        out=None,
    )
    model = train(config).model.eval()
    data = open_dataset("synthetic", seed=config.seed, test_examples=(OBSERVED + n_batches) * BATCH, **stream)
    held_out = data.test(BATCH)
    observed, batches = list(islice(held_out, OBSERVED)), list(held_out)
    print(f"{name} {preset} on {dense} counts: trained {steps} steps, {n_batches * BATCH:,} held-out examples", flush=True)
    plain = [losses(model, batch) for batch in batches]
    for site, seen in observe(model, observed).items():
        for recipe in RECIPES:
            with in_recipe(model, site, recipe) as quantized:
                metrics = errors(quantized, seen)
                changes = [
                    tuple((after - before).mean().item() for after, before in zip(losses(model, batch), reference, strict=True))
                    for batch, reference in zip(batches, plain, strict=True)
                ]
            change = estimate_mean([drawn for drawn, _ in changes])
            expected = sum(expected for _, expected in changes) / len(changes)
            yield Row(name, dense, site, recipe, change.mean, change.high - change.mean, expected, metrics)


def losses(model: Recommender, batch: Batch) -> tuple[Tensor, Tensor]:
    """Each example's log-loss in float64: for the label drawn, and in expectation over labels."""
    with torch.no_grad():
        logit_B = model(batch).double()
    assert batch.teacher_logit_B is not None
    probability_B = batch.teacher_logit_B.double().sigmoid()
    loss = F.binary_cross_entropy_with_logits
    return loss(logit_B, batch.label_B.double(), reduction="none"), loss(logit_B, probability_B, reduction="none")


@dataclass(frozen=True)
class Call:
    """One call of a site: its input, and the gradient of each example's own loss at its output. First axis: examples."""

    x: Tensor
    gradient: Tensor


def observe(model: Recommender, batches: Sequence[Batch]) -> dict[str, list[Call]]:
    """The calls of every site but heads, which never leave high precision."""
    sites = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m.out_features > 1}
    calls: dict[str, list[Call]] = {name: [] for name in sites}
    for batch in batches:
        seen: list[tuple[str, Tensor, Tensor]] = []
        handles = [module.register_forward_hook(partial(_keep, seen, name)) for name, module in sites.items()]
        F.binary_cross_entropy_with_logits(model(batch), batch.label_B, reduction="sum").backward()
        for handle in handles:
            handle.remove()
        for name, x, y in seen:
            assert y.grad is not None
            calls[name].append(Call(x, y.grad))
    model.zero_grad()
    return {name: made for name, made in calls.items() if made}


def _keep(seen: list[tuple[str, Tensor, Tensor]], name: str, module: nn.Module, inputs: tuple[Tensor], y: Tensor) -> None:
    y.retain_grad()
    seen.append((name, inputs[0].detach(), y))


@contextmanager
def in_recipe(model: nn.Module, site: str, recipe: str) -> Iterator[LokaLinear]:
    """The model with this site's fprop in ``recipe``."""
    parent, _, child = site.rpartition(".")
    linear = model.get_submodule(site)
    assert isinstance(linear, nn.Linear)
    kernels = SiteKernels(f"reference.{recipe}", "torch.fp32", "torch.fp32")
    quantized = LokaLinear.from_linear(linear, kernels)
    setattr(model.get_submodule(parent), child, quantized)
    try:
        yield quantized
    finally:
        setattr(model.get_submodule(parent), child, linear)


@torch.no_grad()
def errors(quantized: LokaLinear, calls: Sequence[Call]) -> dict[str, float]:
    """Every metric: its mean over calls, without bias, as ``measure`` takes it. An example's g·δ is summed over its rows."""
    reports, products = [], []
    for call in calls:
        exact = F.linear(call.x.double(), quantized.weight.double())
        out = quantized(call.x).double() - (0 if quantized.bias is None else quantized.bias.double())
        reports.append(measure_error(out.flatten(0, -2), exact.flatten(0, -2)))
        products.append((call.gradient.double() * (out - exact)).flatten(1).sum(1))
    means = {metric: sum(getattr(report, metric) for report in reports) / len(reports) for metric in METRICS}
    product_B = torch.cat(products)
    second = 0.5 * product_B.square().mean().item()
    return {**means, SECOND_ORDER: second, BOTH_ORDERS: product_B.mean().item() + second}


CHANGES: dict[str, Callable[[Row], float]] = {
    "size": lambda row: abs(row.expected_change),
    "change": lambda row: row.expected_change,
}


def correlations(rows: Sequence[Row]) -> str:
    """Spearman's ρ of each metric with the change of log-loss."""
    by_model: dict[str, list[Row]] = {}
    for row in rows:
        by_model.setdefault(f"{row.model} {row.dense}", []).append(row)
    table = []
    for metric in (*METRICS, SECOND_ORDER, BOTH_ORDERS):
        sign = -1 if metric == "sqnr_db" else 1  # more decibels are less error
        cells = [
            spearman([sign * row.metrics[metric] for row in subset], [change(row) for row in subset])
            for subset in by_model.values()
            for change in CHANGES.values()
        ]
        table.append([metric, *(f"{rho:.2f}" for rho in cells)])
    header = ["metric", *(f"{model}: {what}" for model in by_model for what in CHANGES)]
    clear = sum(abs(row.change) > row.change_error for row in rows)
    return (
        f"Rank correlation (Spearman's ρ) of a site's error with the change of held-out log-loss and its size, {len(rows)} "
        f"sites × recipes. Changes are in expectation over labels; on the labels drawn, {clear} are clear of their 95 % "
        f"interval.\n\n" + markdown_table(header, table)
    )


def by_recipe(rows: Sequence[Row]) -> str:
    """The site where each recipe changes log-loss most, and what the metrics say of it."""
    table = []
    for key in dict.fromkeys((row.model, row.dense, row.recipe) for row in rows):
        subset = [row for row in rows if (row.model, row.dense, row.recipe) == key]
        worst = max(subset, key=lambda row: abs(row.expected_change))
        changes = (worst.expected_change, worst.metrics[BOTH_ORDERS], worst.metrics[SECOND_ORDER])
        errors = [f"{worst.metrics[metric]:.3f}" for metric in ("mere_floored", "relative_rms")]
        site = worst.site.removeprefix("dense_part.")
        table.append([" ".join(key), site, *(f"{change:+.1e}" for change in changes), *errors])
    header = ["recipe", "site", "change", BOTH_ORDERS, SECOND_ORDER, "mere_floored", "relative_rms"]
    return "The site where each recipe moves log-loss most\n\n" + markdown_table(header, table)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Pearson's correlation of ranks; equal values share their mean rank."""
    x, y = (torch.tensor(ranks(values), dtype=torch.float64) for values in (a, b))
    x, y = x - x.mean(), y - y.mean()
    norm = math.sqrt(float(x.square().sum() * y.square().sum()))
    return float((x * y).sum()) / norm if norm else 0.0


def ranks(values: Sequence[float]) -> list[float]:
    return [sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2 for value in values]


if __name__ == "__main__":
    main()
