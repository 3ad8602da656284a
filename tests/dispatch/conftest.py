import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from loka.nn import fused_block
from loka.nn.fused_block import FusedBlock

sys.path.insert(0, str(Path(__file__).parent))  # plans, which test files of this folder share


@pytest.fixture
def fresh_compiler() -> None:
    """For tests that compile a module each: torch counts compilations of one function against a limit."""
    torch.compiler.reset()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is let go is gone at once, or never: on a GPU its memory is wanted before Python's collector comes by."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def pretended_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is bound as on a GPU, linked as on a GPU, and computes by its reference."""
    monkeypatch.setattr(FusedBlock, "refresh_weight_casts", lambda self: setattr(self, "why_reference", None))

    def run(spec, blocks, entry, outputs, x):  # type: ignore[no-untyped-def]
        x = x if entry is None else entry(x)
        for one in blocks:
            x = one.reference(x)
        return (x,)

    monkeypatch.setattr(fused_block, "_run", run)
