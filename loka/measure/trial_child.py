"""The process that ``loka.measure.trial`` tries kernels in: a problem a line in, an answer a line out."""

import importlib
import os
import sys
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import BinaryIO

import msgspec
import torch

from loka.kernels.contract import KERNELS
from loka.measure.block_parts import block_calls, random_block, room_to_compile
from loka.measure.parts import SHARERS, Option, SiteParts, SiteTensors, is_worth_sharing, told
from loka.measure.trial import Answer, AnyTrial, BlockTrial, Trial
from loka.nn.fused_block import FusedBlock
from loka.numerics.formats import torch_dtype


def run(trial: AnyTrial) -> Answer:
    """The answer to one line: everything that will be timed, run once on normal values and waited for."""
    if isinstance(trial, Trial) and not _is_known(trial):
        return Answer()  # not tried, for the reason that try_kernels gives
    device = torch.device(trial.device)
    try:
        _run_block(trial, device) if isinstance(trial, BlockTrial) else _run_kernel(trial, device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as failure:  # any library's any error: the reason is the result
        return Answer(told(failure), broken=not is_well(device))
    return Answer()


def _is_known(trial: Trial) -> bool:
    if trial.kernel not in KERNELS:
        try:
            importlib.import_module(trial.module)
        except ImportError:
            return False
    return trial.kernel in KERNELS


def _run_kernel(trial: Trial, device: torch.device) -> None:
    """The kernel's product, and the casts that share a read with other roles' ones."""
    tensors = SiteTensors.random(
        trial.shape, torch_dtype(trial.dtype), device, weight_dtype=torch_dtype(trial.weight_dtype), copies=1
    )
    parts, option = SiteParts(tensors), Option(trial.kernel, trial.role)
    parts.multiply(option)
    for name, (role, other_role) in SHARERS.items():
        if role is not option.role:
            continue
        for kernel in (trial.kernel, *(kernel for kernel in trial.beside if kernel in KERNELS)):
            own, other = option.form_of(name), Option(kernel, other_role).form_of(name)
            assert own is not None
            assert other is not None
            pair = own, other
            if is_worth_sharing(own, other) and not any(parts.is_compiled(name, form) for form in pair):
                with nullcontext() if kernel == trial.kernel else suppress(Exception):  # whose fault it is, measuring tells
                    parts.cast(name, pair, 0)


def _run_block(trial: BlockTrial, device: torch.device) -> None:
    block = random_block(trial.shape, device)
    assert isinstance(block, FusedBlock), block
    with room_to_compile():
        for call in block_calls(trial.shape, block, copies=1).values():
            call(0)
    if trial.error_rows != trial.shape.site.m:
        fewer = replace(trial.shape, site=replace(trial.shape.site, m=trial.error_rows))
        block_calls(fewer, block, copies=1)["training"](0)


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
        say(run(msgspec.json.decode(line, type=AnyTrial)))


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "wb") as pipe:
        os.dup2(2, 1)  # what libraries print is no answer
        answer_all(pipe)
