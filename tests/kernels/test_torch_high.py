"""bf16 on a CPU that has no code for it: refused where it would take seconds, never to a model that runs in it."""

import pytest

from loka.core.gemm import Device, GemmProblem, Role, SiteShape
from loka.core.recipe import Format
from loka.kernels.contract import KERNELS, why_not
from loka.kernels.providers import torch_high

CPU = Device("cpu", "some CPU")
LARGE, SMALL = SiteShape(2048, 1024, 1024), SiteShape(64, 128, 32)


def refusals(kernel: str, site: SiteShape, model: Format, device: Device) -> set[str | None]:
    return {why_not(KERNELS.get(kernel), GemmProblem.of(role, site, model, device)) for role in Role}


def test_large_bf16_products_of_an_fp32_model_are_refused_where_they_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_high, "_has_fast_bf16", lambda: False)
    (reason,) = refusals("torch.bf16", LARGE, Format.FP32, CPU)
    assert reason is not None
    assert "250 times as long as in fp32" in reason
    for kernel, site, model, device in [
        ("torch.bf16", SMALL, Format.FP32, CPU),
        ("torch.bf16", LARGE, Format.BF16, CPU),
        ("torch.bf16", LARGE, Format.FP32, Device("cuda", "some GPU", (9, 0))),
        ("torch.fp32", LARGE, Format.FP32, CPU),
    ]:
        assert refusals(kernel, site, model, device) == {None}


def test_bf16_is_taken_where_the_cpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_high, "_has_fast_bf16", lambda: True)
    assert refusals("torch.bf16", LARGE, Format.FP32, CPU) == {None}
