"""Is the error that LoKA predicts from a Probe's Record the error that real batches have? By site, role and FP8 recipe.

    python benchmarks/fidelity.py --criteo criteo_dac_80k.txt --movielens ml-1m
    python benchmarks/fidelity.py --models dlrm --steps 20 --batches 32            # planted rows and the synthetic stream alone
    python benchmarks/fidelity.py --criteo … --movielens … --batch-size 1024 --batches 96 --rows 256     # as a Probe is used

A model stands still, at its initialization or after some steps of training. Of the batches that follow, which hold new examples
alone, every second is the Probe's; the others are held out. The predicted error is that over batches of as many rows drawn from
the Record, the true one that over the held-out batches: the mean of mere_floored, and rms(error)/rms(reference) of all
together. Held-out batches come in two halves, whose difference shows how well the truth itself is known. Cases already in the
results file are not repeated.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.core.environment import current_command, current_environment
from loka.core.results import GatheredResults, markdown_table
from loka.data.dataset import open_dataset
from loka.kernels.device import device_of
from loka.models.registry import build_model
from loka.mods.apply import apply_mods
from loka.train.config import TrainConfig
from loka.train.fidelity import METRICS, PREDICTORS, SiteFidelity, study, study_planted
from loka.train.paired import example_of
from loka.train.quality_settings import MODS
from loka.train.trainer import Trainer

FOLDER = Path(__file__).parent / "results"
MODELS = ("wukong", "dlrm", "dcnv2")
NEAR, FAR = 0.10, 0.25
NEGLIGIBLE = 1e-4  # errors below it count as equal
MAX_ERROR = 0.2  # the gate of make_plan, by default
TITLES = {
    "learned": "**learned by the Probe**",
    "drawn": "the same, without what it saw of y and dw",
    "gaussian": "mean and covariance",
    "randn": "randn of the same rms",
    "reservoir": "rows that the Probe saw",
    "itself": "one half of the truth, of the other",
}
ROLES = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True)
class Case:
    """One model at one stage of its training on one data set."""

    model: str
    preset: str
    data: str  # criteo-raw, criteo-log, movielens, synthetic
    mods: bool
    stage: str  # init, trained

    @property
    def key(self) -> str:
        return f"{self.data}/{self.model}-{self.preset}/{'mods' if self.mods else 'plain'}/{self.stage}"


def study_case(
    case: Case, path: Path | None, steps: int, batch_size: int, batches: int, rows: int | None = None
) -> dict[str, SiteFidelity]:
    torch.manual_seed(0)
    name, _, dense = case.data.partition("-")
    data = open_dataset(name, path=path and str(path), seed=0, device="cpu", **({"dense": dense} if dense else {}))
    net = build_model(case.model, case.preset, data.schema)
    if case.mods:
        apply_mods(net.dense_part, MODS, example=example_of(net, data, 64))
    stream = data.train(batch_size)
    if case.stage == "trained":
        config = TrainConfig(case.model, case.preset, data=name, steps=steps, batch_size=batch_size, device="cpu", out=None)
        trainer = Trainer(net, config)
        for _ in range(steps):
            trainer.step(next(stream))
    net.embeddings.requires_grad_(False)
    if per_epoch := data.batches_per_epoch(batch_size):  # take what is left of one pass over the data
        left = islice(stream, per_epoch - (steps if case.stage == "trained" else 0))
        stream = (batch for batch in chain(left, data.test(batch_size)) if len(batch.label_B) == batch_size)

    def loss(batch: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(net(batch), batch.label_B)

    return study(net.dense_part, stream, loss, batches, rows)


Planted = Callable[[torch.Generator], tuple[Tensor, Tensor]]  # makes x_MK and dy_MN
M, K, N = 256, 96, 64


def planted_cases() -> dict[str, tuple[Planted, Tensor]]:
    """Rows that are hard to learn, each with a weight."""
    fixed = torch.Generator().manual_seed(7)

    def normal(*shape: int, generator: torch.Generator = fixed) -> Tensor:
        return torch.randn(shape, generator=generator)

    plain_NK, mixing_KK, factors_4K = normal(N, K) / K**0.5, normal(K, K) / K**0.5, normal(4, K)
    to_N, spread_K = normal(N), torch.exp2(torch.linspace(-6, 6, K))
    level_NK = plain_NK - plain_NK.mean(1, keepdim=True)  # learned to ignore what all features share
    pair_NK = torch.cat([plain_NK[:, : K // 2], -plain_NK[:, : K // 2]], dim=1)

    def labels(generator: torch.Generator) -> Tensor:
        return torch.where(torch.rand(M, 1, generator=generator) < 0.2, -0.8, 0.2)

    def rows(x: Callable[..., Tensor], dy: Callable[..., Tensor]) -> Planted:
        return lambda generator: (x(lambda *shape: normal(*shape, generator=generator)), dy(generator))

    def plain_dy(generator: torch.Generator) -> Tensor:
        return normal(M, N, generator=generator)

    def correlated(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x_MK = normal(M, K, generator=generator)
        return x_MK, 0.3 * x_MK[:, :N] + plain_dy(generator)

    def masked(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x_MK = (normal(M, K, generator=generator) @ mixing_KK).relu()
        return x_MK, labels(generator) * to_N * (x_MK @ plain_NK.t() > 0)

    def pairs(draw: Callable[..., Tensor]) -> Tensor:
        shared = draw(M, K // 2)
        return torch.cat([shared, shared + 0.05 * draw(M, K // 2)], dim=1)

    return {
        "cancellation: a mean that w ignores": (rows(lambda draw: 30 + draw(M, K), plain_dy), level_NK),
        "cancellation: pairs of features": (rows(pairs, plain_dy), pair_NK),
        "zeros after an activation, two labels": (masked, plain_NK),
        "row scales of e^±1.5": (
            rows(lambda draw: draw(M, K) * (1.5 * draw(M, 1)).exp(), lambda g: plain_dy(g) * plain_dy(g)[:, :1].exp()),
            plain_NK,
        ),
        "feature scales over 12 binades": (rows(lambda draw: draw(M, K) * spread_K, plain_dy), plain_NK),
        "the same, and w makes up for them": (rows(lambda draw: draw(M, K) * spread_K, plain_dy), plain_NK / spread_K),
        "correlated features": (rows(lambda draw: draw(M, 4) @ factors_4K + 0.1 * draw(M, K), plain_dy), plain_NK),
        "correlated x and dy": (correlated, plain_NK),
        "tiny gradients of two labels": (
            rows(lambda draw: draw(M, K), lambda g: 1e-10 * labels(g) * (to_N + plain_dy(g))),
            plain_NK,
        ),
    }


def as_row(fidelity: dict[str, SiteFidelity]) -> dict[str, Any]:
    """The numbers of a case: for each site, role with recipe, and metric, those of both halves and of every predictor."""
    sites: dict[str, dict[str, list[list[float]]]] = {}
    for site, found in fidelity.items():
        sources = [*found.halves, *(found.predicted[name] for name in PREDICTORS)]
        sites[site] = {
            option: [[float(f"{errors[option][metric]:.4g}") for errors in sources] for metric in range(len(METRICS))]
            for option in found.halves[0]
        }
    return {"columns": ["half", "other half", *PREDICTORS], "metrics": METRICS, "sites": sites}


@dataclass(frozen=True)
class Comparison:
    """One error: as predicted, and as it truly is."""

    where: str
    role: str
    metric: str
    predictor: str
    predicted: float
    true: float

    @property
    def off(self) -> float:
        if max(self.predicted, self.true) < NEGLIGIBLE:
            return 0.0
        return abs(self.predicted - self.true) / max(self.true, 1e-30)


def comparisons(row: dict[str, Any]) -> Iterator[Comparison]:
    for site, options in row["sites"].items():
        for option, by_metric in options.items():
            for metric, (half, other, *predicted) in zip(METRICS, by_metric, strict=True):
                about = (f"{row['key']} {site} {option}", option.partition(" ")[0], metric)
                for predictor, value in zip(PREDICTORS, predicted, strict=True):
                    yield Comparison(*about, predictor, value, (half + other) / 2)
                yield Comparison(*about, "itself", half, other)


def shares(found: list[Comparison]) -> str:
    """The percentages of cases within 10 % and within 25 %."""
    if not found:
        return ""
    return " / ".join(f"{100 * sum(c.off <= limit for c in found) / len(found):.0f}" for limit in (NEAR, FAR))


def summary(found: list[Comparison], predictors: tuple[str, ...]) -> str:
    rows = []
    for predictor, metric in product(predictors, METRICS):
        own = [c for c in found if c.predictor == predictor and c.metric == metric]
        by_role = [shares([c for c in own if c.role == role]) for role in ROLES]
        rows.append([TITLES[predictor], metric, *by_role, shares(own), str(len(own))])
    return markdown_table(["predicted from", "metric", *ROLES, "all", "cases"], rows)


def by_gate(found: list[Comparison]) -> str:
    """What a plan would get wrong if it took predictions for the truth."""
    rows = []
    for predictor in (*PREDICTORS, "itself"):
        own = [c for c in found if c.predictor == predictor and c.metric == METRICS[0]]
        wrongly_safe = sum(c.predicted < MAX_ERROR <= c.true for c in own)
        wrongly_unsafe = sum(c.true < MAX_ERROR <= c.predicted for c in own)
        unsafe = sum(c.true >= MAX_ERROR for c in own)
        rows.append([TITLES[predictor], f"{wrongly_safe} of {unsafe}", f"{wrongly_unsafe} of {len(own) - unsafe}"])
    return markdown_table(["predicted from", "unsafe taken for safe", "safe taken for unsafe"], rows)


def by_case(cases: dict[str, list[Comparison]]) -> str:
    rows = []
    for key, found in cases.items():
        cells = [
            shares([c for c in found if (c.predictor, c.role, c.metric) == ("learned", role, metric)])
            for role, metric in product(ROLES, METRICS)
        ]
        truth = shares([c for c in found if (c.predictor, c.role) == ("itself", "wgrad")])
        rows.append([key, *cells, truth])
    names = [f"{role} {'floored' if metric == METRICS[0] else 'rms'}" for role, metric in product(ROLES, METRICS)]
    return markdown_table(["case", *names, "wgrad, half of half"], rows)


def by_planted(cases: dict[str, list[Comparison]]) -> str:
    """Predicted over true for the recipe where that is worst, for each role and predictor."""
    rows = []
    for key, found in cases.items():
        for role in ROLES:
            cells = []
            for predictor in PREDICTORS:
                own = [c for c in found if (c.role, c.predictor, c.metric) == (role, predictor, METRICS[0])]
                worst = max(own, key=lambda c: c.off)
                cells.append(f"{worst.predicted / max(worst.true, 1e-30):.2f}")
            typical = sorted(c.true for c in own)[len(own) // 2]
            rows.append([key.removeprefix("planted/"), role, f"{typical:.3g}", *cells])
    return markdown_table(["planted", "role", "true mere_floored", *(TITLES[p].strip("*") for p in PREDICTORS)], rows)


def make_report(rows: dict[str, dict[str, Any]]) -> str:
    cases = {key: list(comparisons(row)) for key, row in rows.items()}
    real = {key: found for key, found in cases.items() if not key.startswith("planted/")}
    planted = {key: found for key, found in cases.items() if key.startswith("planted/")}
    everything = [c for found in real.values() for c in found]
    known = {(c.where, c.metric) for c in everything if c.predictor == "itself" and c.off <= NEAR}
    parts = []
    if everything:
        settled = [c for c in everything if (c.where, c.metric) in known and c.predictor != "itself"]
        worst = sorted((c for c in everything if c.predictor == "learned"), key=lambda c: -c.off)[:12]
        unsettled = 1 - len(known) / sum(c.predictor == "itself" for c in everything)
        parts += [
            "Percent of the cases (site × role × recipe) whose predicted error is within 10 % / 25 % of the true one:\n",
            summary(everything, (*PREDICTORS, "itself")),
            f"Of {100 * unsettled:.0f} % of the cases the two halves of the truth differ by more than 10 %. Without those:\n",
            summary(settled, PREDICTORS),
            f"At the gate of a plan, mere_floored under {MAX_ERROR}:\n",
            by_gate(everything),
            "As learned by the Probe, case by case, and how well wgrad's truth is known:\n",
            by_case(real),
            "The worst of them:\n",
            markdown_table(
                ["case", "metric", "predicted", "true"],
                [[c.where, c.metric, f"{c.predicted:.3g}", f"{c.true:.3g}"] for c in worst],
            ),
        ]
    if planted:
        parts += ["Planted rows: predicted over true, of the recipe for which it is farthest from 1:\n", by_planted(planted)]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--criteo", type=Path, help="a file of the Criteo Display Advertising set, its counts raw and log")
    parser.add_argument("--movielens", type=Path, help="folder of MovieLens-1M")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--mods", nargs="+", default=["without", "with"], choices=["without", "with"])
    parser.add_argument("--stages", nargs="+", default=["init", "trained"], choices=["init", "trained"])
    parser.add_argument("--steps", type=int, default=100, help="of training")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--batches", type=int, default=512, help="for the Probe and held out, together, at most")
    parser.add_argument(
        "--rows", type=int, help="of a batch that the Probe takes, older ones fading; default: all, and none do"
    )
    parser.add_argument("--results", type=Path, help="results file to continue; default: one of today's in benchmarks/results")
    arguments = parser.parse_args()
    environment = current_environment(device_of(torch.device("cpu")))
    results = GatheredResults(FOLDER, "fidelity", environment, current_command(), arguments.results)
    paths = {"criteo-raw": arguments.criteo, "criteo-log": arguments.criteo, "movielens": arguments.movielens}
    paths = {data: path for data, path in paths.items() if path} or {"synthetic": None}
    names = ("steps", "batch_size", "batches", *(["rows"] if arguments.rows else []))
    settings = {name: getattr(arguments, name) for name in names}
    todo: dict[str, Callable[[], dict[str, SiteFidelity]]] = {
        f"planted/{name}": lambda case=case: {"0": study_planted(*case, arguments.batches, arguments.rows)}
        for name, case in planted_cases().items()
    }
    for data, model, mods, stage in product(paths, arguments.models, arguments.mods, arguments.stages):
        case = Case(model, arguments.preset, data, mods == "with", stage)
        todo[case.key] = lambda case=case: study_case(case, paths[case.data], **settings)
    todo = {key: run for key, run in todo.items() if results.rows.get(key, {}).get("settings") != settings}
    begin = time.monotonic()
    for index, (key, run) in enumerate(todo.items(), start=1):
        row = as_row(run())
        results.add(key, {"settings": settings, **row})
        learned = [c for c in comparisons(results.rows[key]) if c.predictor == "learned"]
        print(f"{index}/{len(todo)} {key}: {shares(learned)} %, {time.monotonic() - begin:.0f} s", flush=True)
    tables = make_report(results.rows)
    print(f"{tables}\n{results.write_markdown(tables)}\n{results.json_path}")


if __name__ == "__main__":
    main()
