"""What a Guard does when the data drifts: some dense features become a thousand times as large in the middle of training.

    python benchmarks/drift_guard.py

Every arm starts from the same weights and sees the same batches. A first stretch is trained under a Probe. By its Record, all
sites that are accurate enough go to an emulated 8-bit kernel in all three roles. Then the stream goes on, and halfway through
it a quarter of the dense features is multiplied by 1000: not all, since to a dynamic scale that would make no difference.
"""

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice

import torch

import loka
from loka.core.environment import current_command, current_environment
from loka.core.plan import Plan
from loka.core.record import Record
from loka.core.results import markdown_table, write_results
from loka.data.batch import Batch
from loka.data.dataset import Dataset, open_dataset
from loka.dispatch.guard import GuardEvent
from loka.kernels.device import device_of
from loka.models.registry import build_model
from loka.train.config import TrainConfig
from loka.train.loka_plan import as_if_8_bits_always_paid
from loka.train.metrics import Metrics, MetricSums
from loka.train.trainer import Trainer

CPU = torch.device("cpu")
KERNELS = ("reference.int8_rowwise", "reference.tensorwise")
PROBED = 200  # steps under the Probe
# Few ids and frequent clicks, so that some hundred steps are enough to learn from the dense features.
STREAM = {
    "base_rate": 0.4,
    "onehot_sizes": (10, 20, 50),
    "multihot_sizes": (),
    "bag_length": 0,
    "sequence_size": 0,
    "sequence_length": 0,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", default="wukong")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--steps", type=int, default=600, help="behind the Probe's; the drift begins after half of them")
    parser.add_argument("--every", type=int, default=20, help="steps between checks")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--out", default="benchmarks/results")
    arguments = parser.parse_args()
    experiment = Experiment(arguments.model, arguments.preset, arguments.steps, arguments.every, arguments.batch_size)
    rows = [experiment.run("fp32", None, guarded=False)]
    for kernel in KERNELS:
        rows += [
            experiment.run(f"{kernel}, {'guarded' if guarded else 'no guard'}", kernel, guarded) for guarded in (False, True)
        ]
    environment = current_environment(device_of(CPU))
    for path in write_results(arguments.out, "drift-guard", environment, current_command(), rows, tables(rows)):
        print(f"wrote {path}")


class Experiment:
    def __init__(self, model: str, preset: str, steps: int, every: int, batch_size: int) -> None:
        self.steps, self.every, self.batch_size = steps, every, batch_size
        self.drift_at = PROBED + steps // 2
        self.config = TrainConfig(
            model, preset, steps=PROBED + steps, batch_size=batch_size, warmup_steps=20, device="cpu", out=None
        )
        self.data: Dataset = open_dataset("synthetic", path=None, seed=0, device=CPU, test_examples=64 * batch_size, **STREAM)

    def run(self, name: str, kernel: str | None, guarded: bool) -> dict[str, object]:
        """Train one arm, and score it on the stream that it learned from and on held-out examples as they are at its end."""
        torch.manual_seed(0)
        model = build_model(self.config.model, self.config.preset, self.data.schema)
        trainer = Trainer(model, self.config)
        batches = self.stream()
        record = self.probe(trainer, batches)
        plan = None if kernel is None else self.plan(record, kernel)
        if plan is not None:
            loka.apply_plan(model.dense_part, plan)
        guard = loka.Guard(model.dense_part, record, every=self.every) if guarded else None
        trainer.window.reset()
        for batch in batches:
            with guard.step() if guard else nullcontext():
                trainer.step(batch)
            if trainer.steps_done == self.drift_at:
                before = trainer.window.metrics()
                trainer.window.reset()
        behind = trainer.window.metrics()
        test = self.test(trainer)
        row = {
            "arm": name,
            "sites": 0 if plan is None else sum(site.is_low_precision for site in plan.sites),
            "before_drift": before.log_loss,
            "behind_drift": behind.log_loss,
            "test": test.log_loss,
            "events": [str(event) for event in guard.events] if guard else [],
            "tripped": [self.tripped(event) for event in guard.events] if guard else [],
        }
        print(row)
        return row

    def tripped(self, event: GuardEvent) -> str:
        behind = event.step + PROBED - self.drift_at
        when = f"check {behind // self.every + 1} of the drift" if behind >= 0 else "before the drift"
        return f"{event.site}, {when}"

    def stream(self) -> Iterator[Batch]:
        batches = islice(self.data.train(self.batch_size), PROBED + self.steps)
        return (drifted(batch) if step >= self.drift_at else batch for step, batch in enumerate(batches))

    def probe(self, trainer: Trainer, batches: Iterator[Batch]) -> Record:
        probe = loka.Probe(trainer.model.dense_part, every=10)
        for batch in islice(batches, PROBED):
            with probe.step():
                trainer.step(batch)
        probe.detach()
        return probe.record()

    def plan(self, record: Record, kernel: str) -> Plan:
        return loka.make_plan(as_if_8_bits_always_paid(loka.measure(record, kernels=[kernel], device="cpu")))

    @torch.no_grad()
    def test(self, trainer: Trainer) -> Metrics:
        sums = MetricSums(CPU)
        trainer.model.eval()
        for batch in self.data.test(self.batch_size):
            batch = drifted(batch)
            sums.add(trainer.model(batch), batch.label_B, batch.teacher_logit_B)
        return sums.metrics()


def drifted(batch: Batch) -> Batch:
    dense_BD = batch.dense_BD.clone()
    dense_BD[:, : dense_BD.shape[1] // 4] *= 1000
    return replace(batch, dense_BD=dense_BD)


def tables(rows: list[dict[str, object]]) -> str:
    base = rows[0]
    table = []
    for row in rows:
        tripped = "; ".join(row["tripped"]) or "–"  # type: ignore[arg-type]
        changes = [
            f"{row[key]:.5f} ({100 * (row[key] / base[key] - 1):+.3f} %)" for key in ("before_drift", "behind_drift", "test")
        ]  # type: ignore[operator]
        table.append([str(row["arm"]), str(row["sites"]), *changes, tripped])
    header = ["arm", "8-bit sites", "log-loss before the drift", "behind it", "held out, at the end", "given back by the Guard"]
    events = "".join(f"- {row['arm']}: {event}\n" for row in rows for event in row["events"])  # type: ignore[union-attr]
    return (
        markdown_table(header, table)
        + f"\nChanges are against fp32. Steps of the Guard's events count from its own first.\n\n{events}"
    )


if __name__ == "__main__":
    main()
