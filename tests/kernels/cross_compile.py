"""Compiling our kernels for Hopper on a machine without a GPU, and reading what came of it.

A script: takes {name: case} as JSON on standard input, prints {name: registers, spilled_bytes, halved_pairs, …}.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from typing import Any

INSTRUCTIONS = {
    "wgmma e4m3": r"wgmma\.mma_async\S*\.e4m3\.e4m3",
    "wgmma int8": r"wgmma\.mma_async\S*\.s32\.s8\.s8",
    "tma load": r"cp\.async\.bulk\.tensor",
    "load 16 bytes": r"ld\.global\S*\.v4\.b32",
    "load 1 byte": r"ld\.global\S*\.b8",
    "store 1 byte": r"st\.global\S*\.b8",
    "store 16 bytes": r"st\.global\S*\.v4\.b32",
    "barrier": r"bar\.sync",
    "wait": r"griddepcontrol\.wait",
    "lets next start": r"griddepcontrol\.launch_dependents",
    "load": r"\bld\.global",
}


def compile_for_hopper(
    module: str, kernel: str, arguments: dict[str, str], constants: dict[str, Any], warps: int, stages: int, unaligned: str = ""
) -> dict[str, Any]:
    """``arguments`` gives each runtime argument's type as Triton writes it; pointers and sizes but the ``unaligned`` one are
    taken as aligned."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    home = f"loka.{module}" if "." in module else f"loka.kernels.triton.{module}"
    function = getattr(importlib.import_module(home), kernel)
    names = function.arg_names
    assert set(arguments) | set(constants) == set(names), f"{kernel}: {set(names) ^ (set(arguments) | set(constants))}"
    signature = {name: arguments.get(name, "constexpr") for name in names}
    sizes = [name for name, kind in arguments.items() if kind[0] in "*i" and name != unaligned]
    specialized = {parameter.name for parameter in function.params if not parameter.do_not_specialize_on_alignment}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in sizes if name in specialized}
    source = ASTSource(function, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})
    usage = _resource_usage(compiled.asm["cubin"])
    return {
        "registers": usage["REG"],
        "spilled_bytes": usage["STACK"] + usage["LOCAL"],
        "shared_bytes": compiled.metadata.shared,
        "moved_tiles": len(re.findall(r"convert_layout[^\n]*: tensor<\d+x\d+x", compiled.asm["ttgir"])),
        "halved_pairs": len(halved_pairs(compiled.asm["ptx"])),
        "before_waiting": before_waiting(compiled.asm["ptx"]),
        "instructions": {name: len(re.findall(pattern, compiled.asm["ptx"])) for name, pattern in INSTRUCTIONS.items()},
    }


def halved_pairs(ptx: str) -> set[str]:
    """Registers with a pair of e4m3 codes that are packed into a larger one and also used by themselves."""
    pairs = set(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32\s+(%rs\d+)", ptx))
    packed, alone = set(), set()
    for line in ptx.splitlines():
        if "e4m3x2" not in line:
            (packed if "mov.b32" in line else alone).update(pairs.intersection(re.findall(r"%rs\d+", line)))
    return packed & alone


def before_waiting(ptx: str) -> dict[str, int]:
    """Reads and writes of memory before the kernel waits for the one that was launched before it."""
    first = ptx.partition("griddepcontrol.wait")[0]
    patterns = {
        "loads": r"\bld\.global|cp\.async",
        "stores": r"\bst\.global|\b(?:red|atom)\.global",
        "lets next start": r"griddepcontrol\.launch_dependents",
    }
    return {name: len(re.findall(pattern, first)) for name, pattern in patterns.items()}


def _resource_usage(cubin: bytes) -> dict[str, int]:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", printed)}


if __name__ == "__main__":
    cases = json.load(sys.stdin)
    print(json.dumps({name: compile_for_hopper(**case) for name, case in cases.items()}))
