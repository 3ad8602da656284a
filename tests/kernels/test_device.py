"""Devices by their names: plans measured on one are refused on another."""

import pytest
import torch

from loka.kernels.device import cpu_named_in, device_of

XEON = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R) Processor @ 2.50GHz\nflags\t\t: fpu {}\n"
NEOVERSE = "processor\t: 0\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: {}\n"


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        (XEON.format("avx512_vnni amx_int8"), "Intel(R) Xeon(R) Processor @ 2.50GHz with AMX"),
        (XEON.format("avx512f avx512_vnni"), "Intel(R) Xeon(R) Processor @ 2.50GHz with VNNI"),
        (XEON.format("avx2 avx_vnni"), "Intel(R) Xeon(R) Processor @ 2.50GHz with VNNI"),
        (XEON.format("avx512f"), "Intel(R) Xeon(R) Processor @ 2.50GHz without VNNI"),
        ("processor\t: 0\nmodel name\t: ARMv7 Processor rev 3 (v7l)\nFeatures\t: half neon\n", "ARMv7 Processor rev 3 (v7l)"),
        (NEOVERSE.format("0xd0c"), "Arm Neoverse-N1"),
        (NEOVERSE.format("0xd4f"), "Arm Neoverse-V2"),
        ("processor\t: 0\nBogoMIPS\t: 48.00\n", None),
        ("", None),
    ],
)
def test_a_cpu_is_told_by_its_name(cpuinfo: str, name: str | None) -> None:
    assert cpu_named_in(cpuinfo) == name


def test_cpus_without_a_name_are_told_apart_by_their_numbers() -> None:
    unknown, other = (cpu_named_in(NEOVERSE.format(part)) for part in ("0x123", "0x124"))
    assert unknown is not None
    assert unknown.endswith("0x41 0x123")
    assert unknown != other


def test_this_cpu_has_a_name() -> None:
    assert device_of(torch.device("cpu")).name
