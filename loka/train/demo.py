"""The whole of LoKA on one model: train under the Probe, measure, plan, train on, serve, compare with a high-precision twin.

Every stage leaves its file in the run's folder and is skipped if the file is there, so an interrupted demo can continue.
"""

import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from loka.core.comparison import HIGH, OTHER, PLANNED, TWINS, Comparison, QualityPair, TimePair, other_precision
from loka.core.environment import current_environment
from loka.core.errors import InvalidInput
from loka.core.files import require_folder
from loka.core.plan import Goal, Plan
from loka.core.progress import Progress as PieceProgress
from loka.core.recipe import Format
from loka.core.record import Record
from loka.core.record_file import FILE as RECORD_FILE
from loka.core.survey import Survey
from loka.data.batch import Batch
from loka.data.dataset import Dataset, open_dataset
from loka.dispatch.apply import apply_plan
from loka.dispatch.check import check_plan
from loka.dispatch.differences import has_fingerprint
from loka.dispatch.freeze import freeze
from loka.kernels.contract import KERNELS, is_oracle
from loka.kernels.device import device_of
from loka.measure.survey import measure
from loka.models.recommender import Recommender
from loka.models.registry import build_model
from loka.mods.apply import apply_mods
from loka.planner.limits import MIN_SPEEDUP
from loka.planner.plan import make_plan
from loka.probe.probe import Probe
from loka.train.checkpoint import list_checkpoints, load_checkpoint
from loka.train.config import Precision
from loka.train.demo_settings import DemoSettings
from loka.train.loka_plan import log_loss_of
from loka.train.loop import run_steps
from loka.train.paired import example_of
from loka.train.precision import autocast, matmul_precision, resolve_device
from loka.train.progress import Progress, Silent
from loka.train.run_folder import RunFolder
from loka.train.trainer import Trainer
from loka.train.twins import Twin, compare_quality, compare_times, measure_speedup

CHECK_BATCHES = 4


@dataclass(frozen=True)
class Stage:
    """How a demo reports what it is doing: ``say`` takes a line, ``steps`` and ``pieces`` show progress."""

    say: Callable[[str], None] = lambda line: None
    steps: Callable[[], Progress] = Silent
    pieces: Callable[[], PieceProgress | None] = lambda: None


def run_demo(settings: DemoSettings, out: str | Path, stage: Stage | None = None) -> Comparison:
    """Run every stage whose file is not in the folder ``out`` yet, and return the comparison of the twins."""
    require_folder(out)
    demo = _Demo(settings, Path(out), stage or Stage())
    if (demo.folder / "comparison.json").exists():
        demo.stage.say("everything is here already: remove the folder, or name another, to start afresh")
        return Comparison.load(demo.folder)
    with matmul_precision(settings.precision):
        demo.train_under_probe()
        survey = demo.measure()
        demo.plan(survey)
        demo.train_twins()
        return demo.compare()


