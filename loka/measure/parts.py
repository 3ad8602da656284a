"""The executor's parts on the tensors of one site: casts, products, and what they are compared with.

Axes:  M rows of the batch,  K in_features,  N out_features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import torch
from torch import Tensor

from loka.core.gemm import SOURCES, Role, SiteShape, Source, TensorName
from loka.core.recipe import Format, Recipe, Transform
from loka.kernels.casting import CastProblem, Rewriter, Stepper, cast, choose_caster, rewriter_of
from loka.kernels.contract import KERNELS
from loka.kernels.executor import SiteExecutor, SiteKernels
from loka.kernels.operand import Form, Operand, operand_of
from loka.kernels.providers.torch_casts import quantize_forms
from loka.kernels.transforms import TransformVectors, apply_to, center_shift
from loka.measure.adam_steps import AdamSteps
from loka.measure.timing import copies_past_cache
from loka.numerics.metrics import ErrorReport, measure_error
from loka.numerics.reference import gemm

SHARERS = {  # the two roles that read a tensor, and can share one pass over it
    TensorName.X: (Role.FPROP, Role.WGRAD),
    TensorName.DY: (Role.DGRAD, Role.WGRAD),
    TensorName.W: (Role.FPROP, Role.DGRAD),
}


@dataclass(frozen=True)
class Option:
    """One kernel at one role, behind a transform or none: what a Survey has a line of numbers for."""

    kernel: str
    role: Role
    transform: Transform = Transform.NONE

    @property
    def recipe(self) -> Recipe:
        return KERNELS.get(self.kernel).recipe(self.role)

    @property
    def is_8bit(self) -> bool:
        return self.recipe.a_format.is_8bit or self.recipe.b_format.is_8bit

    @property
    def forms(self) -> tuple[Form, Form]:
        return executor_of(self.kernel, self.transform).operand_forms(self.role)

    def form_of(self, name: TensorName) -> Form | None:
        """How this option reads a tensor, if it does."""
        return next((form for source, form in zip(SOURCES[self.role], self.forms, strict=True) if source.tensor is name), None)


@cache
def executor_of(kernel: str, transform: Transform) -> SiteExecutor:
    return SiteExecutor(SiteKernels.same(kernel), transform)


@dataclass
class SiteTensors:
    """What a site multiplies: x, dy, copies of w to rotate, and the vectors of transforms."""

    x: Tensor
    dy: Tensor | None  # None where the site does not train
    weights: list[Tensor]
    bias: Tensor | None = None
    features: dict[Transform, Tensor] = field(default_factory=dict)

    @classmethod
    def random(
        cls,
        site: SiteShape,
        dtype: torch.dtype,
        device: torch.device,
        *,
        weight_dtype: torch.dtype | None = None,
        has_bias: bool = False,
        copies: int | None = None,
        seed: int = 0,
    ) -> "SiteTensors":
        """Normal values of the sizes that occur in training: unit activations, outputs of unit variance, small gradients."""
        generator = torch.Generator(device).manual_seed(seed)
        weight_dtype = weight_dtype or dtype

        def normal(rows: int, cols: int, std: float, dtype: torch.dtype = dtype) -> Tensor:
            return (std * torch.randn(rows, cols, generator=generator, device=device)).to(dtype)

        if copies is None:
            copies = copies_past_cache(site.n * site.k * weight_dtype.itemsize, device) if device.type == "cuda" else 3
        weights = [normal(site.n, site.k, site.k**-0.5, weight_dtype) for _ in range(copies)]
        x_MK, dy_MN = normal(site.m, site.k, 1.0), normal(site.m, site.n, 1e-3)
        ones_K = torch.ones(site.k, device=device)
        features = {Transform.CENTER: 0.5 * ones_K, Transform.RESCALE: 2 * ones_K}
        return cls(x_MK, dy_MN, weights, normal(1, site.n, 1.0, weight_dtype).flatten() if has_bias else None, features)

    def stored(self, name: TensorName, turn: int) -> Tensor:
        stored = {TensorName.X: self.x, TensorName.DY: self.dy, TensorName.W: self.weights[turn % len(self.weights)]}[name]
        assert stored is not None, "a site that does not train has no dy"
        return stored

    def oriented(self, source: Source) -> Tensor:
        stored = self.stored(source.tensor, 0)
        return stored.t() if source.transposed else stored


class SiteParts:
    """Casts and products of options on one set of tensors. Each cast that a product reads is made once and kept."""

    def __init__(self, tensors: SiteTensors) -> None:
        self.tensors = tensors
        self._operands: dict[tuple[TensorName, Form, int], Operand] = {}
        self._vectors: dict[tuple[Transform, int], TransformVectors] = {}
        self._references: dict[Role, Tensor] = {}
        self._dy_sum: Tensor | None = None
        self._held: dict[tuple[tuple[Form, ...], int], tuple[tuple[Operand, ...], Callable[[], None]]] = {}
        self._stepped: dict[tuple[tuple[Form, ...], int], Callable[[], None]] = {}

    def cast(self, name: TensorName, forms: Sequence[Form], turn: int) -> tuple[Operand, ...]:
        """All ``forms`` of a tensor as a model casts them: the call to time. A weight is cast into the copies that are there,
        if a caster can."""
        tensor, forms = self.tensors.stored(name, turn), tuple(forms)
        rewriter = rewriter_of(name, tensor, forms) if name is TensorName.W else None
        if rewriter is None:
            return cast(name, tensor, forms, self.vectors_of(forms[0].transform, turn))
        key = forms, turn % len(self.tensors.weights)
        if key not in self._held:
            held, memory = _written(rewriter, tensor, forms)
            self._held[key] = tuple(held.values()), rewriter.rewriting(tensor, held, memory)
        operands, rewrite = self._held[key]
        rewrite()
        return operands

    def can_step(self, forms: Sequence[Form]) -> bool:
        """Whether a step of Adam can cast the weight into ``forms``."""
        weight_NK = self.tensors.weights[0]
        stepper = rewriter_of(TensorName.W, weight_NK, forms)
        return isinstance(stepper, Stepper) and stepper.can_step(weight_NK, forms)

    def step(self, forms: Sequence[Form], turn: int) -> None:
        """A step of Adam that casts the weight into ``forms``: the call to time. Without forms it is torch's own step."""
        if not forms:
            self._adam.by_torch(turn)
            return
        key = tuple(forms), turn % len(self.tensors.weights)
        if key not in self._stepped:
            weight_NK = self.tensors.stored(TensorName.W, turn)
            stepper = rewriter_of(TensorName.W, weight_NK, forms)
            assert isinstance(stepper, Stepper), "of what can_step"
            self._stepped[key] = stepper.rewriting(weight_NK, *_written(stepper, weight_NK, forms), self._adam.of(turn))
        self._stepped[key]()

    @cached_property
    def _adam(self) -> AdamSteps:
        return AdamSteps(self.tensors.weights[0], len(self.tensors.weights))

    def multiply(self, option: Option, turn: int = 0, *, fresh: bool = False) -> Tensor:
        """The option's product and all that its epilogue adds, its operands cast before: the call to time.

        ``fresh`` casts x and dy for it, as each call of a model does; w is cast once a step.
        """
        executor = executor_of(option.kernel, option.transform)
        (a, b), (a_form, b_form) = SOURCES[option.role], option.forms
        dtype = self.tensors.weights[0].dtype if option.role is Role.WGRAD else self.tensors.x.dtype
        return executor.multiply(
            option.role,
            {a_form: self._cast_now(a.tensor, a_form, turn) if fresh else self.operand(a.tensor, a_form, turn)},
            {b_form: self._cast_now(b.tensor, b_form, turn) if fresh else self.operand(b.tensor, b_form, turn)},
            dtype,
            self.tensors.bias if option.role is Role.FPROP else None,
            self.vectors_of(executor.transform_of(option.role), turn),
            self._sum_of_dy() if option.role is Role.WGRAD and executor.needs_dy_sum else None,
        )

    def _cast_now(self, name: TensorName, form: Form, turn: int) -> Operand:
        return self.operand(name, form, turn) if name is TensorName.W else self.cast(name, [form], turn)[0]

    def prepare(self, option: Option) -> None:
        """Make every cast that ``multiply`` reads: a call that is timed must find them."""
        for turn in range(len(self.tensors.weights)):
            self.multiply(option, turn)

    def operand(self, name: TensorName, form: Form, turn: int = 0) -> Operand:
        turn = turn % len(self.tensors.weights) if TensorName.W is name else 0
        if (name, form, turn) not in self._operands:
            tensor = self.tensors.stored(name, turn)
            vectors = self.vectors_of(form.transform, turn)
            if self.is_compiled(name, form):  # the same arithmetic uncompiled: compiling takes seconds
                operand = oracle_cast(apply_to(name, tensor, form.transform, vectors), form)
            else:
                (operand,) = cast(name, tensor, [form], vectors)
            self._operands[name, form, turn] = operand
        return self._operands[name, form, turn]

    def is_compiled(self, name: TensorName, form: Form) -> bool:
        return is_compiled(form, CastProblem.of(name, self.tensors.stored(name, 0)))

    def reference(self, role: Role) -> Tensor:
        """The role's output at float64, without bias."""
        if role not in self._references:
            a, b = (self.tensors.oriented(source) for source in SOURCES[role])
            self._references[role] = gemm(a, b)
        return self._references[role]

    def error(self, option: Option) -> ErrorReport:
        """wgrad's floor is by column: Adam normalizes its elements one by one."""
        assert self.tensors.bias is None, "the reference is of the product alone"
        return measure_error(self.multiply(option), self.reference(option.role), option.role)

    def transformed(self, name: TensorName, transform: Transform) -> Tensor:
        return apply_to(name, self.tensors.stored(name, 0), transform, self.vectors_of(transform, 0))

    def vectors_of(self, transform: Transform, turn: int) -> TransformVectors | None:
        if transform is Transform.NONE:
            return None
        turn %= len(self.tensors.weights)
        if (transform, turn) not in self._vectors:
            features_K = self.tensors.features[transform]
            is_center = transform is Transform.CENTER
            shift_N = center_shift(self.tensors.weights[turn], features_K) if is_center else None
            self._vectors[transform, turn] = TransformVectors(features_K, shift_N)
        return self._vectors[transform, turn]

    def _sum_of_dy(self) -> Tensor:
        """A layer with a bias has the sum at hand for its gradient; one without pays for it here."""
        assert self.tensors.dy is not None
        if self.tensors.bias is None:
            return self.tensors.dy.sum(0, dtype=torch.float32)
        if self._dy_sum is None:
            self._dy_sum = self.tensors.dy.sum(0, dtype=torch.float32)
        return self._dy_sum


