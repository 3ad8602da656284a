"""The site executor: casts and GEMMs of one linear layer, strung together for all three roles.

Measure times its parts, Dispatch runs them: what was measured is what runs. The parts are ``cast`` for each of x, dy and
w, and ``multiply`` for each role; every caller composes those two.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.core.errors import InvalidInput
from loka.core.gemm import SOURCES, Role, TensorName
from loka.kernels.casting import cast
from loka.kernels.contract import KERNELS, Kernel, multiply
from loka.kernels.operand import Form, Operand


@dataclass(frozen=True)
class SiteKernels:
    """The kernel of each role, by name. A site that never trains still names all three."""

    fprop: str
    dgrad: str
    wgrad: str

    @classmethod
    def same(cls, name: str) -> "SiteKernels":
        return cls(name, name, name)

    def of(self, role: Role) -> str:
        return {Role.FPROP: self.fprop, Role.DGRAD: self.dgrad, Role.WGRAD: self.wgrad}[role]


class SiteExecutor:
    """Runs one site's GEMMs with given kernels. Stateless: tensors and operands pass through, none is kept."""

    def __init__(self, kernels: SiteKernels) -> None:
        self.kernels: Mapping[Role, Kernel] = {role: KERNELS.get(kernels.of(role)) for role in Role}
        self.forms: Mapping[TensorName, tuple[Form, ...]] = {name: self.forms_for(name, tuple(Role)) for name in TensorName}

    def forms_for(self, name: TensorName, roles: tuple[Role, ...]) -> tuple[Form, ...]:
        """The distinct forms of a tensor that ``roles`` read, each once: this is where casts are shared."""
        forms: dict[Form, None] = {}
        for role in roles:
            for source, form in zip(SOURCES[role], self.operand_forms(role), strict=True):
                if source.tensor is name:
                    forms[form] = None
        return tuple(forms)

    def cast(self, name: TensorName, tensor: Tensor, roles: tuple[Role, ...]) -> dict[Form, Operand]:
        """Every form of ``tensor`` (rows × features) that ``roles`` read."""
        if tensor.ndim != 2:
            raise InvalidInput(f"{name} must be 2-D (rows × features), got shape {tuple(tensor.shape)}: flatten leading axes")
        forms = self.forms_for(name, roles)
        return dict(zip(forms, cast(name, tensor, forms), strict=True))

    def multiply(
        self,
        role: Role,
        a_forms: Mapping[Form, Operand],
        b_forms: Mapping[Form, Operand],
        out_dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> Tensor:
        """The GEMM of ``role``: picks its operands out of the casts of the two tensors it reads."""
        a_form, b_form = self.operand_forms(role)
        return multiply(self.kernels[role], role, a_forms[a_form], b_forms[b_form], out_dtype, bias)

    def operand_forms(self, role: Role) -> tuple[Form, Form]:
        a_spec, b_spec = self.kernels[role].operands(role)
        a_source, b_source = SOURCES[role]
        return Form(a_spec, a_source.transposed), Form(b_spec, b_source.transposed)
