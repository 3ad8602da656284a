"""Checkpoints: one safetensors file each, written whole or not at all, with JSON in its header. Nothing is pickled.

The header's ``loka`` entry is ``{"schema": "loka.checkpoint/1", "step": …, "config": …, "metrics_bytes": …}``.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from loka.core.errors import InvalidFile
from loka.core.files import atomic_path
from loka.core.vectors import write_tensors

SCHEMA = "loka.checkpoint/1"
KEPT = 2  # the newest, and one more in case the newest is lost on its way to another disk


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: str
    step: int  # steps done
    config: dict[str, object]
    metrics_bytes: int  # length of the metrics file at this step; on resume, what a killed run wrote after it is cut off


@dataclass(frozen=True)
class Checkpoint:
    header: Header
    tensors: dict[str, torch.Tensor]  # on the CPU after loading


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write ``step-….safetensors`` and delete all but the newest two."""
    path = folder / f"step-{checkpoint.header.step:09d}.safetensors"
    with atomic_path(path) as temporary:
        tensors = {name: tensor.detach().contiguous() for name, tensor in checkpoint.tensors.items()}
        write_tensors(temporary, tensors, metadata={"loka": msgspec.json.encode(checkpoint.header).decode()})
    for old in list_checkpoints(folder)[:-KEPT]:
        old.unlink()
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(folder.glob("step-*.safetensors"))


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files of a run that was killed while saving: ours, and the one that safetensors writes first."""
    for pattern in (".step-*.safetensors.*.tmp", ".tmp??????"):
        for leftover in folder.glob(pattern):
            leftover.unlink()


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint written by ``save_checkpoint``; anything else is an ``InvalidFile``."""
    remedy = "delete it to resume from the one before, or start afresh with another out folder"
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            header = _read_header(path, metadata.get("loka"))
            return Checkpoint(header, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise InvalidFile(f"{path} is truncated or not a safetensors file ({error}): {remedy}") from error


def _read_header(path: Path, text: str | None) -> Header:
    if text is None:
        raise InvalidFile(f"{path} is a safetensors file, but no checkpoint of LoKA: move it away from the checkpoints")
    try:
        schema = msgspec.json.decode(text, type=_Schema).schema
        if schema != SCHEMA:
            raise InvalidFile(f"{path} has schema {schema!r}, this LoKA reads {SCHEMA!r}: use the version that wrote it")
        return msgspec.json.decode(text, type=Header)
    except msgspec.DecodeError as error:
        raise InvalidFile(f"{path} has a damaged header ({error}): delete it to resume from the checkpoint before") from error


class _Schema(msgspec.Struct):
    schema: str


def check_same_run(path: Path, saved: dict[str, object], wanted: dict[str, object]) -> None:
    """Refuse to continue a run under another config: the result would be neither of the two."""
    names = sorted(saved.keys() | wanted.keys())
    differences = [
        f"{name} was {saved.get(name)!r}, now {wanted.get(name)!r}" for name in names if saved.get(name) != wanted.get(name)
    ]
    if differences:
        raise InvalidFile(
            f"{path} belongs to a run of another config: {'; '.join(differences)}. "
            "Resume with the config it was made with, or start a new run in another out folder"
        )
