"""How large a demo is: what shows LoKA in a few minutes on the machine at hand."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from loka.core.plan import Goal
from loka.train.config import Option, Precision, TrainConfig


@dataclass(frozen=True)
class DemoSettings:
    """How large a demo is. Each goal has a plan in its own folder; the plan.json in the run's folder is that for ``goal``."""

    preset: str
    goal: Goal
    batch_size: int
    probe_steps: int
    twin_steps: int
    test_batches: int
    precision: Precision = Precision.FP32
    compile: bool = False  # and replay as CUDA graphs: for a GPU alone
    model_options: dict[str, Option] = field(default_factory=dict)
    unlike_preset: str = ""  # what ``model_options`` make of the model, in a word or two
    checkpoint_every: int = 50
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
            cuda_graphs=self.compile,
            warmup_steps=self.probe_steps // 2,
            decay_steps=self.twin_steps,  # so that twins which differ by chance alone end near each other
            seed=self.seed,
            device=self.device,
            log_every=max(1, self.twin_steps // 40),
            checkpoint_every=self.checkpoint_every,
            out=str(out),
        )

    @property
    def title(self) -> str:
        unlike = f" ({self.unlike_preset})" if self.unlike_preset else ""
        return f"Wukong {self.preset}{unlike} on the synthetic stream"


def settings_for(device: torch.device) -> DemoSettings:
    """What shows LoKA in a few minutes: on a CPU INT8 in serving, on a GPU FP8 in training."""
    if device.type == "cuda":
        # Layers are alike: half of them take half the compiling and half of a checkpoint's gigabytes.
        fewer: dict[str, Option] = {"n_layers": 2}
        return DemoSettings(
            "base", Goal.TRAINING, 8192, 160, 160, 16, Precision.BF16, compile=True,
            model_options=fewer, unlike_preset="2 layers", checkpoint_every=160,
        )  # fmt: skip
    is_fast = torch.backends.cpu.get_cpu_capability() == "AVX512"  # others are several times as slow
    # The preset's own layers are too narrow to be worth a cast; with these, GEMMs take most of the time, as in real models.
    widths = (1536, 768) if is_fast else (1024, 512)
    # Rows of a batch, steps under the Probe and of each twin, batches to compare them on.
    sizes = (1024, 120, 80, 48) if is_fast else (512, 60, 40, 48)
    wider: dict[str, Option] = {"fmb_widths": widths, "top_widths": widths}
    return DemoSettings("small", Goal.SERVING, *sizes, model_options=wider, unlike_preset="wider")
