"""The Record: what Probe learned of a model while it trained, as a whole. Its sites are in ``site_record``."""

import dataclasses
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from loka.core.environment import Environment
from loka.core.errors import InvalidInput, require_kind
from loka.core.recipe import Format
from loka.core.record_file import RecordDocument, read_record, write_record
from loka.core.site_record import Finding, SiteRecord


@dataclass(frozen=True, repr=False)
class Record:
    """What one run of a Probe learned, or several that were merged."""

    fingerprint: str
    environment: Environment
    dtype: Format  # what the model's GEMMs run in
    step_us: float | None  # the median time of a step that was not sampled; None where there was none
    sites: dict[str, SiteRecord]
    findings: tuple[Finding, ...] = ()
    uncovered: tuple[str, ...] = ()  # linear layers, norms and activations that are function calls
    steps_seen: int = 0
    id: str = field(default_factory=lambda: uuid.uuid4().hex)  # a Survey keeps it, to name its Record; "" in old files

    def __repr__(self) -> str:
        seen = f"{len(self.sites)} sites, {self.steps_seen:,} steps, {len(self.findings)} findings"
        return f"<Record on {self.environment.device}: {seen}>"

    def merge(self, other: "Record") -> "Record":
        """The Record of both runs of one model. Weights, findings and, if it has one, step time are this one's: merge into
        the newer."""
        require_kind(other, Record, "the other record", "load it with loka.Record.load(run)")
        if self.fingerprint != other.fingerprint:
            raise InvalidInput(
                f"these are records of two models (fingerprints {self.fingerprint} and {other.fingerprint}): "
                f"merge records of the same sites and shapes"
            )
        if self.dtype != other.dtype:
            raise InvalidInput(
                f"one of these runs multiplied in {self.dtype} and the other in {other.dtype}: kernels would be compared with "
                f"another baseline, so measure each by itself"
            )
        share = self.steps_seen / max(1, self.steps_seen + other.steps_seen)
        return dataclasses.replace(
            self,
            step_us=self.step_us if self.step_us is not None else other.step_us,
            sites=_without_shared({name: site.merge(other.sites[name], share) for name, site in self.sites.items()}),
            uncovered=tuple(dict.fromkeys((*self.uncovered, *other.uncovered))),
            steps_seen=self.steps_seen + other.steps_seen,
            id=uuid.uuid4().hex,
        )

    def save(self, run: str | Path) -> Path:
        """Write record.safetensors into the folder ``run``, whole or not at all."""
        document = RecordDocument(
            fingerprint=self.fingerprint,
            environment=self.environment,
            dtype=self.dtype,
            step_us=self.step_us,
            steps_seen=self.steps_seen,
            sites=tuple(site.facts for site in self.sites.values()),
            rules={name: statistic.rule for site in self.sites.values() for name, statistic in site.statistics.items()},
            findings=self.findings,
            uncovered=self.uncovered,
            id=self.id,
        )
        return write_record(run, document, self.sites)

    @classmethod
    def load(cls, run: str | Path) -> "Record":
        """Read a Record by its folder or by the path of its file."""
        document, sites = read_record(run)
        return cls(
            fingerprint=document.fingerprint,
            environment=document.environment,
            dtype=document.dtype,
            step_us=document.step_us,
            sites=sites,
            findings=document.findings,
            uncovered=document.uncovered,
            steps_seen=document.steps_seen,
            id=document.id,
        )


def _without_shared(sites: "dict[str, SiteRecord]") -> "dict[str, SiteRecord]":
    """The sites without what the merged runs contradict: a norm or an activation found behind several sites belongs to none of
    them, and a site whose output is not read by exactly one, known reader is nobody's producer."""
    followers = Counter(module for site in sites.values() for module in (site.norm, site.activation) if module)
    shared = {module for module, n_sites in followers.items() if n_sites > 1}
    known = {name: site.alone() if shared & {site.norm, site.activation} else site for name, site in sites.items()}
    feeding = {name for name, site in known.items() if len(site.consumers) == 1}
    return {
        name: site if site.producer in feeding else dataclasses.replace(site, producer=None) for name, site in known.items()
    }
