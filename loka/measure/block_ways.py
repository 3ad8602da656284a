"""The ways to run one block, Linear → norm → activation, that ``loka bench block`` times against each other.

All of them multiply the same x and dy; weights are rotated past the cache. In training each gives the gradients of x and
of all parameters. Axes:  M rows of the batch,  K features in,  N out.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loka.core.gemm import Role, SiteShape, TensorName
from loka.kernels.contract import KERNELS, require
from loka.kernels.device import device_of
from loka.kernels.executor import SiteExecutor, SiteKernels
from loka.measure.timing import TimedCall, copies_past_cache
from loka.measure.torchao_peer import quantize_for_serving
from loka.nn.block_norm import BlockNorm
from loka.nn.block_reference import block_reference
from loka.nn.fused_block import FusedBlock
from loka.nn.fused_function import BlockTensors
from loka.nn.fused_spec import BlockSpec, NormSpec, norm_spec
from loka.nn.fused_steps import GradientNeeds, backward_block, forward_block, norm_input
from loka.nn.site import Casts, run_site

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Way:
    """What is called in serving and in training, and the block as a function of x and the turn where autograd runs it."""

    serving: TimedCall | None
    training: TimedCall
    forward: Callable[[Tensor, int], Tensor] | None = None


class BlockInputs:
    """What every way is given: x, dy, and weights to rotate."""

    def __init__(self, site: SiteShape, device: torch.device, *, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(rows: int, cols: int, std: float) -> Tensor:
            return (std * torch.randn(rows, cols, generator=generator, device=device)).to(DTYPE)

        self.site, self.device = site, device
        self.x_MK, self.dy_MN = normal(site.m, site.k, 1.0), normal(site.m, site.n, 1e-3)
        copies = copies_past_cache(site.n * site.k * DTYPE.itemsize, device)
        self.weights = [nn.Parameter(normal(site.n, site.k, site.k**-0.5)) for _ in range(copies)]

    def weight(self, turn: int) -> nn.Parameter:
        return self.weights[turn % len(self.weights)]

    @cached_property
    def blocks(self) -> list[FusedBlock]:
        """Our block around each of the weights."""
        return [FusedBlock(weight, None, BlockNorm(self.site.n), nn.Hardswish()) for weight in self.weights]

    def gradients(self, y_MN: Tensor, x_MK: Tensor, learned: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y_MN, [x_MK, *learned], self.dy_MN)


def _layer_norm_block(x: Tensor, w: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return F.silu(F.layer_norm(F.linear(x, w), (w.shape[0],), gamma, beta))


def _layer_norm_silu(z: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return F.silu(F.layer_norm(z, (z.shape[1],), gamma, beta))


def _affine(inputs: BlockInputs) -> tuple[Tensor, Tensor]:
    n = inputs.site.n
    gamma, beta = torch.ones(n, device=inputs.device, dtype=DTYPE), torch.zeros(n, device=inputs.device, dtype=DTYPE)
    return gamma.requires_grad_(), beta.requires_grad_()


def compiled_bf16(inputs: BlockInputs) -> Way:
    """Linear + LayerNorm + SiLU as torch.compile makes it for this very shape: what everything is compared with."""
    gamma, beta = _affine(inputs)
    block = torch.compile(_layer_norm_block, dynamic=False, fullgraph=True)
    return _differentiable(inputs, lambda x, turn: block(x, inputs.weight(turn), gamma, beta), (gamma, beta))


def compiled_mods(inputs: BlockInputs) -> Way:
    """The same layer after LoKA's Mods, BlockNorm and hard-swish, compiled in bf16."""
    norm, activation = BlockNorm(inputs.site.n), nn.Hardswish()
    block = torch.compile(block_reference, dynamic=False, fullgraph=True)
    return _differentiable(inputs, lambda x, turn: block(x, inputs.weight(turn), None, norm, activation), ())


def fused_alone(inputs: BlockInputs) -> Way:
    """Our block between bf16 neighbours: its input is cast, its output bf16. In training weights are cast once a step."""
    blocks = inputs.blocks
    way = _differentiable(inputs, lambda x, turn: blocks[turn % len(blocks)](x), ())

    def train(turn: int) -> object:
        return way.training(turn), blocks[turn % len(blocks)].recast_after_step()

    return replace(way, training=train)


def fused_weight_casts(inputs: BlockInputs) -> Way:
    """The share of our training time that is spent casting the weight, once a step."""
    return Way(None, lambda turn: inputs.blocks[turn % len(inputs.blocks)].recast_after_step())


def fused_in_chain(inputs: BlockInputs) -> Way:
    """Our block behind another and in front of a third: FP8 in, FP8 out; gradients pass between blocks in bf16."""
    blocks, site = inputs.blocks, inputs.site
    spec, norm = blocks[0].spec, norm_spec(BlockNorm(site.k))
    assert isinstance(spec, BlockSpec)
    assert isinstance(norm, NormSpec)
    x, _ = norm_input(inputs.x_MK, norm, transposed=True, saved=False)

    def serve(turn: int) -> object:
        w = _codes(blocks[turn % len(blocks)])
        return forward_block(spec, x, w.codes_NK, w.scale_N, None, codes=True)

    def train(turn: int) -> object:
        block = blocks[turn % len(blocks)]
        w = _codes(block)
        forward = forward_block(spec, x, w.codes_NK, w.scale_N, None, codes=True, transposed=True, saved=True)
        gradients = backward_block(
            spec, inputs.dy_MN, forward.saved, x.factor, w.codes_KN, w.scale_KN,
            needs=GradientNeeds(x=True, weight=True, bias=False), x_dtype=DTYPE, weight_dtype=DTYPE,
        )  # fmt: skip
        block.recast_after_step()
        return gradients

    return Way(serve, train)


