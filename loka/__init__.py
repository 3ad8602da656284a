"""LoKA: 8-bit arithmetic made practical for large recommendation models.

Names load on first use, so ``import loka`` costs neither torch nor CUDA.
"""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "Probe": "loka.probe.probe",
    "Record": "loka.core.record",
    "Workload": "loka.core.workload",
    "BlockNorm": "loka.nn.block_norm",
    "apply_mods": "loka.mods.apply",
    "FusedBlock": "loka.nn.fused_block",
    "FusedChain": "loka.nn.fused_block",
    "LokaLinear": "loka.nn.linear",
    "refresh": "loka.nn.weight_casts",
    "LokaError": "loka.core.errors",
    "measure": "loka.measure.survey",
    "Survey": "loka.core.survey",
    "make_plan": "loka.planner.plan",
    "apply_plan": "loka.dispatch.apply",
    "restore": "loka.dispatch.apply",
    "check_plan": "loka.dispatch.check",
    "freeze": "loka.dispatch.freeze",
    "load_ops": "loka.kernels.ops",
    "Guard": "loka.dispatch.guard",
    "Plan": "loka.core.plan",
    "write_report": "loka.report.write",
}

__all__ = [
    "BlockNorm",
    "FusedBlock",
    "FusedChain",
    "Guard",
    "LokaError",
    "LokaLinear",
    "Plan",
    "Probe",
    "Record",
    "Survey",
    "Workload",
    "__version__",
    "apply_mods",
    "apply_plan",
    "check_plan",
    "freeze",
    "load_ops",
    "make_plan",
    "measure",
    "refresh",
    "restore",
    "write_report",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'loka' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
