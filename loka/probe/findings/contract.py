"""What a finding is, the registry of them, and all findings of a model's sites."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from loka.core.registry import Registry
from loka.core.site_record import Finding, SiteRecord


@dataclass(frozen=True)
class Found:
    """What stands out at a site, as the end of a sentence that begins with it, its numbers, and what mends it."""

    message: str
    numbers: dict[str, float]
    remedy: str | None  # the name of a Mod or a transform; None where there is none


class Detector(Protocol):
    """One kind of finding."""

    def find(self, site: SiteRecord, sites: Mapping[str, SiteRecord]) -> Found | None:
        """What stands out at ``site``, one of ``sites``; None where nothing does."""
        ...


FINDINGS: Registry[Detector] = Registry("finding", "loka.probe.findings")


def find_all(sites: Mapping[str, SiteRecord]) -> tuple[Finding, ...]:
    """The findings of all sites, in their order. Heads have none: they stay in high precision, and Mods leave them alone."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):  # whatever the training around it uses
        return tuple(
            Finding(name, kind, found.message, found.numbers, found.remedy)
            for name, site in sites.items()
            if site.was_called and not site.is_head and _is_finite(site)
            for kind, detector in FINDINGS.items()
            if (found := detector.find(site, sites)) is not None
        )


def _is_finite(site: SiteRecord) -> bool:
    return bool(site.weight_NK.isfinite().all() and site.rms_K.isfinite().all())
