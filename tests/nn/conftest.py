import sys
from pathlib import Path

import pytest
import torch
from emulated_block import emulate

from loka.kernels.casting import CASTERS

sys.path.insert(0, str(Path(__file__).parent))  # found_lines, which test files of this folder share


@pytest.fixture
def fresh_compiler() -> None:
    """For tests that compile a module each: torch counts compilations of one function against a limit."""
    torch.compiler.reset()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def fused_on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where fused blocks run as such: on a Hopper GPU by their kernels, on a CPU by their emulation."""
    if request.param == "cpu":
        emulate(monkeypatch)
    return torch.device(request.param)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """For tests of what no device changes."""
    emulate(monkeypatch)
    return torch.device("cpu")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernels_on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where fused blocks run by their kernels: a Hopper GPU, or Triton's interpreter, slow and so for few small tensors."""
    pytest.importorskip("triton")
    from loka.kernels.triton.codes import INTERPRETED

    if (request.param == "cpu") != bool(INTERPRETED):
        pytest.skip("Triton interprets in one process and compiles in another: this one does the other")
    if request.param == "cpu":
        monkeypatch.setattr("loka.nn.fused_spec.missing_triton", lambda device: None)
    return torch.device(request.param)


@pytest.fixture
def device(kernels_on: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where our kernels cast weights, of any size in a step of theirs: on a CPU interpreted, and if told to."""
    monkeypatch.setattr("loka.nn.adamw.WORTH_IT", 0)
    if kernels_on.type == "cpu":
        monkeypatch.setattr("loka.nn.linear.rewriter_of", lambda *args: CASTERS.get("triton"))
    return kernels_on


HOLDERS = ("loka.nn.linear.LokaLinear", "loka.nn.fused_block.FusedBlock")


@pytest.fixture
def never_cast_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in HOLDERS:
        monkeypatch.setattr(f"{kind}.recast_after_step", lambda self: pytest.fail("the weight was read once more"))


@pytest.fixture
def never_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in HOLDERS:
        monkeypatch.setattr(f"{kind}.step_and_recast", lambda self, adam: pytest.fail("stepped by our kernels"))
