import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # plans, which test files of this folder share


@pytest.fixture
def fresh_compiler() -> None:
    """For tests that compile a module each: torch counts compilations of one function against a limit."""
    torch.compiler.reset()
