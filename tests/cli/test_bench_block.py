"""``loka bench block`` and ``loka bench casts`` on a machine without the GPU they are about."""

import subprocess
import sys

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="refuses only where there is no GPU")
@pytest.mark.parametrize("command", ["block", "casts"])
def test_refused_on_a_cpu_with_the_reason(command: str) -> None:
    done = subprocess.run([sys.executable, "-m", "loka", "bench", command], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "loka: this measures our Triton kernels, and on cpu they cannot run: needs an NVIDIA GPU\n"
