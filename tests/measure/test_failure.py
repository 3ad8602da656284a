"""What failures of libraries are told as: memory that was short is recognized in whatever it is wrapped."""

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError, Unsupported

from loka.measure.failure import OUT_OF_MEMORY, reason_of, told
from loka.measure.trial import _is_of_crowding

OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 6 GiB"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    BackendCompilerFailed(print, torch.OutOfMemoryError("Tried to allocate 6 GiB"), None),
    BackendCompilerFailed(print, BackendCompilerFailed(print, RuntimeError("CUDNN_STATUS_ALLOC_FAILED"), None), None),
]


@pytest.mark.parametrize("failure", OF_MEMORY, ids=["torch", "cuBLAS", "Triton", "compiled", "compiled twice"])
def test_memory_that_was_short_is_told_as_that_and_a_trial_that_ran_beside_others_is_tried_again(failure):
    assert reason_of(failure) == OUT_OF_MEMORY
    assert _is_of_crowding(told(failure))


@pytest.mark.parametrize(
    ("failure", "kind", "line"),
    [
        (ValueError("sizes must be multiples of 16\nby the way"), "ValueError", "sizes must be multiples of 16"),
        (BackendCompilerFailed(print, ValueError("no such kernel"), None), "ValueError", "no such kernel"),
        (Unsupported("making a call\n  Explanation: f(*(x,)): got KeyError('no')\n  Hint: …"), "Unsupported", "KeyError('no')"),
        (TorchRuntimeError("when making a call"), "TorchRuntimeError", "when making a call"),
        (AssertionError(), "AssertionError", "AssertionError"),
    ],
)  # fmt: skip
def test_the_first_line_of_what_is_at_the_bottom(failure, kind, line):
    assert reason_of(failure) == line
    assert told(failure) == f"failed: {kind}: {line}"
    assert not _is_of_crowding(told(failure))


def test_what_caused_an_error_of_torch_compile_is_its_reason():
    wrapping = Unsupported("when making a call")
    wrapping.__cause__ = ValueError("not here")
    assert told(wrapping) == "failed: ValueError: not here"
