"""Row-wise Adagrad on a GPU: the gradients of equal ids summed, and their rows stepped, without atomic additions.

Axes:  K ids of a batch, sorted,  E width of an embedding,  S ids that one program sums.

Ids of a batch are few and far from equally frequent: one may be a thousandth of them, another a fifth. So an id's gradients are
summed in parts, and parts end at every S-th place; its row is stepped by one program, from its parts. The order of all sums is
that of the ids.
"""

import triton
import triton.language as tl

from loka.kernels.triton.codes import wait_for_kernels_before


@triton.jit
def sum_parts_kernel(rows_ptr, order_ptr, gradient_ptr, part_ptr, count, width, S: tl.constexpr, E: tl.constexpr):
    """The part that begins at the program's place, if one does, is written there."""
    wait_for_kernels_before()
    first = tl.program_id(0)
    row = tl.load(rows_ptr + first)
    before = tl.load(rows_ptr + first - 1, mask=first > 0, other=-1)
    if (row != before) | (first % S == 0):
        place = first // S * S + tl.arange(0, S)
        inside = (place >= first) & (place < count)
        equal = inside & (tl.load(rows_ptr + place, mask=inside, other=-1) == row)
        index_S = tl.load(order_ptr + place, mask=equal, other=0)
        col = tl.arange(0, E)
        gradient_SE = tl.load(
            gradient_ptr + index_S[:, None] * width + col[None, :], mask=equal[:, None] & (col < width)[None, :], other=0.0
        )
        part_E = tl.sum(gradient_SE.to(tl.float32), axis=0)
        tl.store(part_ptr + first.to(tl.int64) * width + col, part_E, mask=col < width)


@triton.jit
def step_rows_kernel(
    rows_ptr, part_ptr, table_ptr, sum_ptr, found_inf_ptr, lr, eps, count, width,
    S: tl.constexpr, E: tl.constexpr, AT_ONCE: tl.constexpr, FOUND_INF: tl.constexpr,
):  # fmt: skip
    """The row whose ids begin at the program's place, if some do."""
    wait_for_kernels_before()
    first = tl.program_id(0)
    row = tl.load(rows_ptr + first)
    before = tl.load(rows_ptr + first - 1, mask=first > 0, other=-1)
    if row != before:
        col = tl.arange(0, E)
        gradient_E = tl.load(part_ptr + first.to(tl.int64) * width + col, mask=col < width, other=0.0)
        begin = first // S * S + S  # of the next part
        more = begin < count
        while more:
            place = begin + S * tl.arange(0, AT_ONCE)
            equal = tl.load(rows_ptr + place, mask=place < count, other=-1) == row
            part_AE = tl.load(
                part_ptr + place.to(tl.int64)[:, None] * width + col[None, :],
                mask=equal[:, None] & (col < width)[None, :], other=0.0,
            )  # fmt: skip
            gradient_E += tl.sum(part_AE, axis=0)
            begin += S * AT_ONCE
            more = (begin < count) & (tl.sum(equal.to(tl.int32), axis=0) == AT_ONCE)
        if FOUND_INF:
            gradient_E = tl.where(tl.load(found_inf_ptr) != 0, 0.0, gradient_E)
        square = tl.load(sum_ptr + row) + tl.sum(gradient_E * gradient_E, axis=0) / width
        tl.store(sum_ptr + row, square)
        place = table_ptr + row * width + col
        weight_E = tl.load(place, mask=col < width, other=0.0).to(tl.float32)
        stepped_E = weight_E - lr * gradient_E / (tl.sqrt(square) + eps)
        tl.store(place, stepped_E.to(table_ptr.dtype.element_ty), mask=col < width)