def _written(rewriter: Rewriter, weight_NK: Tensor, forms: Sequence[Form]) -> tuple[dict[Form, Operand], Tensor]:
    """The casts that are to be written again, and what the rewriter remembers for that."""
    return dict(zip(forms, cast(TensorName.W, weight_NK, forms), strict=True)), rewriter.remember(weight_NK, forms)


def is_compiled(form: Form, problem: CastProblem) -> bool:
    """Whether a model's cast into ``form`` is compiled by torch, for a second or two, before it runs."""
    return problem.device.type == "cuda" and form.spec.format.is_8bit and choose_caster(form, problem) == "torch"


def is_worth_sharing(a: Form, b: Form) -> bool:
    """Whether a cast into both forms at once is worth a kernel of its own. Forms with scales of tiles are paired with each
    other only: mixed pairs are half of all, and few sites would choose one."""
    are_8bit = a.spec.format.is_8bit and b.spec.format.is_8bit
    return are_8bit and a.transform is b.transform and _is_tiled(a) == _is_tiled(b)


def _is_tiled(form: Form) -> bool:
    return form.spec.scaling.block[1] not in (1, None)


def oracle_cast(tensor: Tensor, form: Form) -> Operand:
    """The stored ``tensor``, transformed already, by the oracle's own arithmetic."""
    ((codes, scale),) = quantize_forms(tensor, (form,))
    return operand_of(form, codes, scale, tensor.shape)


def baseline_kernel(format: Format) -> str:
    """What a model that runs in ``format`` runs on without LoKA."""
    return f"torch.{format}"
