"""Fixtures for tests that run on the CPU here and, with ``-m gpu``, on a GPU."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# CI draws the same examples every time, so that a failure there is one of the change; elsewhere each run looks further.
settings.register_profile(
    "loka",
    deadline=None,
    max_examples=12,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("loka")

# Triton reads it when it is first imported: our kernels run interpreted on a CPU, compiled on a GPU.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
torch.set_num_threads(1)  # the tensors here are small: threads would only wait for each other


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """What a test draws does not depend on those that its worker ran before."""
    torch.manual_seed(0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.fail("a gpu test was selected, but torch sees no GPU here")
    return torch.device(request.param)


@pytest.fixture
def without_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process of their own for kernels that are known to be well: it takes seconds to start."""
    monkeypatch.setattr("loka.measure.survey.needs_trial", lambda kernel: False)
