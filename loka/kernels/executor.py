"""The site executor: casts and GEMMs of one linear layer, strung together for all three roles.

Measure times its parts, Dispatch runs them: what was measured is what runs. The parts are ``cast`` for each of x, dy and
w, and ``multiply`` for each role; every caller composes those two. Both apply their share of the site's transform.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.core.errors import InvalidInput, UnknownName
from loka.core.gemm import SOURCES, Role, TensorName
from loka.core.recipe import Transform
from loka.kernels.casting import cast, cast_and_sum
from loka.kernels.contract import KERNELS, Kernel, multiply
from loka.kernels.operand import Form, Operand
from loka.kernels.transforms import TransformVectors, changes, shifted_bias, undo_behind


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

    def __init__(self, kernels: SiteKernels, transform: Transform = Transform.NONE) -> None:
        if transform not in list(Transform):
            raise UnknownName(f"no transform is called {transform!r}. Known: {', '.join(Transform)}")
        self.transform = Transform(transform)  # it may be given as text
        self.kernels: Mapping[Role, Kernel] = {role: KERNELS.get(kernels.of(role)) for role in Role}
        # Worked out once: an eager call would spend more time on it than on a small product.
        self._transforms = {role: self._transform_of(role) for role in Role}
        self._operand_forms = {role: self._forms_of(role) for role in Role}
        self.forms: Mapping[TensorName, tuple[Form, ...]] = {name: self.forms_for(name, tuple(Role)) for name in TensorName}

    def forms_for(self, name: TensorName, roles: tuple[Role, ...]) -> tuple[Form, ...]:
        """The distinct forms of a tensor that ``roles`` read, each once: this is where casts are shared."""
        read = [pair for role in roles for pair in zip(SOURCES[role], self.operand_forms(role), strict=True)]
        return tuple(dict.fromkeys(form for source, form in read if source.tensor is name))

    def cast(
        self, name: TensorName, tensor: Tensor, roles: tuple[Role, ...], vectors: TransformVectors | None = None
    ) -> dict[Form, Operand]:
        """Every form of ``tensor`` (rows × features) that ``roles`` read."""
        _require_matrix(name, tensor)
        forms = self.forms_for(name, roles)
        return dict(zip(forms, cast(name, tensor, forms, vectors), strict=True))

    def cast_and_sum(self, dy_MN: Tensor, roles: tuple[Role, ...]) -> tuple[dict[Form, Operand], Tensor]:
        """Every form of dy that ``roles`` read, and Σdy, the bias's gradient, in FP32."""
        _require_matrix(TensorName.DY, dy_MN)
        forms = self.forms_for(TensorName.DY, roles)
        operands, dy_sum_N = cast_and_sum(TensorName.DY, dy_MN, forms)
        return dict(zip(forms, operands, strict=True)), dy_sum_N

    def multiply(
        self,
        role: Role,
        a_forms: Mapping[Form, Operand],
        b_forms: Mapping[Form, Operand],
        out_dtype: torch.dtype,
        bias: Tensor | None = None,
        vectors: TransformVectors | None = None,
        dy_sum_N: Tensor | None = None,
    ) -> Tensor:
        """The GEMM of ``role``: picks its operands out of the casts of the two tensors it reads.

        ``dy_sum_N``, Σdy in FP32, is what a centered wgrad adds back (``needs_dy_sum``).
        """
        a_form, b_form = self.operand_forms(role)
        transform = self.transform_of(role)
        if transform is Transform.NONE:
            return multiply(self.kernels[role], role, a_forms[a_form], b_forms[b_form], out_dtype, bias)
        assert vectors is not None, f"{role} under {transform} needs its vector"
        if transform is Transform.CENTER and role is Role.FPROP:
            bias = shifted_bias(bias, vectors, out_dtype)
        out = multiply(self.kernels[role], role, a_forms[a_form], b_forms[b_form], out_dtype, bias)
        return undo_behind(role, out, transform, vectors, dy_sum_N)

    @property
    def needs_dy_sum(self) -> bool:
        return self.transform_of(Role.WGRAD) is Transform.CENTER

    def transform_of(self, role: Role) -> Transform:
        """The site's transform where ``role`` runs in 8 bits; high precision needs none, and reads its tensors as they are."""
        return self._transforms[role]

    def operand_forms(self, role: Role) -> tuple[Form, Form]:
        return self._operand_forms[role]

    def _transform_of(self, role: Role) -> Transform:
        recipe = self.kernels[role].recipe(role)
        return self.transform if recipe.a_format.is_8bit or recipe.b_format.is_8bit else Transform.NONE

    def _forms_of(self, role: Role) -> tuple[Form, Form]:
        transform = self.transform_of(role)
        a, b = (
            Form(spec, source.transposed, transform if changes(transform, source.tensor) else Transform.NONE)
            for source, spec in zip(SOURCES[role], self.kernels[role].operands(role), strict=True)
        )
        return a, b


def _require_matrix(name: TensorName, tensor: Tensor) -> None:
    if tensor.ndim != 2:
        raise InvalidInput(f"{name} must be 2-D (rows × features), got shape {tuple(tensor.shape)}: flatten leading axes")
