"""What a training run is: everything that decides its numbers, and where its files go. Imports no torch: the CLI reads it."""

import math
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

import msgspec

from loka.core.errors import InvalidInput
from loka.core.plan import digest_of_plan

Option = str | int | float | tuple[int, ...]  # from a command line it is text, and the model or data set converts it

# A run may be saved or checked more or less often, move to another folder, be launched otherwise: no number depends on that.
_FREE_ON_RESUME = ("checkpoint_every", "guard_every", "out", "data_path", "cuda_graphs")


_LEAST = {"steps": 1, "batch_size": 1, "log_every": 1, "checkpoint_every": 1}
_LEAST |= {"warmup_steps": 0, "decay_steps": 0, "guard_every": 0}
_PAST = 2**62  # beyond what counters and seeds may reach


class Precision(StrEnum):
    FP32 = "fp32"
    TF32 = "tf32"  # stored as fp32, rounded inside the GEMM
    BF16 = "bf16"  # by autocast


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Runs of the same ``seed`` start from the same weights and see the same batches in the same order."""

    model: str
    """wukong, dlrm, dcnv2 or interformer."""
    preset: str = "small"
    """Size of the model: tiny, small, base or large."""
    model_options: dict[str, Option] = field(default_factory=dict)
    """Replace fields of the preset, e.g. --model-options.dropout 0.2."""
    data: str = "synthetic"
    """synthetic, movielens or criteo."""
    data_path: str | None = None
    """Where the data set lies: MovieLens-1M's folder, or Criteo's TSV file."""
    data_options: dict[str, Option] = field(default_factory=dict)
    """Options of the data set, e.g. --data-options.dense raw."""
    steps: int | None = None
    """How many batches to learn from; by default one pass over the training data."""
    batch_size: int = 2048
    """Examples in a batch."""
    lr: float = 1e-3
    """Learning rate of Adam, on the dense part."""
    embedding_lr: float = 0.05
    """Learning rate of row-wise Adagrad, on the embeddings."""
    weight_decay: float = 0.0
    """Decay of the dense part's matrices."""
    warmup_steps: int = 100
    """Steps over which both learning rates rise to their value."""
    decay_steps: int = 0
    """Last steps of the run, over which both learning rates fall to 0."""
    precision: Precision = Precision.FP32
    """Arithmetic of the dense part."""
    compile: bool = False
    """torch.compile the dense part."""
    cuda_graphs: bool = False
    """Replay the compiled dense part as CUDA graphs, where the host launches kernels more slowly than the GPU runs them."""
    mods: tuple[str, ...] = ()
    """Mods to make on the dense part before training, e.g. --mods no_bias block_norm."""
    plan: str | None = None
    """The plan to train by: a folder with plan.json, or its path."""
    guard_every: int = 100
    """Steps between checks of the Guard, which watches a planned run whose record.safetensors lies beside the plan; 0: none."""
    seed: int = 0
    """Decides the first weights and the order of the data."""
    device: str = "auto"
    """cpu, cuda, or auto: CUDA where there is one."""
    log_every: int = 50
    """Steps between lines of metrics."""
    checkpoint_every: int = 500
    """Steps between checkpoints."""
    out: str | None = "run"
    """Folder for metrics, checkpoints and summary."""

    def __post_init__(self) -> None:
        if self.precision not in list(Precision):
            raise InvalidInput(f"precision must be one of {', '.join(Precision)}, got {self.precision!r}")
        object.__setattr__(self, "precision", Precision(self.precision))  # it may be given as text
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidInput(f"{name} must be at least {least}, got {value}")
            if value is not None and value >= _PAST:
                raise InvalidInput(f"{name} must be below 2^62, got {value}")
        if not -_PAST < self.seed < _PAST:
            raise InvalidInput(f"seed must be between -2^62 and 2^62, got {self.seed}")
        if self.out == "":
            raise InvalidInput("out is empty: name a folder (in Python, None writes nothing)")
        for name in ("lr", "embedding_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidInput(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        if self.cuda_graphs and not self.compile:
            raise InvalidInput("cuda_graphs replays what torch.compile made: set compile too")
        if not 0 <= self.weight_decay < math.inf:
            raise InvalidInput(f"weight_decay must be finite and not negative, got {self.weight_decay}")
        if self.plan == "":
            raise InvalidInput("plan is empty: name the folder of a plan, or leave it out")
        if self.plan is not None and not Path(self.plan).exists():
            raise InvalidInput(f"there is no plan at {self.plan}: make one with `loka plan RUN`, and give RUN or RUN/plan.json")
        if self.data_path is not None and not Path(self.data_path).exists():
            raise InvalidInput(f"there is nothing at {self.data_path}: give the path of the {self.data} data")

    def identity(self, device_type: str) -> dict[str, object]:
        """The fields that decide the run's numbers, as JSON holds them: a checkpoint continues only a run with the same."""
        fields = asdict(self) | {"device": device_type, "plan": self.plan and digest_of_plan(self.plan)}
        for name in ("mods", "plan"):  # older checkpoints, from before there were any, have neither field
            if not fields[name]:
                del fields[name]
        if not self.decay_steps:
            del fields["steps"]  # nothing depends on where the run ends, so it may be continued for longer
        return msgspec.json.decode(msgspec.json.encode({k: v for k, v in fields.items() if k not in _FREE_ON_RESUME}))
