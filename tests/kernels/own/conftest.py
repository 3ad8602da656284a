"""Our Triton kernels run interpreted on a CPU, compiled on a GPU; one process can do one of the two."""

import importlib.util

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> torch.device:
    """The interpreter (cpu) or a Hopper GPU (cuda)."""
    device = torch.device(request.param)
    _require(device)
    return device


@pytest.fixture
def interpreter() -> None:
    """For tests that range over shapes, which a GPU would have to compile one by one."""
    _require(torch.device("cpu"))


@pytest.fixture
def gpu() -> torch.device:
    _require(torch.device("cuda"))
    return torch.device("cuda")


def _require(device: torch.device) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs the package triton")
    from loka.kernels.triton.codes import INTERPRETED

    if (device.type == "cpu") != bool(INTERPRETED):
        pytest.skip("Triton interprets in one process and compiles in another: this one does the other")
