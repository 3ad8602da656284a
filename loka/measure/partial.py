"""What a measurement has so far, a line added after every site, so that an interrupted one goes on where it stopped.

Lines, since the cost of a document that is written anew each time would grow with the square of the sites.
"""

import hashlib
import os
from pathlib import Path

import msgspec
import torch

from loka.core.environment import Environment
from loka.core.files import atomic_write
from loka.core.record import Record
from loka.core.site_record import SiteRecord
from loka.core.survey import SiteSurvey, Struct

SCHEMA = "loka.survey-partial/2"
FILE = "survey.partial.jsonl"


class Header(msgspec.Struct, frozen=True):
    """The first line of survey.partial.jsonl."""

    schema: str
    identity: str


class Line(Struct, frozen=True):
    """Each of the others: a site that was measured, or a kernel that broke the process, and how."""

    site: SiteSurvey | None = None
    left_out: tuple[str, str] | None = None


class Partial:
    """The sites measured so far, and the kernels left out. Without a folder they are kept in memory alone."""

    def __init__(self, folder: Path | None, identity: str) -> None:
        self.sites: dict[str, SiteSurvey] = {}
        self.left_out: dict[str, str] = {}
        self._path = None if folder is None else folder / FILE
        header = Header(SCHEMA, identity)
        self._unwritten: list[bytes] | None = [msgspec.json.encode(header)]  # until the first line of this process
        if self._path is not None and self._path.exists():
            self._unwritten += self._read(self._path, header)

    def add(self, site: SiteSurvey) -> None:
        self._write(Line(site=site))

    def leave_out(self, kernel: str, why: str) -> None:
        self._write(Line(left_out=(kernel, why)))

    def remove(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _read(self, path: Path, header: Header) -> list[bytes]:
        """Take what another process left, as far as it is whole and of the same measurement; returns its lines. What cannot be
        read is measured again: nothing is lost but time."""
        taken = []
        try:
            first, *others, _ = path.read_bytes().split(b"\n")  # behind the last newline lies what a kill has cut off
            if msgspec.json.decode(first, type=Header) != header:
                return []
            for text in others:
                self._take(msgspec.json.decode(text, type=Line))
                taken.append(text)
        except (OSError, ValueError, RecursionError):  # msgspec's errors are ValueErrors
            pass
        return taken

    def _take(self, line: Line) -> None:
        if line.site is not None:
            self.sites[line.site.site] = line.site
        if line.left_out is not None:
            self.left_out |= [line.left_out]

    def _write(self, line: Line) -> None:
        self._take(line)
        if self._path is None:
            return
        text = msgspec.json.encode(line)
        if self._unwritten is not None:  # in place of what is there
            atomic_write(self._path, b"\n".join([*self._unwritten, text, b""]))
            self._unwritten = None
            return
        with self._path.open("ab") as file:
            file.write(text + b"\n")
            file.flush()
            os.fsync(file.fileno())


def identity_of(record: Record, kernels: tuple[str, ...], environment: Environment, *, compiled: bool = False) -> str:
    """What must be the same for a measurement to go on: the record and what it learned, kernels, machine and versions."""
    # Facts too: with an example, the same weights and data may have been probed for other heads and blocks.
    sites = {name: [site.facts, _sum(site.weight_NK), _learned(site)] for name, site in record.sites.items()}
    machine = [environment.device, environment.loka, sorted(environment.libraries.items())]
    parts = [record.fingerprint, record.steps_seen, record.dtype, record.findings, kernels, machine, sites, compiled]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]


def _learned(site: SiteRecord) -> list[tuple[str, str, float]]:
    """The same weights may have been probed on other data."""
    return [
        (name, key, _sum(tensor))
        for name, statistic in sorted(site.statistics.items())
        for key, tensor in sorted(statistic.tensors.items())
    ]


def _sum(tensor: torch.Tensor) -> float:
    return tensor.sum(dtype=torch.float64).item()
