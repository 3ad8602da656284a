"""Workloads by name: ours as ``wukong-small@synthetic`` (model, size, data), a user's as ``package.module:function``."""

import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.core.errors import InvalidInput, UnknownName
from loka.core.names import did_you_mean
from loka.core.workload import Workload
from loka.data.batch import Batch
from loka.data.dataset import DATASETS, Dataset, open_dataset
from loka.kernels.device import device_named
from loka.models.registry import MODELS, PRESETS, build_model
from loka.train.config import Precision
from loka.train.precision import autocast

BATCH_SIZE = 2048


@dataclass(frozen=True)
class BuiltInOptions:
    """Options of our own workloads. For a workload of theirs, users decide all this in the function that makes it."""

    data_path: str | Path | None = None
    batch_size: int | None = None
    precision: Literal["fp32", "bf16"] | None = None  # by default bf16 on a GPU, fp32 on a CPU
    device: str | None = None
    seed: int | None = None


def open_workload(name: str, options: BuiltInOptions | None = None) -> Workload:
    """The workload of that name: one of ours, or what the function at ``package.module:function`` returns."""
    options = options or BuiltInOptions()
    if ":" not in name:
        return _built_in(name, options)
    given = [field.name for field in fields(options) if getattr(options, field.name) is not None]
    if given:
        raise InvalidInput(
            f"{', '.join(given)} cannot be set for {name} from outside: it is decided where that workload is made"
        )
    return _own(name)


def built_in_names() -> list[str]:
    return [f"{model}-{preset}@{data}" for model in MODELS.names() for preset in PRESETS for data in DATASETS.names()]


@dataclass(frozen=True)
class Stream:
    """A data set's training batches, the same from the start each time they are iterated."""

    data: Dataset
    batch_size: int

    def __iter__(self) -> Iterator[Batch]:
        return self.data.train(self.batch_size)


def _built_in(name: str, options: BuiltInOptions) -> Workload:
    known = built_in_names()
    if name not in known:
        raise UnknownName(
            f"no workload is called {name!r}.{did_you_mean(name, known)} Ours are MODEL-SIZE@DATA with a model of "
            f"{', '.join(MODELS.names())}, a size of {', '.join(PRESETS)} and data of {', '.join(DATASETS.names())}; "
            f"your own is package.module:function"
        )
    model_name, _, data_name = name.partition("@")
    model_name, _, preset = model_name.rpartition("-")
    device = device_named(options.device or "auto")
    precision = Precision(options.precision or ("bf16" if device.type == "cuda" else "fp32"))
    seed = options.seed or 0
    data = open_dataset(data_name, path=options.data_path, seed=seed, device=device)
    torch.manual_seed(seed)
    model = build_model(model_name, preset, data.schema).to(device)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with autocast(precision, device):
            logits_B = model(batch)
        return F.binary_cross_entropy_with_logits(logits_B, batch.label_B)

    return Workload(model, Stream(data, BATCH_SIZE if options.batch_size is None else options.batch_size), loss)


def _own(name: str) -> Workload:
    """A user's workload. What the user's own code raises passes through, with its traceback."""
    module_name, _, function_name = name.partition(":")
    if not module_name or module_name.startswith("."):
        raise InvalidInput(f"{name!r} names no module: give package.module:function, without a path or a dot in front")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as ``python -m`` does: a workload mostly lies where the command is run
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports something that is not
        raise InvalidInput(
            f"there is no module {module_name!r} (of {name}): give package.module:function, and run this in the folder that "
            f"holds the package"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [name for name, value in vars(module).items() if callable(value)]
        hint = did_you_mean(function_name, functions) or " It must return a loka.Workload"
        raise InvalidInput(f"{module.__file__} has no function {function_name!r}.{hint}")
    workload = function()
    if not isinstance(workload, Workload):
        raise InvalidInput(f"{name} returned a {type(workload).__name__}: it must return loka.Workload(model, batches, loss)")
    if not isinstance(workload.model, nn.Module):
        raise InvalidInput(f"the model of {name} is a {type(workload.model).__name__}, not a torch.nn.Module")
    if not callable(workload.loss):
        raise InvalidInput(f"the loss of {name} is a {type(workload.loss).__name__}: it must be a function of model and batch")
    if not isinstance(workload.batches, Iterable) and not hasattr(workload.batches, "__getitem__"):
        kind = type(workload.batches).__name__
        raise InvalidInput(f"the batches of {name} are a {kind}: give a list, a DataLoader, or whatever can be iterated anew")
    return workload
