"""``loka bench block``: one block at one shape, every way to run it timed beside compiled bf16, and the machine's limit."""

import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from loka.core.gemm import SiteShape
from loka.kernels.providers.torch_casts import room_to_compile
from loka.measure.block_ways import WAYS, BlockInputs, Way
from loka.measure.failure import told
from loka.measure.side_by_side import WorkerLost, prepared_side_by_side
from loka.measure.timing import time_together

READY_LIMIT_S = 300.0  # for a shape to be compiled in all ways, beside others


class BlockMeasurement(msgspec.Struct, frozen=True, omit_defaults=True):
    """Medians of a call in µs, by way; where ``why_not`` speaks there are none."""

    site: SiteShape
    serving_us: dict[str, float]
    training_us: dict[str, float]  # forward, backward, and our casts of the weight
    saved_bytes: dict[str, int]  # held for backward, x or what stands for it included
    why_not: dict[str, str] = {}
    serving_limit_us: float | None = None
    training_limit_us: float | None = None


@dataclass(frozen=True)
class Machine:
    """What a GPU can do at most, by its maker's word."""

    fp8_flops: float  # a second, dense
    bytes: float  # a second, to and from memory


MACHINES = {"H200": Machine(1979e12, 4.8e12), "H100 80GB HBM3": Machine(1979e12, 3.35e12)}


@dataclass(frozen=True)
class PreparedBlock:
    """The ways at one shape, each compiled and run once, or why it cannot be."""

    inputs: BlockInputs
    ways: dict[str, Way | str]


def prepare_block(site: SiteShape, device: torch.device, ways: Iterable[str] = tuple(WAYS)) -> PreparedBlock:
    with room_to_compile():
        inputs = BlockInputs(site, device)
        return PreparedBlock(inputs, {name: _prepare(name, inputs) for name in ways})


def measure_block(prepared: PreparedBlock) -> BlockMeasurement:
    """Time all ways, serving and training, in one go. One that cannot be taken is told, and the others go on."""
    inputs, site = prepared.inputs, prepared.inputs.site
    able = {name: way for name, way in prepared.ways.items() if isinstance(way, Way)}
    with room_to_compile():
        saved_bytes = {name: _saved_bytes(way, inputs) for name, way in able.items() if way.forward}
        calls = {f"training {name}": way.training for name, way in able.items()}
        calls |= {f"serving {name}": way.serving for name, way in able.items() if way.serving}
        times = time_together(calls, inputs.device, turns=max(8, len(inputs.weights)))
    gc.collect()  # graphs and what they hold, before the next shape
    torch.cuda.empty_cache()
    serving_limit_us, training_limit_us = limits_us(site, torch.cuda.get_device_name(inputs.device))
    return BlockMeasurement(
        site,
        {name: times[f"serving {name}"].median_us for name, way in able.items() if way.serving},
        {name: times[f"training {name}"].median_us for name in able},
        saved_bytes,
        {name: reason for name, reason in prepared.ways.items() if isinstance(reason, str)},
        serving_limit_us,
        training_limit_us,
    )


def measure_blocks(
    sites: Sequence[SiteShape], device: torch.device, ways: Sequence[str], *, workers: int
) -> Iterator[BlockMeasurement]:
    """The same at many shapes. Compiling is most of the time: with ``workers`` that many processes do it side by side."""
    prepare = partial(prepare_block, device=device, ways=tuple(ways))

    def lost(site: SiteShape, error: WorkerLost) -> BlockMeasurement:
        return BlockMeasurement(site, {}, {}, {}, why_not=dict.fromkeys(ways, str(error)))

    if workers:
        return prepared_side_by_side(sites, prepare, measure_block, workers=workers, limit_s=READY_LIMIT_S, lost=lost)
    return (measure_block(prepare(site)) for site in sites)


def limits_us(site: SiteShape, device_name: str) -> tuple[float | None, float | None]:
    """The least time of the block in FP8, serving and training: of each kernel its flops or its bytes, whichever take longer.

    Training is forward (codes in three forms), the gradient of norm and activation (codes of dz in both orders), dgrad, wgrad
    and the casts of the weight, each reading and writing what it must.
    """
    machine = next((machine for name, machine in MACHINES.items() if name in device_name), None)
    if machine is None:
        return None, None
    m, k, n = site.m, site.k, site.n
    gemm_us = 1e6 * 2 * m * n * k / machine.fp8_flops

    def bytes_us(count: int) -> float:
        return 1e6 * count / machine.bytes

    serving = max(gemm_us, bytes_us(m * k + n * k + m * n))
    forward = max(gemm_us, bytes_us(m * k + n * k + 3 * m * n))
    gradient = bytes_us(2 * m * n + m * n + 2 * m * n)
    dgrad = max(gemm_us, bytes_us(m * n + n * k + 2 * m * k))
    wgrad = max(gemm_us, bytes_us(m * n + m * k + 2 * n * k))
    weight_casts = bytes_us(2 * n * k + 2 * n * k)
    return serving, forward + gradient + dgrad + wgrad + weight_casts


def _prepare(name: str, inputs: BlockInputs) -> Way | str:
    """The way, tried once, or why it cannot be taken."""
    try:
        way = WAYS[name](inputs)
        way.training(0)
        if way.serving:
            way.serving(0)
        torch.cuda.synchronize(inputs.device)
    except Exception as failure:  # any library's any error: the reason is the result
        return told(failure)
    return way


def _saved_bytes(way: Way, inputs: BlockInputs) -> int:
    """What the allocator holds between forward and backward besides the output; x is let go by all but who saves it."""
    assert way.forward is not None
    leaf = inputs.x_MK.detach().requires_grad_()
    before = torch.cuda.memory_allocated(inputs.device)
    x = leaf.mul(1.0)
    y = way.forward(x, 0)
    del x
    return torch.cuda.memory_allocated(inputs.device) - before - y.numel() * y.element_size()
