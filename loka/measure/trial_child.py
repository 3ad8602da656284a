"""The process that ``loka.measure.trial`` tries kernels in: a problem a line in, an answer a line out."""

import importlib
import os
import sys
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import BinaryIO

import msgspec
import torch

from loka.core.gemm import Role, TensorName
from loka.kernels.contract import KERNELS
from loka.kernels.operand import Form
from loka.kernels.providers.torch_casts import room_to_compile
from loka.measure.block_parts import block_calls, random_block
from loka.measure.failure import is_of_memory, told
from loka.measure.parts import SHARERS, Option, SiteParts, SiteTensors, is_worth_sharing
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
        answer = Answer()
    except Exception as failure:  # any library's any error: the reason is the result
        answer = Answer(told(failure), crowded=is_of_memory(failure), broken=not is_well(device))
    if device.type == "cuda" and not answer.broken:
        torch.cuda.empty_cache()  # what a wide layer took is for the other children
    return answer


def _is_known(trial: Trial) -> bool:
    if trial.kernel not in KERNELS:
        try:
            importlib.import_module(trial.module)
        except ImportError:
            return False
    return trial.kernel in KERNELS


def _run_kernel(trial: Trial, device: torch.device) -> None:
    """The kernel's product and casts, with the site's bias and, as its error is taken, without."""
    tensors = SiteTensors.random(
        trial.shape, torch_dtype(trial.dtype), device,
        weight_dtype=torch_dtype(trial.weight_dtype), has_bias=trial.has_bias, copies=1,
    )  # fmt: skip
    parts, option = SiteParts(tensors), Option(trial.kernel, trial.role)
    parts.multiply(option)
    _run_casts(parts, option, trial)
    if trial.has_bias and trial.role is Role.FPROP:
        SiteParts(replace(tensors, bias=None)).multiply(option)
    for transform in trial.transforms:
        with suppress(Exception):  # where it is measured, its failure is told
            behind = replace(option, transform=transform)
            parts.multiply(behind)
            _run_casts(parts, behind, trial)


def _run_casts(parts: SiteParts, option: Option, trial: Trial) -> None:
    """The casts of what ``option`` reads as they are timed: each by itself, and with those of another role that share its read,
    of the same kernel and of those beside it; of a weight in a step of Adam too, where one can make them."""

    def run_cast(name: TensorName, *forms: Form) -> None:
        parts.cast(name, forms, 0)
        if name is TensorName.W and trial.cast_in_step and parts.can_step(forms):
            parts.step(forms, 0)

    for name, (role, other_role) in SHARERS.items():
        own = option.form_of(name)
        if own is None or not own.spec.format.is_8bit or parts.is_compiled(name, own):
            continue
        run_cast(name, own)
        if role is not option.role:
            continue
        for kernel in (option.kernel, *(kernel for kernel in trial.beside if kernel in KERNELS)):
            other = Option(kernel, other_role, option.transform).form_of(name)
            assert other is not None
            if is_worth_sharing(own, other) and not parts.is_compiled(name, other):
                with nullcontext() if kernel == option.kernel else suppress(Exception):  # whose fault it is, measuring tells
                    run_cast(name, own, other)


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
