"""A small model, and plans for it written by hand."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from loka.core.environment import current_environment
from loka.core.estimate import Estimate
from loka.core.fingerprint import fingerprint
from loka.core.gemm import Role
from loka.core.plan import BlockPlan, Choice, Goal, Plan, PlanDocument, SitePlan
from loka.core.recipe import Format, Transform
from loka.kernels.device import device_of
from loka.kernels.executor import SiteKernels

HIGH_PRECISION = ("torch.fp32", "torch.fp32_left", "torch.tf32", "torch.bf16")
ROWWISE = SiteKernels.same("reference.rowwise")
MIXED = {
    "bottom": SiteKernels.same("reference.rowwise"),
    "top.0": SiteKernels("reference.tensorwise", "reference.rowwise_e5m2", "reference.tensorwise_e5m2"),
    "top.2": SiteKernels("reference.int8_rowwise", "torch.fp32", "reference.blockwise"),
}


class Tower(nn.Module):
    """Three linear layers and a head, with leading axes in front of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Linear(24, 32)
        self.top = nn.Sequential(nn.Linear(32, 48, bias=False), nn.ReLU(), nn.Linear(48, 32), nn.SiLU())
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.top(self.bottom(x).relu()))


def tower(seed: int = 0) -> Tower:
    torch.manual_seed(seed)
    return Tower()


def batch(rows: int = 40, seed: int = 1) -> Tensor:
    return torch.randn(rows, 24, generator=torch.Generator().manual_seed(seed))


def plan_for(
    model: nn.Module,
    kernels: Mapping[str, SiteKernels | BlockPlan],
    *,
    goal: Goal = Goal.TRAINING,
    vectors: Mapping[str, Tensor] | None = None,
) -> Plan:
    """A plan as made here: the sites of ``kernels`` on theirs, the others in high precision. ``site/center`` in ``vectors``."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    weight = next(model.parameters())
    dtype = Format.BF16 if weight.dtype is torch.bfloat16 else Format.FP32
    sites = tuple(_site(name, linear, kernels.get(name), goal, dtype, vectors or {}) for name, linear in linears.items())
    document = PlanDocument(
        fingerprint=fingerprint((name, m.in_features, m.out_features, m.bias is not None) for name, m in linears.items()),
        environment=current_environment(device_of(weight.device)),
        dtype=dtype,
        goal=goal,
        max_error=dict.fromkeys(Role, 0.2),
        min_speedup=1.05,
        sites=sites,
    )
    return Plan(document, dict(vectors or {}))


def _site(
    name: str,
    linear: nn.Linear,
    how: SiteKernels | BlockPlan | None,
    goal: Goal,
    dtype: Format,
    vectors: Mapping[str, Tensor],
) -> SitePlan:
    roles = list(Role) if goal is Goal.TRAINING else [Role.FPROP]
    names = {
        role: f"torch.{dtype}" if how is None else how.kernel if isinstance(how, BlockPlan) else how.of(role) for role in roles
    }
    estimate = Estimate(0.08, 0.07, 0.09, 50)
    choices = {
        role: Choice(kernel, "by hand", None if kernel in HIGH_PRECISION else estimate) for role, kernel in names.items()
    }
    transform = next((t for t in (Transform.CENTER, Transform.RESCALE) if f"{name}/{t}" in vectors), Transform.NONE)
    return SitePlan(
        name,
        linear.in_features,
        linear.out_features,
        choices,
        baseline_us=100.0,
        time_us=100.0 if how is None else 50.0,
        reason="by hand",
        transform=transform,
        block=how if isinstance(how, BlockPlan) else None,
    )


def check_it_reads_autocasts_dtype(frozen: nn.Module, x: torch.Tensor) -> None:
    y = frozen(x)
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, frozen(x.bfloat16()))
