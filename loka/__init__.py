"""LoKA: 8-bit arithmetic made practical for large recommendation models.

Names load on first use, so ``import loka`` costs neither torch nor CUDA.
"""

import importlib
from typing import TYPE_CHECKING

from loka.core.version import __version__

if TYPE_CHECKING:  # the same names for type checkers, which do not run __getattr__
    from loka.core.errors import LokaError
    from loka.core.plan import Plan
    from loka.core.record import Record
    from loka.core.survey import Survey
    from loka.core.workload import Workload
    from loka.dispatch.apply import apply_plan, restore
    from loka.dispatch.check import check_plan
    from loka.dispatch.freeze import freeze
    from loka.dispatch.guard import Guard
    from loka.kernels.ops import load_ops
    from loka.measure.survey import measure
    from loka.mods.apply import apply_mods
    from loka.nn.adamw import AdamW
    from loka.nn.block_norm import BlockNorm
    from loka.nn.fused_block import FusedBlock, FusedChain
    from loka.nn.linear import LokaLinear
    from loka.nn.weight_casts import refresh
    from loka.planner.plan import make_plan
    from loka.probe.probe import Probe
    from loka.report.write import write_report

_HOMES = {
    "Probe": "loka.probe.probe",
    "Record": "loka.core.record",
    "Workload": "loka.core.workload",
    "AdamW": "loka.nn.adamw",
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
    "AdamW",
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
