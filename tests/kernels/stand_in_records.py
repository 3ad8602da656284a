"""Records whose distributions are planted by hand: what ``measure`` asks of a Record, without a Probe."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from planted_sites import PlantedSite
from torch import Tensor

from loka.core.environment import current_environment
from loka.core.fingerprint import fingerprint
from loka.core.recipe import Format
from loka.core.record import Record
from loka.core.site_record import Finding, SiteRecord
from loka.kernels.device import device_of

Draw = Callable[[int, torch.Generator], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class PlantedSiteRecord(SiteRecord):
    """Draws by ``draw`` instead of from statistics."""

    draw: Draw = field(kw_only=True)
    mean: Tensor = field(kw_only=True)
    scale: Tensor = field(kw_only=True)

    @property
    def was_called(self) -> bool:
        return bool(self.calls)

    @property
    def mean_K(self) -> Tensor:
        return self.mean

    @property
    def rescale_K(self) -> Tensor:
        return self.scale

    def sample(self, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        return self.draw(rows, generator)


def site_record(name: str, weight_NK: Tensor, draw: Draw | None = None, **facts: Any) -> PlantedSiteRecord:
    n, k = weight_NK.shape

    def normal(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        x_MK, dy_MN = (torch.randn(rows, size, generator=generator, device=generator.device) for size in (k, n))
        return x_MK, 1e-3 * dy_MN

    defaults: dict[str, Any] = {
        "has_bias": False,
        "is_head": False,
        "trains": True,
        "calls": {128: 1.0},
        "bias_N": None,
        "statistics": {},
        "mean": torch.zeros(k),
        "scale": torch.ones(k),
    }
    return PlantedSiteRecord(name=name, k=k, n=n, weight_NK=weight_NK, draw=draw or normal, **{**defaults, **facts})


def planted_record(name: str, plant: Callable[[int, int], PlantedSite]) -> PlantedSiteRecord:
    """A site of ``planted_sites`` whose every draw is a new one of the same distribution."""
    site = plant(0, 128)
    is_center = site.transform == "center"

    def draw(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        normal = torch.randn(rows, site.weight_NK.shape[1], generator=generator)
        x_MK = site.vector_K + normal if is_center else site.vector_K * normal
        dy_MN = 1e-3 * torch.randn(rows, site.weight_NK.shape[0], generator=generator)
        return x_MK, dy_MN - dy_MN.mean(0)

    mean_K = site.vector_K if is_center else torch.zeros_like(site.vector_K)
    return site_record(name, site.weight_NK, draw, mean=mean_K, scale=torch.ones_like(mean_K) if is_center else site.vector_K)


def record_of(*sites: SiteRecord, dtype: Format = Format.FP32, findings: tuple[Finding, ...] = (), **fields: Any) -> Record:
    """A Record of this machine."""
    facts = [(site.name, site.k, site.n, site.has_bias) for site in sites]
    environment = current_environment(device_of(torch.device("cpu")))
    by_name = {site.name: site for site in sites}
    return Record(fingerprint(facts), environment, dtype, sites=by_name, findings=findings, **{"step_us": None, **fields})


def normal_weight(n: int = 96, k: int = 128, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) / k**0.5
