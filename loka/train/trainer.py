"""The state of a training run and its one step: forward, backward, two optimizers, metrics. Never waits for the device."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.core.errors import InvalidFile, InvalidInput
from loka.data.batch import Batch
from loka.models.recommender import Recommender
from loka.train.config import TrainConfig
from loka.train.metrics import MetricSums
from loka.train.nonfinite import LossWatch
from loka.train.optim import RowWiseAdagrad, learning_rate, make_dense_optimizer, named_state, set_learning_rate
from loka.train.precision import autocast, resolve_device


class Trainer:
    """A model with its optimizers, metrics and position in the data: all that a checkpoint holds."""

    def __init__(self, model: Recommender, config: TrainConfig) -> None:
        self.config = config
        self.device = resolve_device(config.device, config.precision)
        self.model = model.to(self.device).train()
        if config.cuda_graphs and self.device.type != "cuda":
            raise InvalidInput(f"cuda_graphs needs an NVIDIA GPU, and the run is on {self.device}: leave it out")
        if config.compile:
            model.dense_part.compile(mode="reduce-overhead" if config.cuda_graphs else None)
        self.dense_optimizer = make_dense_optimizer(model.dense_part, config.lr, config.weight_decay)
        self.embedding_optimizer = RowWiseAdagrad(model.embeddings.parameters(), config.embedding_lr)
        self.loss_watch = LossWatch(self.device)
        self.embedding_optimizer.found_inf = self.loss_watch.found_inf
        self.dense_optimizer.found_inf = self.loss_watch.found_inf  # pyrefly: ignore[missing-attribute]
        self.window, self.lifetime = MetricSums(self.device), MetricSums(self.device)
        self.steps_done = 0

    def step(self, batch: Batch) -> None:
        """Learn from one batch. Metrics count the predictions before the update, so of examples not yet learned from."""
        if not len(batch):
            raise InvalidInput(f"the batch of step {self.steps_done} is empty")
        self._set_learning_rates()
        with autocast(self.config.precision, self.device):
            logits_B = self.model(batch)
        loss = F.binary_cross_entropy_with_logits(logits_B, batch.label_B)
        loss.backward()
        self.loss_watch.see(loss, self.steps_done)
        for optimizer in (self.dense_optimizer, self.embedding_optimizer):
            optimizer.step()
            optimizer.zero_grad()
        self.window.add(logits_B, batch.label_B, batch.teacher_logit_B)
        self.steps_done += 1

    def _set_learning_rates(self) -> None:
        config = self.config
        for optimizer, lr in [(self.dense_optimizer, config.lr), (self.embedding_optimizer, config.embedding_lr)]:
            now = learning_rate(
                lr, self.steps_done, warmup_steps=config.warmup_steps, decay_steps=config.decay_steps, steps=config.steps
            )
            set_learning_rate(optimizer, now)

    def identity(self) -> dict[str, object]:
        return self.config.identity(self.device.type)

    def tensors(self) -> dict[str, Tensor]:
        """Everything a bit-identical continuation needs, by name; the tensors themselves and not copies."""
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        parts = {
            "model": self.model.state_dict(),
            "dense_optimizer": named_state(self.dense_optimizer, self.model.dense_part),
            "embedding_optimizer": named_state(self.embedding_optimizer, self.model.embeddings),
            "window": self.window.tensors(),
            "lifetime": self.lifetime.tensors(),
            "random": random,
        }
        return {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}

    def load(self, steps_done: int, tensors: dict[str, Tensor]) -> None:
        """Take over the state that ``tensors`` gave; names or shapes of another model are an ``InvalidFile``."""
        parts: dict[str, dict[str, Tensor]] = {}
        for full_name, tensor in tensors.items():
            part, _, name = full_name.partition("/")
            parts.setdefault(part, {})[name] = tensor
        wanted = ("model", "dense_optimizer", "embedding_optimizer", "window", "lifetime", "random")
        if lost := [part for part in wanted if part not in parts]:
            raise InvalidFile(f"the checkpoint of step {steps_done} holds no {lost[0]}: delete it to go on from an older one")
        try:
            self.model.load_state_dict(parts["model"])
        except RuntimeError as error:
            raise InvalidFile(f"the checkpoint's weights do not fit the model, which has changed since: {error}") from error
        _load_state(self.dense_optimizer, self.model.dense_part, parts["dense_optimizer"])
        _load_state(self.embedding_optimizer, self.model.embeddings, parts["embedding_optimizer"])
        self.window.load(parts["window"])
        self.lifetime.load(parts["lifetime"])
        torch.set_rng_state(parts["random"]["cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(parts["random"]["cuda"], self.device)
        self.steps_done = steps_done


def _load_state(optimizer: torch.optim.Optimizer, module: nn.Module, tensors: dict[str, Tensor]) -> None:
    parameters = dict(module.named_parameters())
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition(".")
        parameter = parameters[name]
        optimizer.state[parameter][key] = tensor.to(parameter.device)
