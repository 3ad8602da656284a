"""Why something of a library's could not run, in a line: as a reason, it is the result."""

import re
import sys
from collections.abc import Iterator

import torch

from loka.core.survey import Fault

OUT_OF_MEMORY = "out of memory"
_SAYS_SO = re.compile(r"out[ _]of[ _]memory\b(?! bounds)|ErrorMemoryAllocation|_ALLOC_FAILED", re.IGNORECASE)


def told(failure: BaseException) -> str:
    """That it failed, with what, and what it said."""
    if short := _of_memory(failure):
        return f"{Fault.FAILED}: {OUT_OF_MEMORY}: {_line(short)}"
    bottom = _bottom_of(failure)
    return ": ".join((Fault.FAILED, type(bottom).__name__, *filter(None, [_line(bottom)])))


def reason_of(failure: BaseException) -> str:
    """What it said alone."""
    if _of_memory(failure):
        return OUT_OF_MEMORY
    bottom = _bottom_of(failure)
    return _line(bottom)[:200] or type(bottom).__name__


def is_of_memory(failure: BaseException) -> bool:
    """Whether it, or what led to it, says that memory was short."""
    return _of_memory(failure) is not None


def says_memory_was_short(text: str) -> bool:
    """The same of what is left of an error, in a process that it ended."""
    return _SAYS_SO.search(text) is not None


def _of_memory(failure: BaseException) -> BaseException | None:
    """The error, of those that led to this one, that says that memory was short: torch's, CUDA's, Triton's, cuBLAS's."""
    return next((cause for cause in _causes(failure) if _says_so(cause)), None)


def _says_so(failure: BaseException) -> bool:
    return isinstance(failure, torch.OutOfMemoryError) or (
        isinstance(failure, RuntimeError) and says_memory_was_short(str(failure))
    )


def _bottom_of(failure: BaseException) -> BaseException:
    """What is under torch.compile's own errors, which it wraps others in."""
    causes = list(_causes(failure))
    return next((cause for cause in causes if not _is_of_torch_compile(cause)), causes[-1])


def _causes(failure: BaseException | None) -> Iterator[BaseException]:
    while failure is not None:
        yield failure
        failure = getattr(failure, "inner_exception", None) or failure.__cause__


def _is_of_torch_compile(failure: BaseException) -> bool:
    """Its errors are looked up, not imported: that takes seconds, and where it was never used there are none."""
    errors = sys.modules.get("torch._dynamo.exc")
    return errors is not None and isinstance(failure, errors.TorchDynamoException)


def _line(failure: BaseException) -> str:
    """Its message's first line, or what torch.compile tells of another error in passing."""
    text = str(failure).strip()
    in_passing = re.search(r"\): got (.+)", text) if _is_of_torch_compile(failure) else None
    return in_passing[1] if in_passing else text.partition("\n")[0]
