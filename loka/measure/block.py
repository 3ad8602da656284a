"""A site with the norm and activation behind it as one fused kernel: its error and its time against the compiled block.

The Record knows the gradient of the linear layer's output. As the gradient of the block's it has the right zeros and scales of
rows, which is what the casts in backward feel.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from loka.core.gemm import Role, TensorName
from loka.core.recipe import Format, Scaling
from loka.core.record import SiteRecord
from loka.core.survey import BlockCandidate, Times
from loka.kernels.casting import cast
from loka.kernels.operand import Form, OperandSpec
from loka.measure.error import MOST_SAMPLES, OptionError, draw_tensors, require_device
from loka.measure.parts import told
from loka.measure.timing import Candidate, copies_past_cache, time_together
from loka.nn.block_norm import BlockNorm
from loka.nn.block_reference import block_reference
from loka.nn.fused_block import FusedBlock
from loka.numerics.formats import torch_dtype
from loka.numerics.metrics import measure_error

KERNEL = "triton.block"
INPUT_FORM = Form(OperandSpec(Format.E4M3, Scaling.ROWWISE, contraction_multiple=16), False)


@dataclass(frozen=True)
class BlockShape:
    """All that decides how long a block takes."""

    m: int
    k: int
    n: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    has_bias: bool
    norm: str | None
    activation: str | None


class Blocks:
    """Surveys blocks on one device; blocks of equal shape are timed once."""

    def __init__(self, dtype: Format, device: torch.device, left_out: str | None = None) -> None:
        """``left_out``: why the fused kernel is not to be run, if an earlier attempt broke the GPU."""
        self._dtype, self._device, self._left_out = dtype, device, left_out
        self._times: dict[BlockShape, dict[str, float]] = {}

    def survey(self, site: SiteRecord, rows: list[int]) -> tuple[BlockCandidate, ...]:
        """The site as a block, or why it is none; nothing where neither a norm nor an activation follows."""
        if site.norm is None and site.activation is None:
            return ()
        try:
            block = self._block(site)
            if reason := block if isinstance(block, str) else self._why_not(block):
                return (BlockCandidate(KERNEL, site.norm, site.activation, why_not=reason),)
            assert isinstance(block, FusedBlock)
            error = self._error(site, block)
            times = {m: self._time(self._shape(site, m), block) for m in rows}
        except Exception as failure:  # any library's any error: the reason is the result
            require_device(KERNEL, self._device, told(failure))
            return (BlockCandidate(KERNEL, site.norm, site.activation, why_not=told(failure)),)
        return (_candidate(site, error, times),)

    def _why_not(self, block: FusedBlock) -> str | None:
        return block.why_reference or self._left_out

    def _block(self, site: SiteRecord) -> FusedBlock | str:
        norm, activation = _built(site.norm_kind, site.n, site.norm), _built(site.activation_kind, None, site.activation)
        for part in (norm, activation):
            if isinstance(part, str):
                return part
        linear = nn.Linear(site.k, site.n, bias=site.bias_N is not None)
        linear.weight = nn.Parameter(site.weight_NK.detach().clone())
        if site.bias_N is not None:
            linear.bias = nn.Parameter(site.bias_N.detach().clone())
        return FusedBlock.from_modules(linear, norm, activation).to(self._device)  # pyrefly: ignore[bad-argument-type]

    def _shape(self, site: SiteRecord, m: int) -> BlockShape:
        kinds = (site.norm_kind if site.norm else None, site.activation_kind if site.activation else None)
        return BlockShape(m, site.k, site.n, torch_dtype(self._dtype), site.weight_NK.dtype, site.has_bias, *kinds)

    def _error(self, site: SiteRecord, block: FusedBlock) -> dict[Role, OptionError]:
        errors = {role: OptionError() for role in (Role if site.trains else (Role.FPROP,))}
        exact = partial(
            block_reference,
            weight_NK=block.weight.detach().double().requires_grad_(),
            bias_N=None if block.bias is None else block.bias.detach().double(),
            norm=block.norm,
            activation=block.activation,
        )
        for index, tensors in enumerate(draw_tensors(site, 1, self._dtype, self._device)):
            if index == MOST_SAMPLES or all(error.is_known for error in errors.values()):
                break
            with self._autocast(block):
                got = _outputs(block, block.weight, tensors.x, tensors.dy)
            expected = _outputs(exact, exact.keywords["weight_NK"], tensors.x.double(), tensors.dy)
            for role, error in errors.items():
                error.samples.add(measure_error(got[role], expected[role], role))
        return errors

    def _time(self, shape: BlockShape, block: FusedBlock) -> dict[str, float]:
        if shape not in self._times:
            self._times[shape] = self._measure_time(shape, block)
        return self._times[shape]

    def _measure_time(self, shape: BlockShape, block: FusedBlock) -> dict[str, float]:
        """Weights are rotated past the cache: each turn runs a copy of the block."""
        n_copies = copies_past_cache(shape.n * shape.k * shape.weight_dtype.itemsize, self._device)
        copies = [self._copy(block) for _ in range(n_copies)]
        x_MK = torch.randn(shape.m, shape.k, device=self._device, dtype=shape.dtype)
        dy_MN = 1e-3 * torch.randn(shape.m, shape.n, device=self._device, dtype=shape.dtype)
        compiled = torch.compile(block_reference, dynamic=False, fullgraph=True)

        def baseline(x: Tensor, copy: FusedBlock) -> Tensor:
            return compiled(x, copy.weight, copy.bias, copy.norm, copy.activation)

        def fused(x: Tensor, copy: FusedBlock) -> Tensor:
            return copy(x)

        def forward(turn: int, run: Callable[[Tensor, FusedBlock], Tensor]) -> object:
            with torch.no_grad(), self._autocast(block):
                return run(x_MK, copies[turn % n_copies])

        def training(turn: int, run: Callable[[Tensor, FusedBlock], Tensor]) -> object:
            copy = copies[turn % n_copies]
            x = x_MK.detach().requires_grad_()
            with self._autocast(block):
                y_MN = run(x, copy)
            gradients = torch.autograd.grad(y_MN, [x, *copy.parameters()], dy_MN.to(y_MN.dtype))
            if run is fused:
                copy.refresh_weight_casts()  # once a step
            return gradients

        calls: dict[str, Candidate] = {
            "input_cast": lambda _: cast(TensorName.X, x_MK, [INPUT_FORM]),
            "forward": partial(forward, run=fused),
            "training": partial(training, run=fused),
            "baseline_forward": partial(forward, run=baseline),
            "baseline_training": partial(training, run=baseline),
        }
        # A model has more shapes of blocks than torch's limit on compilations of one function.
        with torch._dynamo.config.patch(recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20):
            times = time_together(calls, self._device, turns=max(8, n_copies))
        return {name: timing.median_us for name, timing in times.items()}

    def _copy(self, block: FusedBlock) -> FusedBlock:
        bias = None if block.bias is None else nn.Parameter(block.bias.detach().clone())
        return FusedBlock(nn.Parameter(block.weight.detach().clone()), bias, block.norm, block.activation)

    def _autocast(self, block: FusedBlock) -> AbstractContextManager[object]:
        dtype = torch_dtype(self._dtype)
        return torch.autocast(self._device.type, dtype, enabled=block.weight.dtype is not dtype)


def _built(kind: str | None, n_features: int | None, module: str | None) -> nn.Module | str | None:
    """A module of the class that follows the site, as it is made by default; or why there is none."""
    if module is None or kind is None:
        return None
    if kind == BlockNorm.__name__ and n_features is not None:
        return BlockNorm(n_features)
    found = getattr(nn, kind, None)
    if found is None:
        return f"{module} is a {kind}, which is no class of torch.nn: no fused kernel computes it"
    return found() if n_features is None else found(n_features)


def _outputs(run: Callable[[Tensor], Tensor], weight_NK: Tensor, x_MK: Tensor, dy_MN: Tensor | None) -> dict[Role, Tensor]:
    """y, and dx and dw where there is a gradient."""
    x_MK = x_MK.detach().requires_grad_(dy_MN is not None)
    y_MN = run(x_MK)
    if dy_MN is None:
        return {Role.FPROP: y_MN.detach()}
    dx_MK, dw_NK = torch.autograd.grad(y_MN, (x_MK, weight_NK), dy_MN.to(y_MN.dtype))
    return {Role.FPROP: y_MN.detach(), Role.DGRAD: dx_MK, Role.WGRAD: dw_NK}


def _candidate(site: SiteRecord, errors: dict[Role, OptionError], times: dict[int, dict[str, float]]) -> BlockCandidate:
    """Its times leave out the cast of the input, which a block in front may make needless."""

    def of(name: str, without: str | None = None) -> Times:
        return {m: max(0.0, us[name] - (us[without] if without else 0.0)) for m, us in times.items()}

    return BlockCandidate(
        kernel=KERNEL,
        norm=site.norm,
        activation=site.activation,
        error={role: error.estimates() for role, error in errors.items()},
        input_cast_us=of("input_cast"),
        forward_us=of("forward", without="input_cast"),
        training_us=of("training", without="input_cast"),
        baseline_forward_us=of("baseline_forward"),
        baseline_training_us=of("baseline_training"),
    )
