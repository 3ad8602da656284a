"""The process that ``loka.measure.trial`` tries kernels in: a problem a line in, an answer a line out."""

import importlib
import os
import sys
from typing import BinaryIO

import msgspec
import torch

from loka.kernels.contract import KERNELS
from loka.measure.parts import Option, SiteParts, SiteTensors, told
from loka.measure.trial import Answer, Trial
from loka.numerics.formats import torch_dtype


def run(trial: Trial) -> Answer:
    """The kernel's product of normal values, waited for."""
    if trial.kernel not in KERNELS:
        try:
            importlib.import_module(trial.module)
        except ImportError:
            return Answer(tried=False)
        if trial.kernel not in KERNELS:
            return Answer(tried=False)
    device = torch.device(trial.device)
    tensors = SiteTensors.random(
        trial.shape, torch_dtype(trial.dtype), device, weight_dtype=torch_dtype(trial.weight_dtype), copies=1
    )
    try:
        SiteParts(tensors).multiply(Option(trial.kernel, trial.role))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as failure:  # any library's any error: the reason is the result
        return Answer(told(failure), broken=not is_well(device))
    return Answer()


def is_well(device: torch.device) -> bool:
    """After some failures every later call on the GPU fails, until the process ends."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception:
        return False
    return True


def answer_all(answers: BinaryIO) -> None:
    def say(answer: Answer) -> None:
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()

    say(Answer())  # ready
    for line in sys.stdin.buffer:
        say(run(msgspec.json.decode(line, type=Trial)))


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "wb") as pipe:
        os.dup2(2, 1)  # what libraries print is no answer
        answer_all(pipe)
