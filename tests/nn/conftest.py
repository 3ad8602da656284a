import pytest
import torch


@pytest.fixture
def fresh_compiler() -> None:
    """For tests that compile a module each: torch counts compilations of one function against a limit."""
    torch.compiler.reset()
