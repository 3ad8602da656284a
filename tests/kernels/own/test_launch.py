"""Launches go to the GPU that their tensors lie on."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from loka.kernels.triton.launch import on_its_gpu


def test_the_first_arguments_gpu_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [torch.device("cuda", 0)]

    @contextmanager
    def device(other: torch.device):  # type: ignore[no-untyped-def]
        current.append(other)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1].index)
    launched = on_its_gpu(lambda x, factor=1: (current[-1], factor))
    on_first, on_second = (
        SimpleNamespace(is_cuda=True, device=torch.device("cuda", index), get_device=lambda index=index: index)
        for index in range(2)
    )
    assert launched(on_second, factor=3) == (torch.device("cuda", 1), 3)
    assert launched(on_first, factor=3) == (torch.device("cuda", 0), 3)
    assert launched(torch.ones(2), factor=3) == (torch.device("cuda", 0), 3)
    assert current == [torch.device("cuda", 0)]


@pytest.mark.gpu
def test_kernels_run_on_a_gpu_that_is_not_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU here")
    from loka.nn.fused_steps import cast_weight

    weight_NK = torch.randn(256, 512, device="cuda:1")
    codes = cast_weight(weight_NK)
    torch.testing.assert_close(codes.codes_NK.float() * codes.scale_N.view(-1, 1), weight_NK, rtol=0.07, atol=1e-3)