def _codes(block: FusedBlock) -> BlockTensors:
    tensors = block.tensors()
    assert tensors is not None, block.why_reference
    return tensors


def site_on(kernel: str) -> Callable[[BlockInputs], Way]:
    """The linear layer on another library's FP8 kernels with their casts, LayerNorm + SiLU compiled behind it."""

    def way(inputs: BlockInputs) -> Way:
        require(KERNELS.get(kernel), device_of(inputs.device))
        executor, (gamma, beta) = SiteExecutor(SiteKernels.same(kernel)), _affine(inputs)
        behind = torch.compile(_layer_norm_silu, dynamic=False, fullgraph=True)

        def cast_weight(turn: int) -> Casts:
            return executor.cast(TensorName.W, inputs.weight(turn).detach(), tuple(Role))

        casts = [cast_weight(turn) for turn in range(len(inputs.weights))]

        def block(x: Tensor, turn: int) -> Tensor:
            weight = inputs.weight(turn)
            weight = weight if torch.is_grad_enabled() else weight.detach()
            return behind(run_site(executor, x, weight, None, casts[turn % len(casts)]), gamma, beta)

        way_of_block = _differentiable(inputs, block, (gamma, beta))
        return replace(way_of_block, training=lambda turn: (way_of_block.training(turn), cast_weight(turn)))

    return way


def torchao(recipe: str) -> Callable[[BlockInputs], Way]:
    """torchao's layer, compiled: its training recipe, and for serving its dynamic quantization of the same granularity.

    One weight that stays in the cache, which flatters it: each copy would be a module to compile.
    """

    def way(inputs: BlockInputs) -> Way:
        float8 = importlib.import_module("torchao.float8")
        config = float8.Float8LinearConfig.from_recipe_name(recipe)
        layer = float8.convert_to_float8_training(_modules(inputs), config=config)
        trained, learned = torch.compile(layer, dynamic=False), list(layer.parameters())
        served = _modules(inputs).eval().requires_grad_(False)
        quantize_for_serving(served, recipe)
        served = torch.compile(served, dynamic=False)

        def serve(turn: int) -> object:
            with torch.no_grad():
                return served(inputs.x_MK)

        def train(turn: int) -> object:
            x = inputs.x_MK.detach().requires_grad_()
            return inputs.gradients(trained(x), x, learned)

        return Way(serve, train, lambda x, turn: trained(x))

    return way


def cublas_gemms(inputs: BlockInputs) -> Way:
    """The FP8 GEMMs of cuBLAS alone, one scale a tensor, operands cast beforehand: no norm, no activation, no cast."""
    one = torch.ones(1, 1, device=inputs.device)

    def codes(x: Tensor) -> Tensor:
        return x.clamp(-448, 448).to(torch.float8_e4m3fn)

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=DTYPE, use_fast_accum=True)

    x, xt = codes(inputs.x_MK), codes(inputs.x_MK.t().contiguous())
    dy, dyt = codes(1e3 * inputs.dy_MN), codes(1e3 * inputs.dy_MN.t().contiguous())
    weights = [(codes(w.detach()), codes(w.detach().t().contiguous())) for w in inputs.weights]

    def serve(turn: int) -> object:
        return multiply(x, weights[turn % len(weights)][0])

    def train(turn: int) -> object:
        w, wt = weights[turn % len(weights)]
        return multiply(x, w), multiply(dy, wt), multiply(dyt, xt)

    return Way(serve, train)


BASELINE, FUSED, ALONE, WEIGHT_CASTS = "compiled bf16", "LoKA", "LoKA, bf16 in and out", "LoKA's casts of the weight"
WAYS: dict[str, Callable[[BlockInputs], Way]] = {
    BASELINE: compiled_bf16,
    FUSED: fused_in_chain,
    ALONE: fused_alone,
    WEIGHT_CASTS: fused_weight_casts,
    "bf16 with the Mods": compiled_mods,
    "torchao.tensorwise": torchao("tensorwise"),
    "torchao.rowwise": torchao("rowwise"),
    "fbgemm.rowwise_fast": site_on("fbgemm.rowwise_fast"),  # as it sums by default
    "cuBLAS FP8 GEMMs alone": cublas_gemms,
}


def _modules(inputs: BlockInputs) -> nn.Sequential:
    site = inputs.site
    linear = nn.Linear(site.k, site.n, bias=False, device="meta")
    linear.weight = nn.Parameter(inputs.weight(0).detach().clone())
    return nn.Sequential(linear, nn.LayerNorm(site.n, device=inputs.device, dtype=DTYPE), nn.SiLU())


def _differentiable(inputs: BlockInputs, block: Callable[[Tensor, int], Tensor], learned: tuple[Tensor, ...]) -> Way:
    """Both uses of ``block(x, turn)``, which multiplies by the turn's weight and has ``learned`` besides."""

    def serve(turn: int) -> object:
        with torch.no_grad():
            return block(inputs.x_MK, turn)

    def train(turn: int) -> object:
        x = inputs.x_MK.detach().requires_grad_()
        return inputs.gradients(block(x, turn), x, [inputs.weight(turn), *learned])

    return Way(serve, train, block)
