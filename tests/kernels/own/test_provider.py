"""Our kernels behind the contract: who may use them, and that they hold to it."""

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


@pytest.mark.parametrize("capability", [(8, 9), (10, 0)], ids=str)
def test_other_gpus_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(provider, "_not_installed", lambda: None)
    device = Device("cuda", "another GPU", capability)
    reason = f"written for Hopper's tensor cores (sm_90), this is sm_{device.sm}"
    assert {KERNELS.get(name).missing(device) for name in OURS} == {reason}
    form = Form(OperandSpec(Format.E4M3, Scaling.ROWWISE, contraction_multiple=16), False)
    assert CASTERS.get("triton").why_not(form, CastProblem(TensorName.X, 64, 64, Format.BF16, device)) == reason


@pytest.mark.gpu
@pytest.mark.parametrize("site", SITES, ids=str)
@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("name", OURS)
def test_products_are_the_oracles(gpu: torch.device, name: str, role: Role, site: SiteShape) -> None:
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
