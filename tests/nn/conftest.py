import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    """Each test compiles its own modules; torch counts compilations of one function against a limit."""
    torch.compiler.reset()
