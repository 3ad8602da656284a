"""The devices of this machine, as kernels see them."""

import platform
from functools import lru_cache

import torch

from loka.core.gemm import Device


@lru_cache
def device_of(device: torch.device) -> Device:
    if device.type == "cuda":
        return Device("cuda", torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    return Device(device.type, _cpu_name() if device.type == "cpu" else device.type)


def default_device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@lru_cache
def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith(("model name", "Model Name"))]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
