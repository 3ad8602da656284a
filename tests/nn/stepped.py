"""For the tests of loka.AdamW: planned modules that an optimizer steps, and how to see that their casts are of the weight."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from loka.core.recipe import Transform
from loka.kernels.executor import SiteKernels
from loka.nn.block_norm import BlockNorm
from loka.nn.fused_block import FusedBlock
from loka.nn.linear import LokaLinear
from loka.nn.weight_casts import held

WIDE = 512  # from which rows of a block's weight have powers of two


def layer(device: torch.device, transform: Transform = Transform.NONE) -> LokaLinear:
    plain = nn.Linear(64, 40, device=device)
    name = "reference.tensorwise" if device.type == "cpu" else "triton.tensorwise"
    vector = None if transform is Transform.NONE else torch.full((64,), 2.0)
    return LokaLinear.from_linear(plain, SiteKernels.same(name), transform, vector)


def block(device: torch.device) -> FusedBlock:
    made = FusedBlock(nn.Parameter(0.02 * torch.randn(24, WIDE, device=device)), None, BlockNorm(24), None)
    assert made.why_reference is None
    return made


MAKERS: list[Callable[[torch.device], nn.Module]] = [layer, block]


def learn(module: nn.Module, seed: int) -> None:
    """Gradients for all, drawn and not computed."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)  # which keeps the order of axes, as autograd does
        parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))


def casts(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in held(module).items() if name != "weight_memory"}


def assert_current(module: Any) -> None:
    """What is held, decoded, is the weight to the rounding of e4m3."""
    if isinstance(module, FusedBlock):
        codes = module._held_codes()
        pairs = [(codes.codes_NK, codes.scale_N, module.weight), (codes.codes_KN, codes.scale_KN, module.weight.t())]
    else:
        there, w = held(module), module.weight
        oriented = (w, w.t()) if there["weight_codes_0"].shape[1] >= w.shape[1] else (w.t(), w)
        pairs = [(there[f"weight_codes_{index}"], there[f"weight_scale_{index}"], oriented[index]) for index in (0, 1)]
    for codes_OC, scale, weight in pairs:
        rows, cols = weight.shape
        value = (codes_OC.float() * scale)[:rows, :cols]
        assert ((value - weight).abs() <= weight.abs() / 16 + weight.abs().max() * 2.0**-16).all()


def twins(make: Callable[[torch.device], nn.Module], device: torch.device) -> tuple[nn.Module, nn.Module]:
    """A planned module, and a plain one of the same parameters."""
    torch.manual_seed(0)
    planned = make(device)
    plain = nn.Module()
    for name, parameter in planned.named_parameters():
        plain.register_parameter(name, nn.Parameter(parameter.detach().clone()))
    return planned, plain


def is_current(module: nn.Module) -> bool:
    try:
        assert_current(module)
    except AssertionError:
        return False
    return True
