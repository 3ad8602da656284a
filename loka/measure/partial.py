"""What a measurement has so far, written after every site, so that an interrupted one goes on where it stopped."""

import hashlib
from pathlib import Path

import msgspec
import torch

from loka.core.documents import read_document, write_document
from loka.core.environment import Environment
from loka.core.errors import InvalidFile
from loka.core.record import Record, SiteRecord
from loka.core.survey import SiteSurvey, Struct

SCHEMA = "loka.survey-partial/1"
FILE = "survey.partial.json"


class PartialDocument(Struct, frozen=True):
    """survey.partial.json"""

    identity: str
    sites: tuple[SiteSurvey, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()  # kernels that broke the process, and how


class Partial:
    """The sites measured so far. Without a folder they are kept in memory alone."""

    def __init__(self, folder: Path | None, identity: str) -> None:
        self._path = None if folder is None else folder / FILE
        self._document = PartialDocument(identity)
        if self._path is not None and self._path.exists():
            try:
                found = read_document(self._path, SCHEMA, PartialDocument, made_by="loka measure")
            except InvalidFile:
                return  # nothing is lost but time: what was being written by another version is measured again
            if found.identity == identity:
                self._document = found

    @property
    def sites(self) -> dict[str, SiteSurvey]:
        return {site.site: site for site in self._document.sites}

    @property
    def left_out(self) -> dict[str, str]:
        return dict(self._document.left_out)

    def add(self, site: SiteSurvey) -> None:
        self._write(msgspec.structs.replace(self._document, sites=(*self._document.sites, site)))

    def leave_out(self, kernel: str, why: str) -> None:
        self._write(msgspec.structs.replace(self._document, left_out=(*self._document.left_out, (kernel, why))))

    def remove(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _write(self, document: PartialDocument) -> None:
        self._document = document
        if self._path is not None:
            write_document(self._path, SCHEMA, document)


def identity_of(record: Record, kernels: tuple[str, ...], environment: Environment) -> str:
    """What must be the same for a measurement to go on: the record and what it learned, kernels, machine and versions."""
    sites = {name: [site.calls, _sum(site.weight_NK), _learned(site)] for name, site in record.sites.items()}
    machine = [environment.device, environment.loka, sorted(environment.libraries.items())]
    parts = [record.fingerprint, record.steps_seen, record.dtype, kernels, machine, sites]
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
