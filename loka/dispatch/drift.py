"""The error that a site's casts would make on given rows, by its recipes alone: no kernel runs, and the host does not wait.

Two things can go wrong with a distribution that has moved. Outputs can be wrong: that is ``mere_floored``, as in a Survey. Or
they can be right about what has grown and deaf to everything else: a few features a thousand times as large take the whole
scale of an 8-bit row, the rest is flushed to zero, and the output, which the few now rule, hardly shows it. So the error of
x is also taken feature by feature, each weighted with the share of the output that it had when the Record was made.

Axes:  R sampled rows,  K in_features,  N out_features.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.core.gemm import SOURCES, Role, TensorName
from loka.core.recipe import Format, Scaling, Transform
from loka.kernels.executor import SiteExecutor
from loka.kernels.transforms import TransformVectors, apply_to
from loka.numerics.metrics import FLOOR_AXIS, mere_floored
from loka.numerics.scaling import dequantize, quantize


@dataclass(frozen=True)
class Cast:
    format: Format
    scaling: Scaling
    static_scale: float | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        """The values that are left of ``tensor`` (outer × contracted)."""
        if not self.format.is_8bit:
            return tensor
        return dequantize(quantize(tensor, self.format, self.scaling, static_scale=self.static_scale))


@dataclass(frozen=True)
class SiteCasts:
    """How the two operands of each role that runs in 8 bits are cast."""

    casts: Mapping[Role, tuple[Cast, Cast]]
    transform: Transform = Transform.NONE
    x_of_wgrad: Cast | None = None  # of a block, whose gradient is not seen

    @classmethod
    def of(cls, executor: SiteExecutor) -> "SiteCasts":
        casts = {}
        for role, kernel in executor.kernels.items():
            recipe, (a, b) = kernel.recipe(role), kernel.operands(role)
            if recipe.a_format.is_8bit or recipe.b_format.is_8bit:
                casts[role] = (
                    Cast(recipe.a_format, recipe.a_scaling, a.static_scale),
                    Cast(recipe.b_format, recipe.b_scaling, b.static_scale),
                )
        return cls(casts, executor.transform)

    @classmethod
    def of_block(cls) -> "SiteCasts":
        """A fused block casts its input with a scale a row, and for wgrad with one for all. What it hands on in codes is
        bounded by its norm, and cannot drift."""
        rowwise = Cast(Format.E4M3, Scaling.ROWWISE)
        return cls({Role.FPROP: (rowwise, rowwise)}, x_of_wgrad=Cast(Format.E4M3, Scaling.TENSORWISE))


def predicted_errors(
    site: SiteCasts, x_RK: Tensor, dy_RN: Tensor | None, weight_NK: Tensor, features_K: Tensor | None, energy_K: Tensor | None
) -> dict[Role, Tensor]:
    """The error of each role, of fprop the larger of both, as scalars on the device. ``energy_K`` is the Record's
    ``feature_energy``."""
    vectors = None if features_K is None else TransformVectors(features_K)
    raw = {TensorName.X: x_RK, TensorName.DY: dy_RN, TensorName.W: weight_NK}
    errors: dict[Role, Tensor] = {}
    for role, casts in site.casts.items():
        operands, exact, changed = [], [], []
        for source, cast in zip(SOURCES[role], casts, strict=True):
            tensor = raw[source.tensor]
            if tensor is None:
                break
            moved = apply_to(source.tensor, tensor, site.transform, vectors)
            exact.append(tensor.t() if source.transposed else tensor)
            changed.append(moved.t() if source.transposed else moved)
            operands.append(cast(changed[-1]))
        if len(operands) < 2:
            continue
        reference = exact[0] @ exact[1].t()
        error = _undone(site.transform, role, operands[0] @ operands[1].t() - changed[0] @ changed[1].t(), features_K)
        errors[role] = mere_floored(reference + error, reference, axis=FLOOR_AXIS[role])
        if energy_K is not None and role is Role.FPROP:
            errors[role] = torch.maximum(errors[role], _feature_error(changed[0], operands[0], energy_K))
    if energy_K is not None and site.x_of_wgrad is not None:
        errors[Role.WGRAD] = _feature_error(x_RK, site.x_of_wgrad(x_RK), energy_K)
    return errors


def feature_energy(x_RK: Tensor, weight_NK: Tensor, transform: Transform, features_K: Tensor | None) -> Tensor:
    """The share of a site's output that each feature makes, were they independent: its E[x²]·‖w‖², scaled to sum to 1."""
    vectors = None if features_K is None else TransformVectors(features_K)
    x_RK = apply_to(TensorName.X, x_RK, transform, vectors)
    weight_NK = apply_to(TensorName.W, weight_NK, transform, vectors)
    energy_K = x_RK.square().mean(0) * weight_NK.square().sum(0)
    return energy_K / energy_K.sum().clamp(min=torch.finfo(energy_K.dtype).tiny)


def _feature_error(x_RK: Tensor, cast_RK: Tensor, energy_K: Tensor) -> Tensor:
    error_K = (cast_RK - x_RK).square().mean(0)
    relative_K = torch.where(error_K == 0, 0.0, error_K / x_RK.square().mean(0))
    return (relative_K * energy_K).sum().sqrt().double()


def _undone(transform: Transform, role: Role, error: Tensor, features_K: Tensor | None) -> Tensor:
    """An error of the product of rescaled operands as an error of the role's output."""
    if transform is not Transform.RESCALE or role is Role.FPROP or features_K is None:
        return error
    return error / features_K if role is Role.DGRAD else error * features_K