def has_begun(out: str | Path) -> bool:
    """Whether the folder ``out`` holds a checkpoint that ``run_demo`` would continue from."""
    return bool(list_checkpoints(RunFolder(out).checkpoints))


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
        self.stage.say(f"1/5  {self.settings.title}: Mods applied, trained under the Probe")
        if (self.folder / RECORD_FILE).exists():
            if not (has_begun(self.folder) and self._is_own(Record.load(self.folder))):
                raise InvalidInput(f"{self.folder} holds the record of another run: name another folder, or move it away")
            return
        trainer, changes = self._trainer()
        self.stage.say(f"     {changes}")
        run = RunFolder(self.folder)
        with run.begun(trainer):
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

    def _is_own(self, record: Record) -> bool:
        return has_fingerprint(self._trainer()[0].model.dense_part, record.fingerprint)

    def measure(self) -> Survey:
        """survey.json"""
        self.stage.say("2/5  measured: error and time of every kernel at every site")
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
        """training/plan.json, serving/plan.json, and plan.json, a copy of the one for the demo's goal."""
        self.stage.say("3/5  planned: the fastest kernels that are accurate enough, for training and for serving")
        for goal in Goal:
            if not (self.folder / goal / "plan.json").exists():
                checked = self._checked(make_plan(survey, goal=goal))
                (self._if_faster(checked) if goal is Goal.TRAINING else checked).save(self.folder / goal)
        Plan.load(self.folder / self.settings.goal).save(self.folder)

    def _checked(self, plan: Plan) -> Plan:
        """What of ``plan`` holds in the whole model, on held-out batches."""
        trainer, _ = self._trainer()
        _load_newest(trainer, self.folder)
        batches = list(islice(self.data.test(self.config.batch_size), CHECK_BATCHES))
        loss = log_loss_of(trainer.model, self.config.precision)
        checked = check_plan(
            trainer.model.dense_part,
            plan,
            batches,
            loss=loss,
            min_speedup=MIN_SPEEDUP,
            example=self._example(trainer.model),
        )
        self.stage.say(textwrap.indent(f"{plan.document.goal}: {checked}", "     "))
        return checked.plan

    def _if_faster(self, plan: Plan) -> Plan:
        """``plan`` if it makes a whole training step faster, with optimizer and casts of weights; otherwise a plan that moves
        nothing."""
        low = [site.site for site in plan.sites if site.is_low_precision]
        if not low:
            return plan
        high, planned = self._trainer()[0], self._trainer()[0]
        for trainer in (high, planned):
            _load_newest(trainer, self.folder)
        speedup = measure_speedup(*self._step_twins(high, planned, plan), rounds=5).mean
        if speedup >= MIN_SPEEDUP:
            return plan
        self.stage.say(f"     training: given up, a whole step is {speedup:.2f}× as fast")
        return plan.giving_back(dict.fromkeys(low, f"the plan made a whole training step {speedup:.2f}× as fast"))

    def train_twins(self) -> None:
        """twins/<name>, all trained on from one checkpoint and on the same batches: in high precision, in another high
        precision, and by the plan. Where the plan moves nothing, the first alone."""
        words = {HIGH: "in high precision", OTHER: f"in {self._other}, for comparison", PLANNED: "by the plan"}
        if not self._trains_low:
            words = {HIGH: "in high precision: no kernel makes a training step faster here"}
        for name, how in words.items():
            self.stage.say(f"4/5  trained on {how}")
            if self._is_done(name):
                continue
            trainer, _ = self._trainer(name)
            _load_newest(trainer, self.folder)
            run = RunFolder(self.folder / TWINS / name)
            with run.begun(trainer), matmul_precision(trainer.config.precision):
                if name == PLANNED:
                    self._apply(self._training_plan, trainer.model)
                self._run_steps(trainer, self.config.steps or 0, run)

    def compare(self) -> Comparison:
        """comparison.json. Where a plan moves nothing there is nothing to compare."""
        self.stage.say("5/5  served and compared")
        quality, times = [], []
        if self._trains_low:
            quality.append(self._training_quality())
            times.append(self._training_times())
        if _is_low(serving_plan := Plan.load(self.folder / Goal.SERVING)):
            serving_quality, serving_times = self._serve_both_ways(PLANNED if self._trains_low else HIGH, serving_plan)
            quality.append(serving_quality)
            times.append(serving_times)
        document = self._training_plan.document
        comparison = Comparison(
            model=self.settings.title,
            fingerprint=document.fingerprint,
            environment=current_environment(device_of(self.device)),
            dtype=document.dtype,
            training_steps=self.settings.twin_steps,
            quality=tuple(quality),
            times=tuple(times),
        )
        comparison.save(self.folder)
        return comparison

    def _training_quality(self) -> QualityPair:
        high, other, planned = (self._trained(name).model for name in (HIGH, OTHER, PLANNED))
        batches = list(self.data.test(self.config.batch_size))
        pair = compare_quality(Goal.TRAINING, high, planned, batches, self.config.precision)
        change = compare_quality(Goal.TRAINING, high, other, batches, self.config.precision).change
        return msgspec.structs.replace(pair, other=change)

    def _training_times(self) -> TimePair:
        twins = self._step_twins(self._trained(HIGH), self._trained(PLANNED), self._training_plan)
        return compare_times(Goal.TRAINING, self.config.batch_size, *twins, compiled=self.config.compile)

    def _step_twins(self, high: Trainer, planned: Trainer, plan: Plan) -> tuple[Twin, Twin]:
        """Both trainers with a training step to time, after applying ``plan`` to the second."""
        self._apply(plan, planned.model)
        batch = next(self.data.train(self.config.batch_size))
        return Twin(high.model, lambda: high.step(batch)), Twin(planned.model, lambda: planned.step(batch))

    def _serve_both_ways(self, name: str, plan: Plan) -> tuple[QualityPair, TimePair]:
        """The same weights in high precision and frozen under ``plan``."""
        size, precision = self.config.batch_size, self.config.precision
        high, planned = self._trained(name).model, self._trained(name).model
        high.eval().requires_grad_(False)
        self._apply(plan, planned)
        self.stage.say(f"     {freeze(planned.dense_part, drop_high_precision=True)}")
        quality = compare_quality(Goal.SERVING, high, planned, self.data.test(size), precision)
        batch = next(self.data.test(size))
        twins = [Twin(model, lambda model=model: self._serve(model, batch)) for model in (high, planned)]
        return quality, compare_times(Goal.SERVING, size, *twins, compiled=self.config.compile)

    @cached_property
    def _training_plan(self) -> Plan:
        return Plan.load(self.folder / Goal.TRAINING)

    @property
    def _trains_low(self) -> bool:
        return _is_low(self._training_plan)

    @property
    def _other(self) -> Format:
        return other_precision(Format(self.settings.precision))

    def _trainer(self, name: str = HIGH) -> tuple[Trainer, str]:
        """A trainer of a model with the Mods, with the same weights every time; and a line about what the Mods did."""
        torch.compiler.reset()  # or graphs of all the demo's models would add up to torch's limit, and the last would run eager
        torch.manual_seed(self.settings.seed)
        model = build_model("wukong", self.settings.preset, self.data.schema, **self.settings.model_options)
        changes = apply_mods(model.dense_part, example=example_of(model.to(self.device), self.data, 64))
        config = self.config
        if name == OTHER and self._other is Format.BF16:
            _round_inputs(model.dense_part)
        elif name == OTHER:
            config = replace(config, precision=Precision(self._other))
        return Trainer(model, config), str(changes).partition("\n")[0]

    def _trained(self, name: str) -> Trainer:
        """The weights of twin ``name`` in a model that runs in high precision."""
        trainer, _ = self._trainer()
        _load_newest(trainer, self.folder / TWINS / name)
        return trainer

    def _is_done(self, name: str) -> bool:
        checkpoints = list_checkpoints(RunFolder(self.folder / TWINS / name).checkpoints)
        return bool(checkpoints) and load_checkpoint(checkpoints[-1]).header.step == self.config.steps

    def _apply(self, plan: Plan, model: Recommender) -> None:
        apply_plan(model.dense_part, plan, example=self._example(model))

    def _example(self, model: Recommender) -> tuple[Tensor, ...]:
        return example_of(model, self.data, self.config.batch_size)

    def _run_steps(self, trainer: Trainer, steps: int, run: RunFolder, probe: Probe | None = None) -> None:
        with self.stage.steps() as progress:
            progress.start(trainer.steps_done, steps)
            run_steps(trainer, self.data, steps, run, progress, nullcontext if probe is None else probe.step)

    def _serve(self, model: Recommender, batch: Batch) -> Tensor:
        with torch.no_grad(), autocast(self.config.precision, self.device):
            return model(batch)


def _is_low(plan: Plan) -> bool:
    return any(site.is_low_precision for site in plan.sites)


def _load_newest(trainer: Trainer, run: Path) -> None:
    checkpoint = load_checkpoint(list_checkpoints(RunFolder(run).checkpoints)[-1])
    trainer.load(checkpoint.header.step, checkpoint.tensors)


def _round_inputs(module: nn.Module) -> None:
    """Round the inputs of linear layers to bf16 in an fp32 model, and so the gradients of these inputs. Autocast is hundreds of
    times slower on a CPU without bf16 units."""
    for site in module.modules():
        if isinstance(site, nn.Linear):
            site.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16().to(inputs[0].dtype),))


def _kernels(device: torch.device) -> list[str] | None:
    """On a CPU all but bf16: this is a demo of 8 bits. `loka measure` lets bf16 compete too."""
    if device.type == "cuda":
        return None
    return [name for name in KERNELS.names() if not is_oracle(name) and name != "torch.bf16"]
