"""Kernels with planted faults. Importing this registers them, as a user's file would: import it inside a fixture only."""

import os
import time
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from loka.core.recipe import Format, Scaling
from loka.kernels.contract import add_kernel
from loka.kernels.operand import Operand
from loka.kernels.providers.reference import Reference

NAMES = ("faulty.raises", "faulty.nan", "faulty.hangs", "faulty.dies", "faulty.wrong_axis")


@dataclass(frozen=True)
class Faulty(Reference):
    is_oracle: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"faulty.{self.variant}"

    def multiply(self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        if self.variant == "raises":
            raise RuntimeError("cutlass cannot implement\nand a long trace")
        if self.variant == "hangs":
            time.sleep(3600)
        if self.variant == "dies":
            os._exit(3)
        if self.variant == "wrong_axis" and b.scale is not None and b.scale.shape[0] == b.scale.shape[1]:
            b = b._replace(scale=b.scale.t().contiguous())
        out = super().multiply(a, b, out_dtype, bias)
        return torch.full_like(out, torch.nan) if self.variant == "nan" else out


for _name in NAMES:
    add_kernel(Faulty(_name.removeprefix("faulty."), Format.E4M3, Scaling.BLOCK_1X128, Scaling.BLOCK_128X128, Format.E4M3))
