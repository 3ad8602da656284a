"""Our own kernels (``loka.kernels.triton``) behind the contract."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from loka.core.gemm import SOURCES, Device, GemmProblem, Role, TensorName
from loka.core.recipe import Accumulation, Format, Recipe, Scaling
from loka.kernels.casting import CASTERS, CastProblem
from loka.kernels.contract import add_kernel
from loka.kernels.device import constant_when_traced
from loka.kernels.operand import (
    NO_STATIC_DGRAD,
    Form,
    Layout,
    Operand,
    OperandSpec,
    operand_of,
    padded_size,
    recipe_of,
)
from loka.kernels.providers.torch_fp8 import missing_fp8
from loka.kernels.stepping import AdamStep
from loka.kernels.triton.casts import (
    SCALINGS,
    WIDEST_ROW,
    Codes,
    Target,
    cast_and_sum,
    cast_int8_rows,
    cast_matrix,
)
from loka.kernels.triton.gemm import gemm
from loka.kernels.triton.recasts import can_step, remember_amax, remembered, rewriting
from loka.numerics.scaling import STATIC_SCALE

READS = (Format.BF16, Format.FP16, Format.FP32)


@constant_when_traced
def _not_installed() -> str | None:
    return None if importlib.util.find_spec("triton") else "needs the package triton, which is not installed"


def missing_triton(device: Device) -> str | None:
    """Why our kernels cannot run on ``device``, or None; loads nothing."""
    if reason := missing_fp8(device) or _not_installed():
        return reason
    if device.capability[0] != 9:
        return f"written for Hopper's tensor cores (sm_90), this is sm_{device.sm}"
    return None


@dataclass(frozen=True)
class TritonScaled:
    """One scale for a tensor or a row. STATIC is x's scale behind a norm; the other operand then has row scales.

    int8 is for fprop: where the values of a row are of similar size, as behind a norm, its noise is a third of e4m3's. Its sums
    are exact, and the tensor cores' peak is the same.
    """

    variant: str
    scaling: Scaling
    accumulation: Accumulation
    format: Format = Format.E4M3

    @property
    def name(self) -> str:
        return f"triton.{self.variant}"

    def operands(self, role: Role) -> tuple[OperandSpec, OperandSpec]:
        """Padded like the operands of torch's kernels, so that roles on either share their casts."""
        a_source, b_source = SOURCES[role]
        a, b = self._spec(a_source.tensor, outer_multiple=1), self._spec(b_source.tensor, outer_multiple=16)
        return a, b

    def _spec(self, tensor: TensorName, outer_multiple: int) -> OperandSpec:
        scaling, static_scale = self.scaling, None
        if self.scaling is Scaling.STATIC:
            is_x = tensor is TensorName.X
            scaling, static_scale = (Scaling.STATIC, STATIC_SCALE) if is_x else (Scaling.ROWWISE, None)
        return OperandSpec(self.format, scaling, outer_multiple, contraction_multiple=16, static_scale=static_scale)

    def recipe(self, role: Role) -> Recipe:
        return recipe_of(self.operands(role), self.accumulation)

    def missing(self, device: Device) -> str | None:
        return missing_triton(device)

    def why_not(self, problem: GemmProblem) -> str | None:
        if problem.role is Role.DGRAD and self.scaling is Scaling.STATIC:
            return NO_STATIC_DGRAD
        if self.format is Format.INT8 and problem.role is not Role.FPROP:
            return "int8 is for fprop: gradients span too many binades"
        if self.format is Format.INT8 and problem.k > WIDEST_ROW:
            return f"casts rows of at most {WIDEST_ROW} values, and these have {problem.k}"
        return None

    def multiply(self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        assert a.scale is not None
        assert b.scale is not None
        promoted = self.accumulation is Accumulation.FULL and self.format is not Format.INT8  # int8's sums are exact anyway
        return gemm(
            a.codes, b.codes, a.scale, b.scale, a.outer, b.outer, a.contraction,
            out_dtype=out_dtype, bias=bias, promoted=promoted,
        )  # fmt: skip


@CASTERS.register("triton")
class TritonCaster:
    """e4m3 in every scaling and both orders of axes (a form and its transpose out of the same reads), and int8 by rows."""

    def why_not(self, form: Form, problem: CastProblem) -> str | None:
        spec = form.spec
        if spec.format is Format.INT8 and (form.transposed or spec.scaling is not Scaling.ROWWISE or problem.cols > WIDEST_ROW):
            return f"writes int8 with a scale a row alone, in rows of at most {WIDEST_ROW}"
        if spec.format not in (Format.E4M3, Format.INT8) or spec.scaling not in SCALINGS or spec.layout is not Layout.PLAIN:
            return "writes plain e4m3 and int8 alone"
        if reason := missing_triton(problem.device):
            return reason
        if problem.format not in READS:
            return f"reads {', '.join(READS)}, not {problem.format}"
        if form.transposed and padded_size(problem.rows, spec.contraction_multiple) % 4:
            return "writes transposed codes four at a time, and their number is not a multiple of 4"
        if problem.rows == 0 or problem.cols == 0:
            return "launches nothing for a tensor without values"
        return None

    def cast(self, tensor: Tensor, forms: Sequence[Form]) -> list[Operand]:
        operands: dict[Form, Operand] = {}
        for pair in _pairs(forms):
            plain, trans = _targets(tensor, pair)
            if pair[0] and pair[0].spec.format is Format.INT8:
                made = *cast_int8_rows(tensor, plain.outer, plain.contraction), *trans.empty(tensor)
            else:
                made = cast_matrix(tensor, plain, trans)
            operands |= _operands(tensor, pair, made)
        return [operands[form] for form in forms]

    def cast_and_sum(self, tensor: Tensor, forms: Sequence[Form]) -> tuple[list[Operand], Tensor]:
        pair = _pairs(forms)[-1]
        if any(form and form.spec.format is Format.INT8 for form in pair):  # then all are
            return self.cast(tensor, forms), tensor.sum(0, dtype=torch.float32)
        made, sum_C = cast_and_sum(tensor, *_targets(tensor, pair))
        operands = _operands(tensor, pair, made)
        others = [form for form in forms if form not in operands]
        operands |= zip(others, self.cast(tensor, others), strict=True)
        return [operands[form] for form in forms], sum_C

    def remember(self, tensor: Tensor, forms: Sequence[Form]) -> Tensor:
        return torch.cat([remember_amax(tensor, *_targets(tensor, pair)) for pair in _pairs(forms)], dim=1)

    def can_step(self, tensor: Tensor, forms: Sequence[Form]) -> bool:
        pairs = _pairs(forms)
        return len(pairs) == 1 and can_step(tensor, *_targets(tensor, pairs[0]))

    def rewriting(
        self, tensor: Tensor, operands: Mapping[Form, Operand], memory: Tensor, adam: AdamStep | None = None
    ) -> Callable[[], None]:
        pairs = _pairs(tuple(operands))
        targets = [_targets(tensor, pair) for pair in pairs]
        shares = memory.split([remembered(tensor, *both) for both in targets], dim=1)
        rewrites = []
        for pair, both, share in zip(pairs, targets, shares, strict=True):
            plain, trans = (_held(tensor, None if form is None else operands[form]) for form in pair)
            rewrites.append(rewriting(tensor, *both, (*plain, *trans), share, adam))

        def run() -> None:
            for rewrite in rewrites:
                rewrite()

        return run


Pair = tuple[Form | None, Form | None]  # a form in the tensor's own order of axes, and a transposed one


def _operands(tensor: Tensor, pair: Pair, made: Codes) -> dict[Form, Operand]:
    both = zip(pair, made[::2], made[1::2], strict=True)
    return {form: operand_of(form, codes, scale, tensor.shape) for form, codes, scale in both if form}


def _held(tensor: Tensor, operand: Operand | None) -> tuple[Tensor, Tensor]:
    """Where an operand's codes and scales lie; empty tensors for one that is not written."""
    if operand is None or operand.scale is None:
        return tensor.new_empty((0, 0), dtype=torch.float8_e4m3fn), tensor.new_empty((0, 0), dtype=torch.float32)
    return operand.codes, operand.scale


def _pairs(forms: Sequence[Form]) -> list[Pair]:
    """Forms that are written together; those of int8 are each alone."""
    int8 = [form for form in forms if form.spec.format is Format.INT8]
    others = [form for form in forms if form not in int8]
    plain, transposed = ([form for form in others if form.transposed is wanted] for wanted in (False, True))
    return [*((form, None) for form in int8), *zip_longest(plain, transposed)]


def _targets(tensor: Tensor, pair: Pair) -> tuple[Target, Target]:
    (rows, cols), (plain, transposed) = tensor.shape, pair
    return (
        Target.of(plain.spec, rows, cols) if plain else Target.none(),
        Target.of(transposed.spec, cols, rows) if transposed else Target.none(),
    )


add_kernel(TritonScaled("int8_rowwise", Scaling.ROWWISE, Accumulation.FULL, Format.INT8))
for _scaling in (Scaling.TENSORWISE, Scaling.ROWWISE, Scaling.STATIC):
    add_kernel(TritonScaled(f"{_scaling}", _scaling, Accumulation.FULL))
    add_kernel(TritonScaled(f"{_scaling}_fast", _scaling, Accumulation.FAST))
