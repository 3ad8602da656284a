"""Why something of a library's could not run, in a line: as a reason, it is the result."""

import re

import torch
from torch._dynamo.exc import TorchDynamoException

OUT_OF_MEMORY = "out of memory"
_SAYS_SO = re.compile(r"out of memory|\w+_ALLOC_FAILED", re.IGNORECASE)  # CUDA's own, Triton's, cuBLAS's


def told(failure: BaseException) -> str:
    """That it failed, with what, and what it said."""
    bottom = _bottom_of(failure)
    return f"failed: {OUT_OF_MEMORY if _is_of_memory(bottom) else f'{type(bottom).__name__}: {_line(bottom)}'}"


def reason_of(failure: BaseException) -> str:
    """What it said alone."""
    bottom = _bottom_of(failure)
    return OUT_OF_MEMORY if _is_of_memory(bottom) else _line(bottom)[:200]


def _bottom_of(failure: BaseException) -> BaseException:
    """What was at the bottom of it, where torch.compile wraps another error in its own."""
    while isinstance(failure, TorchDynamoException):
        inner = getattr(failure, "inner_exception", None) or failure.__cause__
        if inner is None:
            break
        failure = inner
    return failure


def _is_of_memory(failure: BaseException) -> bool:
    return isinstance(failure, torch.OutOfMemoryError) or (
        isinstance(failure, RuntimeError) and _SAYS_SO.search(str(failure)) is not None
    )


def _line(failure: BaseException) -> str:
    """Its message's first line, or what torch.compile tells of another error in passing."""
    text = str(failure).strip()
    in_passing = re.search(r"\): got (.+)", text) if isinstance(failure, TorchDynamoException) else None
    return in_passing[1] if in_passing else text.partition("\n")[0] or type(failure).__name__
