"""The devices of this machine, as kernels see them."""

import platform
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from loka.core.errors import InvalidInput
from loka.core.gemm import Device

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")

# Cores of one model name multiply in 8 bits two to four times as fast with one of these; clouds give several CPUs one name.
FAST_8_BITS = {"amx_int8": "AMX", "avx512_vnni": "VNNI", "avx_vnni": "VNNI"}
ARM = "0x41"  # the "CPU implementer" of cores by Arm; below, each "CPU part" that servers have
ARM_CORES = {"0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2"}


def constant_when_traced(function: Callable[Parameters, Answer]) -> Callable[Parameters, Answer]:
    """Answer once for the same arguments; torch.compile calls it while it traces, and takes the answer for a constant.

    That is what torch.compiler.assume_constant_result does, but that decorator would import the whole compiler.
    """
    remembered = lru_cache(None)(function)

    def ask(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Answer:
        return remembered(*args, **kwargs)

    ask._dynamo_marked_constant = True  # pyrefly: ignore[missing-attribute]
    return ask


@constant_when_traced
def device_of(device: torch.device) -> Device:
    """The device as kernels see it."""
    if device.type == "cuda":
        return Device("cuda", torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    return Device(device.type, _cpu_name() if device.type == "cpu" else device.type)


def device_named(name: str) -> torch.device:
    """A device as a user names it; ``auto`` is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidInput(f"no device is called {name!r}: use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise InvalidInput(f"LoKA runs on cpu and cuda devices, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(f"{name!r} was asked for, but torch sees no GPU here: use cpu or auto")
    return device


def model_dtype(device: torch.device) -> torch.dtype:
    """The dtype recommendation models are served in: bf16 on a GPU, fp32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def free_bytes(device: torch.device) -> int | None:
    """How much memory is still free for ``device``; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        told = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if told is None else 1024 * int(told[1])


@lru_cache
def _cpu_name() -> str:
    try:
        found = cpu_named_in(Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found or platform.processor() or platform.machine()


def cpu_named_in(cpuinfo: str) -> str | None:
    """The CPU's name by Linux' ``cpuinfo``, and what it multiplies 8 bits with where that says so. For an Arm CPU that has only
    numbers, they make the name: a plan for one CPU must not pass for another's."""
    told = dict(re.findall(r"^(.+?)\s*: (.+)$", cpuinfo, re.MULTILINE))
    if name := told.get("model name") or told.get("Model Name"):
        if (flags := told.get("flags")) is None:  # not x86
            return name
        fast = next((words for flag, words in FAST_8_BITS.items() if flag in flags.split()), None)
        return f"{name} with {fast}" if fast else f"{name} without VNNI"
    maker, part = told.get("CPU implementer"), told.get("CPU part")
    if maker is None or part is None:
        return None
    return f"Arm {ARM_CORES[part]}" if maker == ARM and part in ARM_CORES else f"{platform.machine()} {maker} {part}"
