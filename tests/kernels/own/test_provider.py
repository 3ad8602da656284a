"""Our kernels behind the contract: gated until a GPU has passed them, and held to it past the gate."""

import pytest
import torch
from contract_check import check_product

from loka.core.gemm import Device, GemmProblem, Role, SiteShape, TensorName
from loka.core.recipe import Format, Scaling
from loka.kernels.casting import CASTERS, CastProblem
from loka.kernels.contract import KERNELS
from loka.kernels.device import device_of
from loka.kernels.operand import Form, OperandSpec
from loka.kernels.providers import triton as provider

OURS = [name for name in KERNELS.names() if name.startswith("triton.")]
SITES = [SiteShape(2048, 256, 768), SiteShape(300, 200, 100), SiteShape(1, 16, 1)]


def test_nothing_is_offered_before_it_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "_not_installed", lambda: None)
    device = Device("cuda", "NVIDIA H200", (9, 0))
    assert {KERNELS.get(name).missing(device) for name in OURS} == {provider.UNVERIFIED}
    form = Form(OperandSpec(Format.E4M3, Scaling.ROWWISE, contraction_multiple=16), False)
    problem = CastProblem(TensorName.X, 64, 64, Format.BF16, device)
    assert CASTERS.get("triton").why_not(form, problem) == provider.UNVERIFIED


@pytest.mark.gpu
@pytest.mark.parametrize("site", SITES, ids=str)
@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("name", OURS)
def test_products_are_the_oracles(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch, name: str, role: Role, site: SiteShape
) -> None:
    monkeypatch.setattr(provider, "UNVERIFIED", None)
    kernel = KERNELS.get(name)
    problem = GemmProblem.of(role, site, Format.FP32, device_of(gpu))
    if reason := kernel.missing(problem.device) or kernel.why_not(problem):
        pytest.skip(reason)
    tensors = {
        TensorName.X: torch.randn(site.m, site.k, device=gpu).clamp(-16, 16),
        TensorName.DY: 1e-3 * torch.randn(site.m, site.n, device=gpu),
        TensorName.W: site.k**-0.5 * torch.randn(site.n, site.k, device=gpu),
    }
    check_product(kernel, role, tensors, torch.bfloat16)
