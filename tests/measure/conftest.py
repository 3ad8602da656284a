import importlib
import sys
from collections.abc import Iterator

import pytest

from loka.kernels.contract import KERNELS


@pytest.fixture
def faulty_kernels() -> Iterator[tuple[str, ...]]:
    """The names of kernels with planted faults, registered for one test."""
    sys.modules.pop("faulty_kernels", None)
    names = importlib.import_module("faulty_kernels").NAMES
    yield names
    for name in names:
        KERNELS.remove(name)
