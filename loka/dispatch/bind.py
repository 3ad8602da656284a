"""From a plan's words to modules: each planned site bound to its kernels, blocks linked into their chains."""

from torch import nn

from loka.core.errors import LokaError
from loka.core.gemm import Role
from loka.core.plan import Goal, Plan, SitePlan, vector_name
from loka.core.survey import BLOCK_KERNEL
from loka.dispatch.planned import PassThrough, PlannedLinear
from loka.dispatch.swap import Swap
from loka.kernels.contract import KERNELS
from loka.kernels.device import device_of
from loka.kernels.executor import SiteKernels
from loka.kernels.providers.torch_left import LEFT
from loka.nn.block_norm import BlockNorm
from loka.nn.fused_block import FusedBlock, link_blocks
from loka.nn.left_linear import LeftLinear
from loka.nn.linear import why_not_swapped
from loka.nn.stand_in import has_hooks, is_compiled, take_over, why_not_stood_in_for, why_not_taken_over

_COMPILED_BY_ITSELF = "is compiled by itself, and torch.compile would go on with the old layer: compile the module around it"


def why_not_bound(module: nn.Linear, site: SitePlan, plan: Plan) -> str | None:
    """Why a planned site cannot run here as planned: its module, or a kernel that is missing. None where it can."""
    if not site.site:
        return "is the model itself, in whose place nothing can be put: put it into another module"
    if site.site.rpartition(".")[2] == "_orig_mod":
        return _COMPILED_BY_ITSELF
    if reason := why_not_swapped(module) or _why_not_replaced(module):
        return reason
    if site.block is not None:
        return None  # the block says it itself, once it is made
    device = device_of(module.weight.device)
    for role, kernel in _kernels(site, plan).items():
        if kernel not in KERNELS:
            return f"{role} is planned on {kernel}, which this LoKA does not have"
        if reason := KERNELS.get(kernel).missing(device):
            return f"{role} is planned on {kernel}, which cannot run on {device}: {reason}"
    return None


def _why_not_replaced(module: nn.Module) -> str | None:
    if is_compiled(module):
        return _COMPILED_BY_ITSELF
    if "forward" in vars(module):
        return "has a forward of its own, put on the instance"
    if has_hooks(module):
        return "has hooks, which its stand-in would lose: remove them, apply the plan, and put them on again"
    return None


def bind_site(module: nn.Linear, site: SitePlan, plan: Plan) -> list[Swap] | str:
    """A planned site that is no block, ready to be put in; or why it cannot be."""
    kernels = SiteKernels(**_kernels(site, plan))
    try:
        if kernels.fprop == LEFT:
            if plan.document.goal is Goal.TRAINING:
                return f"is planned on {LEFT}, which is for models that serve: it makes no gradients"
            return [Swap(module, LeftLinear.from_linear(module, feeds_product=site.feeds_product))]
        vector = plan.vectors[name] if (name := vector_name(site)) else None
        return [Swap(module, PlannedLinear.from_linear(module, kernels, site.transform, vector))]
    except LokaError as error:
        return str(error)


def bind_block(model: nn.Module, module: nn.Linear, site: SitePlan) -> list[Swap] | str:
    """A planned block with what it absorbs, ready to be put in; or why it cannot be."""
    assert site.block is not None
    if site.block.kernel != BLOCK_KERNEL:
        return f"is planned on {site.block.kernel}, and the one fused block of this LoKA is {BLOCK_KERNEL}"
    parts = {name: model.get_submodule(name) for name in site.block.absorbed}
    norm, activation, entry = (parts.get(name or "") for name in (site.block.norm, site.block.activation, site.block.entry))
    for name, part in parts.items():
        if reason := why_not_stood_in_for(part) or _why_not_replaced(part):
            return f"would absorb {name}, which {reason}"
    if isinstance(entry, BlockNorm):
        entry = entry.over(module.in_features) or entry
    try:
        block = FusedBlock.from_modules(module, norm, activation, entry)
    except LokaError as error:
        return str(error)
    if block.why_reference:
        return f"{site.block.kernel} cannot run here: {block.why_reference}"
    absorbed = {name: Swap(part, PassThrough(site.site)) for name, part in parts.items()}
    for name, swap in absorbed.items():
        if reason := why_not_taken_over(swap.original, swap.current):
            return f"would absorb {name}, which {reason}"
        take_over(swap.original, swap.current)
    return [Swap(module, block), *absorbed.values()]


def link_chains(plan: Plan, blocks: dict[str, FusedBlock]) -> None:
    """Let every chain of the plan hand on FP8."""
    fed = {site.site: site.block.producer for site in plan.sites if site.block and site.block.producer}
    behind = {producer: site for site, producer in fed.items()}
    for first in blocks:
        if first in fed or first not in behind:
            continue
        chain = [first]
        while chain[-1] in behind:
            chain.append(behind[chain[-1]])
        link_blocks([blocks[name] for name in chain])


def _kernels(site: SitePlan, plan: Plan) -> dict[Role, str]:
    """The kernels of all three roles: those that the plan leaves out, as one for serving does, are in high precision."""
    return {role: site.kernels[role].kernel if role in site.kernels else plan.document.high_precision for role in Role}
