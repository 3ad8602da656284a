"""What failures of libraries are told as: memory that was short is recognized in whatever it is wrapped."""

import subprocess
import sys

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError, Unsupported

from loka.measure.failure import OUT_OF_MEMORY, is_of_memory, reason_of, told

OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 6 GiB"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("cuLaunchKernel: CUDA_ERROR_OUT_OF_MEMORY"),
    RuntimeError("cudaErrorMemoryAllocation"),
    BackendCompilerFailed(print, torch.OutOfMemoryError("Tried to allocate 6 GiB"), None),
    BackendCompilerFailed(print, BackendCompilerFailed(print, RuntimeError("CUDNN_STATUS_ALLOC_FAILED"), None), None),
]


@pytest.mark.parametrize(
    "failure", OF_MEMORY, ids=["torch", "cuBLAS", "Triton", "driver", "runtime", "compiled", "compiled twice"]
)
def test_memory_that_was_short_is_told_as_that(failure):
    assert is_of_memory(failure)
    assert reason_of(failure) == OUT_OF_MEMORY
    assert told(failure).startswith("failed: out of memory: ")


@pytest.mark.parametrize(
    ("failure", "kind", "line"),
    [
        (ValueError("sizes must be multiples of 16\nby the way"), "ValueError", "sizes must be multiples of 16"),
        (BackendCompilerFailed(print, ValueError("no such kernel"), None), "ValueError", "no such kernel"),
        (Unsupported("making a call\n  Explanation: f(*(x,)): got KeyError('no')\n  Hint: …"), "Unsupported", "KeyError('no')"),
        (TorchRuntimeError("when making a call"), "TorchRuntimeError", "when making a call"),
        (RuntimeError("an address is wrong\nit lies out of memory bounds"), "RuntimeError", "an address is wrong"),
        (ValueError("a text that says out of memory"), "ValueError", "a text that says out of memory"),
    ],
)  # fmt: skip
def test_the_first_line_of_what_is_at_the_bottom(failure, kind, line):
    assert not is_of_memory(failure)
    assert reason_of(failure) == line
    assert told(failure) == f"failed: {kind}: {line}"


def test_a_failure_without_a_word():
    assert told(AssertionError()) == "failed: AssertionError"
    assert reason_of(AssertionError()) == "AssertionError"


def test_memory_is_looked_for_in_whatever_led_to_an_error():
    wrapping = ValueError("autotuning failed")
    wrapping.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 6 GiB\nby the way")
    assert reason_of(wrapping) == OUT_OF_MEMORY
    assert told(wrapping) == "failed: out of memory: CUDA out of memory. Tried to allocate 6 GiB"


def test_telling_a_failure_does_not_import_torch_compile():
    """Which takes seconds, in every process that tries a kernel."""
    code = "import sys; from loka.measure.trial_child import run; from loka.measure.failure import told; told(ValueError('no'))"
    code += "; assert 'torch._dynamo' not in sys.modules, 'imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_caused_an_error_of_torch_compile_is_its_reason():
    wrapping = Unsupported("when making a call")
    wrapping.__cause__ = ValueError("not here")
    assert told(wrapping) == "failed: ValueError: not here"
