"""Casting a matrix again that has changed only a little, such as a weight after a step of its optimizer: in one read, into the
same codes, by the amaxes of the time before."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from loka.core.recipe import Scaling
from loka.kernels.stepping import AdamStep
from loka.kernels.triton.adam import launch_adam_cast, pays_in_step
from loka.kernels.triton.casts import (
    FEW_AMAXES,
    NOT_WRITTEN,
    Amaxes,
    Codes,
    Target,
    amax_sizes,
    are_by_rows,
    find_amaxes,
    launch_cast,
    launch_rowwise,
    write_codes,
)
from loka.kernels.triton.launch import Again, launch, on_its_gpu, recorded

REMEMBERED_AT_ONCE = 1024
SEEN_PLACES = FEW_AMAXES  # for the amax of all, which every tile raises: in one place, thousands would wait for each other


def remember_amax(x: Tensor, plain: Target, trans: Target) -> Tensor:
    """Memory for ``rewriting``, in three rows: twice the amaxes of ``x`` that the targets' scales are made from, that of all in
    SEEN_PLACES places; zeros, which the next amaxes seen will raise; and room for flags of what outgrew them."""
    if remembered(x, plain, trans) == 0:
        return x.new_empty((3, 0), dtype=torch.int32)
    of_rows, of_cols, of_all = find_amaxes(x, Target.none() if are_by_rows(plain, x.shape[1]) else plain, trans)
    largest = of_all.amax(dim=0, keepdim=True).expand(SEEN_PLACES) if of_all.numel() else of_all
    amax = torch.cat((of_rows, of_cols, largest)).view(torch.float32)
    last = torch.where(amax.isfinite(), (2 * amax).clamp(max=3e38), amax).view(torch.int32)
    return torch.stack([last, torch.zeros_like(last), torch.zeros_like(last)])


def remembered(x: Tensor, plain: Target, trans: Target) -> int:
    """How many amaxes ``remember_amax`` keeps. Where whole rows are written by themselves, only those of columns: the rows need
    none, and note the largest of all."""
    if not are_by_rows(plain, x.shape[1]):
        return sum(_remembered_sizes(x, plain, trans))
    return x.shape[1] if trans.scaling == Scaling.ROWWISE else 0


def can_step(x: Tensor, plain: Target, trans: Target) -> bool:
    """Whether ``rewriting`` can make a step of Adam on the way: every form has one scale for all, and it pays."""
    if not pays_in_step(x.shape[1]):
        return False
    return remembered(x, plain, trans) > 0 and {plain.scaling, trans.scaling} <= {Scaling.TENSORWISE, NOT_WRITTEN}


def rewriting(
    x: Tensor, plain: Target, trans: Target, codes: Codes, memory: Tensor | None = None, adam: AdamStep | None = None
) -> Callable[[], None]:
    """A function that does ``rewrite_codes`` on the same tensors each time it is called."""
    return repeating(lambda: rewrite_codes(x, plain, trans, codes, memory, adam), x, written(x, codes, adam))


def written(x: Tensor, codes: Codes, adam: AdamStep | None) -> tuple[Tensor, ...]:
    return codes if adam is None else (*codes, x)


def repeating(write: Callable[[], None], x: Tensor, written: tuple[Tensor, ...]) -> Callable[[], None]:
    """``write``, which makes ``written`` from ``x``, as a function to be called again and again. After the first time it makes
    the same launches, without the Python that led to them and the tensors that this holds; unless x has to be copied."""
    launches: tuple[Again, ...] = ()
    first: Callable[[], None] | None = write

    @on_its_gpu
    def run(x: Tensor) -> None:
        nonlocal launches, first
        if launches:
            for again in launches:
                again()
            tell_autograd(written)
            return
        assert first is not None
        if x.stride(1) == 1:
            launches = recorded(first)
            first = None if launches else first
        else:
            first()

    return partial(run, x)


@on_its_gpu
def rewrite_codes(
    x: Tensor, plain: Target, trans: Target, codes: Codes, memory: Tensor | None = None, adam: AdamStep | None = None
) -> None:
    """``write_codes`` for a matrix that changes little from one call to the next, such as a weight in training.

    Where scales need amaxes that no single program sees, this saves the pass for them: scales come from twice the amaxes of the
    call before. Codes of a floating format lose nothing by that but their lowest binade. Where an amax has more than doubled,
    or is a small part of what it was, all is written once more by the new ones. Where rows have scales in both layouts, each
    layout is written apart, which is faster still. Without ``memory``, which ``remember_amax`` makes, this is ``write_codes``.
    With ``adam``, where ``can_step``, x makes that step first.
    """
    from loka.kernels.triton import cast_kernels as kernels

    x = x if x.stride(1) == 1 else x.contiguous()
    tell_autograd(written(x, codes, adam))
    if memory is None or memory.numel() == 0:
        write_codes(x, plain, trans, codes)
        return
    if are_by_rows(plain, x.shape[1]):
        launch_rowwise(x, plain, codes[0], codes[1], memory[0, :0])
        plain = Target.none()
        codes = *plain.empty(x), *codes[2:]
    last, seen, outgrown = memory
    amaxes = _split_amaxes(last, x, plain, trans)
    if adam is None:
        launch_cast(x, plain, trans, codes, amaxes, seen=_split_amaxes(seen, x, plain, trans))
    else:
        launch_adam_cast(x, plain, trans, codes, last, seen, adam)
    programs, (of_lines, of_all) = 0, (sum(amax.numel() for amax in amaxes[:2]), amaxes[2].numel())
    for first, count, length, one in ((0, of_lines, REMEMBERED_AT_ONCE, False), (of_lines, of_all, SEEN_PLACES, True)):
        if count:
            launch(
                kernels.remember_kernel, (-(-count // length), 1, 1),
                seen[first:], last[first:], outgrown[programs:], count, LENGTH=length, ONE=one, num_warps=4,
            )  # fmt: skip
            programs += -(-count // length)
    launch_cast(x, plain, trans, codes, amaxes, outgrown=outgrown[:programs])


def tell_autograd(written: tuple[Tensor, ...]) -> None:
    """Mark tensors as changed: a kernel's writes leave no trace, and a graph that had saved one would use its new values."""
    for tensor in written:
        torch.autograd.graph.increment_version(tensor)


def _split_amaxes(amax: Tensor, x: Tensor, plain: Target, trans: Target) -> Amaxes:
    of_rows, of_cols, of_all = amax.split(_remembered_sizes(x, plain, trans))
    return of_rows, of_cols, of_all


def _remembered_sizes(x: Tensor, plain: Target, trans: Target) -> list[int]:
    of_rows, of_cols, of_all = amax_sizes(x, plain, trans)
    return [of_rows, of_cols, of_all * SEEN_PLACES]
