"""``freeze``: a planned model made ready for serving. Weights are cast once and for all; what only training needs goes."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from loka.core.errors import InvalidInput
from loka.core.plan import Plan
from loka.dispatch.frozen import Frozen, FrozenBlock, FrozenLinear
from loka.dispatch.planned import PlannedLinear
from loka.dispatch.swap import Swap, carry_hooks, forget, put_back, put_in, require_replaceable, required_applied
from loka.nn.blocks import find_blocks
from loka.nn.fast_path import passed_by
from loka.nn.fused_block import FusedBlock
from loka.nn.left_linear import LeftLinear
from loka.nn.stand_in import take_over, why_not_taken_over
from loka.nn.unwrap import unwrapped
from loka.nn.weight_casts import held


@dataclass(frozen=True)
class FreezeReport:
    """What was frozen, the bytes of all parameters and buffers, casts among them, before and after, and which weights were kept
    though all were to be dropped: by site, what reads them."""

    sites: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    kept: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        sizes = f"{self.bytes_before / 2**20:,.1f} → {self.bytes_after / 2**20:,.1f} MiB"
        frozen = f"{len(self.sites)} site{'' if len(self.sites) == 1 else 's'} frozen for serving"
        kept = "".join(f"\n  the weight of {site} was kept: {reader} reads it" for site, reader in self.kept.items())
        return f"{frozen}, {sizes} of parameters and buffers{kept}"


def freeze(model: nn.Module, *, drop_high_precision: bool = False) -> FreezeReport:
    """Make a model with a plan ready for serving, in place and for good: eval mode, no gradients, fprop's casts alone.

    ``drop_high_precision`` drops the weights that copies in 8 bits, or in bf16, stand for: ``state_dict`` has those copies
    instead, for models frozen by the same plan. Batches that a kernel cannot take then run on it padded, as they do in an
    exported program; where the weight is kept, otherwise in high precision. A kept weight that is written otherwise than by
    ``load_state_dict`` takes effect with ``loka.refresh``. A fused block that runs in high precision here keeps its weight in
    any case, and so does a layer whose weight a function reads too, as far as the Probe's runs of forward or a trace of it
    show.
    """
    model = unwrapped(model)
    applied = required_applied(model)
    bytes_before = _bytes(model)
    require_replaceable(model, applied, applied.sites)
    keep_weight, bypassed = not drop_high_precision, passed_by(model)
    here = set(model.modules())  # users may have put others in their place
    modules = {site: module for site in applied.sites if (module := applied.module(site)) in here}
    read_elsewhere = {} if keep_weight else _read_elsewhere(model, applied.plan, modules)
    kept = set(modules.values()) if keep_weight else {modules[site] for site in read_elsewhere}
    frozen: dict[nn.Module, Frozen] = _frozen_blocks(modules.values(), kept)
    by_their_weights = []
    for site, planned in modules.items():
        if not isinstance(planned, PlannedLinear):
            continue
        if site in bypassed or planned.kernels.fprop == applied.plan.document.high_precision:
            by_their_weights += applied.swaps[site]  # torch passes them by, or their gradients alone were planned
        else:
            frozen[planned] = FrozenLinear(planned, keep_weight=planned in kept)
    for site, planned in modules.items():
        if planned in frozen and (why := why_not_taken_over(planned, frozen[planned])):
            raise InvalidInput(f"{site} {why}")
    for planned, current in frozen.items():
        take_over(planned, current)
        carry_hooks(planned, current)
    put_back(model, by_their_weights)
    put_in(model, [Swap(planned, current) for planned, current in frozen.items()])
    run = {site: frozen.get(old, old) for site, old in modules.items() if old in frozen or isinstance(old, LeftLinear)}
    applied.swaps = {site: [Swap(module, module)] for site, module in run.items()}
    forget(model, frozen=True)
    model.eval().requires_grad_(False)
    sites = tuple(site for site, planned in modules.items() if planned in frozen)
    read_elsewhere = {site: reader for site, reader in read_elsewhere.items() if site in sites}
    return FreezeReport(sites, bytes_before, _bytes(model), read_elsewhere)


def _read_elsewhere(model: nn.Module, plan: Plan, modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """The sites whose parameters a function reads too, and which: by the Probe's runs, and as far as a trace shows."""
    traced = {parameter.rpartition(".")[0]: reader for parameter, reader in find_blocks(model).graph.parameters_read.items()}
    readers = {site.site: site.read_by for site in plan.sites if site.read_by} | traced
    return {site: reader for site, reader in readers.items() if site in modules}


def _frozen_blocks(modules: Iterable[nn.Module], kept: Collection[nn.Module]) -> dict[nn.Module, Frozen]:
    """The blocks' stand-ins, with the weights of those in ``kept``; of a chain that does not run fused here, none."""
    frozen: dict[nn.Module, Frozen] = {}
    for first in modules:
        if isinstance(first, FusedBlock) and not first.follows:
            blocks = (first, *first.followers)
            if all(block.why_reference is None for block in blocks):
                stand_ins = [FrozenBlock(block, keep_weight=block in kept) for block in blocks]
                stand_ins[0].followers = tuple(stand_ins[1:])
                frozen.update(zip(blocks, stand_ins, strict=True))
    return frozen


def _bytes(model: nn.Module) -> int:
    """Of every tensor once, however many names it has."""
    beside = (tensor for module in model.modules() for tensor in held(module).values())
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers(), *beside)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
