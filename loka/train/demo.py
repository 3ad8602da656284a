"""The whole of LoKA on one model: train under the Probe, measure, plan, train on, serve, compare with a high-precision twin.

Every stage leaves its file in the run's folder and is skipped where that is there, so an interrupted demo goes on.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.core.comparison import Comparison
from loka.core.environment import current_environment
from loka.core.plan import Goal, Plan
from loka.core.progress import Progress as PieceProgress
from loka.core.record import FILE as RECORD_FILE
from loka.core.record import Record
from loka.core.survey import Survey
from loka.data.batch import Batch
from loka.data.dataset import Dataset, open_dataset
from loka.dispatch.apply import apply_plan
from loka.dispatch.check import check_plan
from loka.dispatch.freeze import freeze
from loka.kernels.contract import KERNELS
from loka.kernels.device import device_of
from loka.measure.survey import measure
from loka.models.recommender import Recommender
from loka.models.registry import build_model
from loka.mods.apply import apply_mods
from loka.planner.plan import make_plan
from loka.probe.probe import Probe
from loka.train.checkpoint import list_checkpoints, load_checkpoint
from loka.train.config import Option, Precision, TrainConfig
from loka.train.loop import run_steps
from loka.train.precision import autocast, matmul_precision, resolve_device
from loka.train.progress import Progress, Silent
from loka.train.run_folder import RunFolder
from loka.train.trainer import Trainer
from loka.train.twins import Twin, compare_quality, compare_times

HIGH, PLANNED = "high", "planned"


@dataclass(frozen=True)
class DemoSettings:
    """How large a demo is. ``goal`` is that of the plan in the run's own folder; training has one of its own beside it."""

    preset: str
    goal: Goal
    batch_size: int
    probe_steps: int
    twin_steps: int
    test_batches: int
    precision: Precision = Precision.FP32
    compile: bool = False
    model_options: dict[str, Option] = field(default_factory=dict)
    device: str = "auto"
    seed: int = 0

    def config(self, out: Path) -> TrainConfig:
        return TrainConfig(
            model="wukong",
            preset=self.preset,
            model_options=self.model_options,
            data_options={"test_examples": self.test_batches * self.batch_size},
            steps=self.probe_steps + self.twin_steps,
            batch_size=self.batch_size,
            precision=self.precision,
            compile=self.compile,
            seed=self.seed,
            device=self.device,
            log_every=max(1, self.twin_steps // 40),
            checkpoint_every=50,
            out=str(out),
        )

    @property
    def title(self) -> str:
        wider = " (wider)" if self.model_options else ""
        return f"Wukong {self.preset}{wider} on the synthetic stream"


def settings_for(device: torch.device) -> DemoSettings:
    """What shows LoKA in a few minutes: on a CPU INT8 in serving, on a GPU FP8 in training."""
    if device.type == "cuda":
        return DemoSettings("base", Goal.TRAINING, 4096, 300, 300, 24, Precision.BF16, compile=True)
    # The preset's own layers are too narrow to be worth a cast; in these GEMMs are most of the time, as in real models.
    wider: dict[str, Option] = {"fmb_widths": (1024, 512), "top_widths": (1024, 512)}
    return DemoSettings("small", Goal.SERVING, 1024, 150, 150, 48, model_options=wider)


@dataclass(frozen=True)
class Stage:
    """What a demo is doing, for whoever watches: ``say`` a line, and progress for steps and for measured sites."""

    say: Callable[[str], None] = lambda line: None
    steps: Callable[[], Progress] = Silent
    pieces: Callable[[], PieceProgress | None] = lambda: None


def run_demo(settings: DemoSettings, out: str | Path, stage: Stage | None = None) -> Comparison:
    """Run every stage whose file is not in the folder ``out`` yet, and return the comparison of the twins."""
    demo = _Demo(settings, Path(out), stage or Stage())
    if (demo.folder / "comparison.json").exists():
        demo.stage.say("everything is here already: remove the folder, or name another, to start afresh")
        return Comparison.load(demo.folder)
    with matmul_precision(settings.precision):
        demo.train_under_probe()
        survey = demo.measure()
        demo.plan(survey)
        for name in (HIGH, PLANNED):
            demo.train_twin(name)
        return demo.compare()


class _Demo:
    def __init__(self, settings: DemoSettings, folder: Path, stage: Stage) -> None:
        self.settings, self.folder, self.stage = settings, folder, stage
        self.config = settings.config(folder)
        self.device = resolve_device(settings.device, settings.precision)
        self.data: Dataset = open_dataset(
            self.config.data, path=None, seed=settings.seed, device=self.device, **self.config.data_options
        )

    def train_under_probe(self) -> None:
        """record.safetensors, and the checkpoint that both twins start from."""
        self.stage.say(f"1/6  {self.settings.title}: Mods applied, trained under the Probe")
        if (self.folder / RECORD_FILE).exists():
            return
        trainer, changes = self._trainer()
        self.stage.say(f"     {changes}")
        run = RunFolder(self.folder)
        run.begin(trainer)
        every = max(1, self.settings.probe_steps // 20)
        probe = Probe(trainer.model.dense_part, every=every)
        try:
            self._run_steps(trainer, self.settings.probe_steps, run, probe)
            if not probe.steps_seen:  # stopped between the last checkpoint and the record: look once more
                with probe.step():
                    trainer.step(next(self.data.train(self.config.batch_size, start=trainer.steps_done)))
            record = probe.record()
        finally:
            probe.detach()
        record.save(self.folder)

    def measure(self) -> Survey:
        """survey.json"""
        self.stage.say("2/6  measured: error and time of every kernel at every site")
        if (self.folder / "survey.json").exists():
            return Survey.load(self.folder)
        return measure(
            Record.load(self.folder),
            kernels=_kernels(self.device),
            device=self.device,
            out=self.folder,
            progress=self.stage.pieces(),
        )

    def plan(self, survey: Survey) -> None:
        """plan.json for the goal, checked on held-out batches; training/plan.json for what the twin trains with."""
        self.stage.say(f"3/6  planned: the fastest kernels that are accurate enough, for {self.settings.goal}")
        training = self.folder / "training"
        if not (training / "plan.json").exists():
            make_plan(survey, goal=Goal.TRAINING).save(training)
        if not (self.folder / "plan.json").exists():
            trainer, _ = self._trainer()
            self._load_start(trainer)
            batches = list(islice(self.data.test(self.config.batch_size), 8))
            checked = check_plan(
                trainer.model.dense_part, make_plan(survey, goal=self.settings.goal), batches, loss=self._loss(trainer.model)
            )
            checked.plan.save(self.folder)
            self.stage.say(f"     {checked}")

    def train_twin(self, name: str) -> None:
        """twins/<name>: trained on from the same checkpoint on the same batches, in high precision or by the plan."""
        words = "in high precision" if name == HIGH else "by the plan"
        self.stage.say(f"{4 if name == HIGH else 5}/6  trained on {words}")
        if self._is_done(name):
            return
        trainer = self._twin(name)
        if name == PLANNED:
            plan = Plan.load(self.folder / "training")
            self.stage.say(
                f"     {sum(site.is_low_precision for site in plan.sites)} of {len(plan.sites)} sites in low precision"
            )
            apply_plan(trainer.model.dense_part, plan)
        self._run_steps(trainer, self.config.steps or 0, RunFolder(self.folder / "twins" / name))

    def compare(self) -> Comparison:
        """comparison.json"""
        self.stage.say("6/6  served and compared with the twin")
        config, size = self.config, self.config.batch_size
        batch = next(self.data.test(size))
        times = []
        training_plan = Plan.load(self.folder / "training")
        if any(site.is_low_precision for site in training_plan.sites):
            high, planned = self._twin(HIGH), self._twin(PLANNED)
            apply_plan(planned.model.dense_part, training_plan)
            steps = [Twin(trainer.model, lambda trainer=trainer: trainer.step(batch)) for trainer in (high, planned)]
            times.append(compare_times(Goal.TRAINING, size, *steps, compiled=config.compile))
        high_model, planned_model = self._twin(HIGH).model, self._twin(PLANNED).model
        high_model.eval().requires_grad_(False)
        serving_plan = self._serving_plan()
        if any(site.is_low_precision for site in serving_plan.sites):
            apply_plan(planned_model.dense_part, serving_plan)
            self.stage.say(f"     {freeze(planned_model.dense_part)}")
        quality = compare_quality(high_model, planned_model, self.data.test(size), config.precision)
        serve = [Twin(model, lambda model=model: self._serve(model, batch)) for model in (high_model, planned_model)]
        times.append(compare_times(Goal.SERVING, size, *serve, compiled=config.compile))
        comparison = Comparison(
            model=self.settings.title,
            fingerprint=serving_plan.document.fingerprint,
            environment=current_environment(device_of(self.device)),
            dtype=serving_plan.document.dtype,
            training_steps=self.settings.twin_steps,
            quality=quality,
            times=tuple(times),
        )
        comparison.save(self.folder)
        return comparison

    def _serving_plan(self) -> Plan:
        if self.settings.goal is Goal.SERVING:
            return Plan.load(self.folder)
        return make_plan(Survey.load(self.folder), goal=Goal.SERVING)

    def _trainer(self) -> tuple[Trainer, str]:
        """A model with the Mods, from the same weights every time, and what the Mods did in a line."""
        torch.manual_seed(self.settings.seed)
        model = build_model("wukong", self.settings.preset, self.data.schema, **self.settings.model_options)
        changes = apply_mods(model.dense_part)
        return Trainer(model, self.config), str(changes).partition("\n")[0]

    def _load_start(self, trainer: Trainer) -> None:
        checkpoint = load_checkpoint(list_checkpoints(RunFolder(self.folder).checkpoints)[-1])
        trainer.load(checkpoint.header.step, checkpoint.tensors)

    def _twin(self, name: str) -> Trainer:
        """Where the twin stands: at its newest checkpoint, or at the start."""
        trainer, _ = self._trainer()
        self._load_start(trainer)
        RunFolder(self.folder / "twins" / name).begin(trainer)
        return trainer

    def _is_done(self, name: str) -> bool:
        checkpoints = list_checkpoints(RunFolder(self.folder / "twins" / name).checkpoints)
        return bool(checkpoints) and load_checkpoint(checkpoints[-1]).header.step == self.config.steps

    def _run_steps(self, trainer: Trainer, steps: int, run: RunFolder, probe: Probe | None = None) -> None:
        with self.stage.steps() as progress:
            progress.start(trainer.steps_done, steps)
            around = {} if probe is None else {"around_step": probe.step}
            run_steps(trainer, self.data, steps, run, progress, **around)

    def _loss(self, model: Recommender) -> Callable[[nn.Module, Batch], Tensor]:
        """Of the whole model; the module that is checked is its dense part."""

        def loss(dense_part: nn.Module, batch: Batch) -> Tensor:
            with autocast(self.config.precision, self.device):
                logits_B = model(batch)
            return F.binary_cross_entropy_with_logits(logits_B.double(), batch.label_B.double())

        return loss

    def _serve(self, model: Recommender, batch: Batch) -> Tensor:
        with torch.no_grad(), autocast(self.config.precision, self.device):
            return model(batch)


def _kernels(device: torch.device) -> list[str] | None:
    """On a CPU 8-bit kernels alone, which is what a demo of 8 bits is about; `loka measure` lets bf16 compete too."""
    if device.type == "cuda":
        return None
    return [name for name in KERNELS.names() if not name.startswith("reference.") and name != "torch.bf16"]
