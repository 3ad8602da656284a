"""The files of a run: ``metrics.jsonl``, ``checkpoints/`` and ``summary.json`` in one folder, consistent after any kill."""

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loka.core.errors import InvalidFile, InvalidInput
from loka.core.files import atomic_write, require_folder
from loka.core.gemm import Role
from loka.core.locking import lock
from loka.dispatch.guard import GuardEvent
from loka.train.checkpoint import (
    SCHEMA,
    Checkpoint,
    Header,
    check_same_run,
    list_checkpoints,
    load_checkpoint,
    remove_leftovers,
    save_checkpoint,
)
from loka.train.metrics import Metrics
from loka.train.trainer import Trainer


@dataclass(frozen=True)
class LogRow:
    """One line of ``metrics.jsonl``; a NaN is written as null."""

    step: int  # steps done
    window: Metrics  # since the line before
    lifetime: Metrics
    samples_per_s: float
    given_back: tuple[GuardEvent, ...] = ()  # sites that returned to high precision since the line before


class _GivenBack(msgspec.Struct):
    """A GuardEvent as it was written: an error that was not finite, as its data was not, is null."""

    step: int
    site: str
    role: Role
    error: float | None
    recorded_error: float | None
    bound: float

    def event(self) -> GuardEvent:
        error, recorded = (math.nan if value is None else value for value in (self.error, self.recorded_error))
        return GuardEvent(self.step, self.site, self.role, error, recorded, self.bound)


class _GuardedRow(msgspec.Struct):
    """The part of a line that a resumed run needs."""

    given_back: tuple[_GivenBack, ...] = ()


class RunFolder:
    """Where a run writes. On resume the metrics file is cut back to the checkpoint, so no step is missing or there twice."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.summary_file = self.path / "summary.json"
        self.lost_metrics_file = self.path / "metrics.lost.jsonl"  # of a run that had to begin again

    def refuse_if_taken(self) -> None:
        if self.metrics_file.exists() or list_checkpoints(self.checkpoints):
            raise InvalidInput(f"{self.path} holds a run already: continue it with --resume, or choose another --out")

    @contextmanager
    def begun(self, trainer: Trainer) -> Iterator[None]:
        """Take ``trainer`` and the folder back to the newest checkpoint, or begin with no metrics if there is none. Until the
        end of the block no other process can use the folder."""
        require_folder(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        with self.metrics_file.open("ab") as file:
            lock(file, self.path)
            remove_leftovers(self.checkpoints)
            checkpoints = list_checkpoints(self.checkpoints)
            if not checkpoints and file.tell():  # it stopped before its first checkpoint, or has lost them
                shutil.copy(self.metrics_file, self.lost_metrics_file)
            file.truncate(self._restore(trainer, checkpoints[-1]) if checkpoints else 0)
            yield

    def _restore(self, trainer: Trainer, path: Path) -> int:
        checkpoint = load_checkpoint(path)
        check_same_run(path, checkpoint.header.config, trainer.identity())
        length = checkpoint.header.metrics_bytes
        if not self.metrics_file.exists() or self.metrics_file.stat().st_size < length:
            raise InvalidFile(
                f"{self.metrics_file} has lost lines written before {path.name}: put it back, or start afresh in another --out"
            )
        trainer.load(checkpoint.header.step, checkpoint.tensors)
        return length

    def given_back(self) -> list[GuardEvent]:
        """All that the Guard has returned to high precision so far."""
        lines = self.metrics_file.read_bytes().splitlines()
        try:
            return [given.event() for line in lines for given in msgspec.json.decode(line, type=_GuardedRow).given_back]
        except msgspec.DecodeError as error:  # if it were skipped, a site that was given back might train in 8 bits
            raise InvalidFile(
                f"{self.metrics_file} is damaged ({error}): put it back, or start afresh in another folder"
            ) from error

    def append(self, row: LogRow) -> None:
        with self.metrics_file.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")

    def save(self, trainer: Trainer) -> Path:
        with self.metrics_file.open("rb+") as file:
            os.fsync(file.fileno())  # lines that the checkpoint counts must not be lost after it is written
            length = os.fstat(file.fileno()).st_size
        header = Header(SCHEMA, trainer.steps_done, trainer.identity(), length)
        return save_checkpoint(self.checkpoints, Checkpoint(header, trainer.tensors()))

    def write_summary(self, summary: dict[str, object]) -> None:
        atomic_write(self.summary_file, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
