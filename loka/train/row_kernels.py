"""Row-wise Adagrad on a GPU: the gradients of equal ids summed, and their rows stepped, without atomic additions.

Axes:  K ids of a batch, sorted,  E width of an embedding,  S ids that one program sums.

Ids of a batch are few and far from equally frequent: one may be a thousandth of them, another a quarter. So sums are made in
three steps. An id's gradients are summed in parts, which end at every S-th place. S parts make a block: where all of it is one
id that began before it, its parts are summed to one. Then one program sums what there is of an id, and steps its row. All sums
follow the order of the ids.
"""

import triton
import triton.language as tl

from loka.kernels.triton.codes import wait_for_kernels_before


@triton.jit
def sum_parts_kernel(rows_ptr, order_ptr, gradient_ptr, part_ptr, count, width, S: tl.constexpr, E: tl.constexpr):
    """Sum the parts within S places; each is written at the place where it begins."""
    wait_for_kernels_before()
    begin, col = tl.program_id(0).to(tl.int64) * S, tl.arange(0, E)
    first, row = begin, tl.load(rows_ptr + begin)
    part_E = tl.zeros((E,), tl.float32)
    for place in range(begin, tl.minimum(begin + S, count)):
        next_row, index = tl.load(rows_ptr + place), tl.load(order_ptr + place)
        gradient_E = tl.load(gradient_ptr + index * width + col, mask=col < width, other=0.0).to(tl.float32)
        if next_row != row:
            tl.store(part_ptr + first * width + col, part_E, mask=col < width)
            first, row = place, next_row
            part_E = gradient_E
        else:
            part_E += gradient_E
    tl.store(part_ptr + first * width + col, part_E, mask=col < width)


@triton.jit
def _sum_of(
    rows_ptr, part_ptr, row, begin, end, width, STEP: tl.constexpr, WHOLE: tl.constexpr, E: tl.constexpr, AT_ONCE: tl.constexpr
):
    """The sum of the parts at ``begin`` and every STEP places behind it, before ``end``, as long as they are of ``row``; and
    how many these are. WHOLE: a part counts only if all its STEP places are of ``row``."""
    col, last = tl.arange(0, E), STEP - 1 if WHOLE else 0
    sum_E, found = tl.zeros((E,), tl.float32), 0
    more = begin < end
    while more:
        place = begin + STEP * (found + tl.arange(0, AT_ONCE)).to(tl.int64)
        inside = place + last < end
        equal = inside & (tl.load(rows_ptr + place + last, mask=inside, other=-1) == row)
        part_AE = tl.load(
            part_ptr + place[:, None] * width + col[None, :], mask=equal[:, None] & (col < width)[None, :], other=0.0
        )
        sum_E += tl.sum(part_AE, axis=0)
        now = tl.sum(equal.to(tl.int32), axis=0)
        found += now
        more = (now == AT_ONCE) & (begin + STEP * found < end)
    return sum_E, found


@triton.jit
def sum_blocks_kernel(rows_ptr, part_ptr, width, S: tl.constexpr, E: tl.constexpr, AT_ONCE: tl.constexpr):
    """Sum the parts of a block that is all of one id, which began before it. The sum replaces the first part."""
    wait_for_kernels_before()
    begin = tl.program_id(0).to(tl.int64) * S * S
    row = tl.load(rows_ptr + begin)
    before = tl.load(rows_ptr + begin - 1, mask=begin > 0, other=-1)
    if (row == before) & (row == tl.load(rows_ptr + begin + S * S - 1)):
        sum_E, _ = _sum_of(rows_ptr, part_ptr, row, begin, begin + S * S, width, S, False, E, AT_ONCE)
        col = tl.arange(0, E)
        tl.store(part_ptr + begin * width + col, sum_E, mask=col < width)


@triton.jit
def step_rows_kernel(
    rows_ptr, part_ptr, table_ptr, sum_ptr, found_inf_ptr, lr, eps, count, width,
    S: tl.constexpr, E: tl.constexpr, AT_ONCE: tl.constexpr, FOUND_INF: tl.constexpr,
):  # fmt: skip
    """Step the row whose ids begin at the program's place, if there is one."""
    wait_for_kernels_before()
    first = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + first)
    before = tl.load(rows_ptr + first - 1, mask=first > 0, other=-1)
    if row != before:
        col, end = tl.arange(0, E), tl.zeros((), tl.int64) + count
        gradient_E = tl.load(part_ptr + first * width + col, mask=col < width, other=0.0)
        begin = (first // S + 1) * S
        block = tl.cdiv(begin, S * S) * S * S
        parts_E, _ = _sum_of(rows_ptr, part_ptr, row, begin, tl.minimum(block, end), width, S, False, E, AT_ONCE)
        gradient_E += parts_E
        if tl.load(rows_ptr + block, mask=block < end, other=-1) == row:
            blocks_E, blocks = _sum_of(rows_ptr, part_ptr, row, block, end, width, S * S, True, E, AT_ONCE)
            begin = block + blocks * (S * S)
            parts_E, _ = _sum_of(rows_ptr, part_ptr, row, begin, end, width, S, False, E, AT_ONCE)
            gradient_E += blocks_E + parts_E
        if FOUND_INF:
            gradient_E = tl.where(tl.load(found_inf_ptr) != 0, 0.0, gradient_E)
        square = tl.load(sum_ptr + row) + tl.sum(gradient_E * gradient_E, axis=0) / width
        tl.store(sum_ptr + row, square)
        place = table_ptr + row * width + col
        weight_E = tl.load(place, mask=col < width, other=0.0).to(tl.float32)
        stepped_E = weight_E - lr * gradient_E / (tl.sqrt(square) + eps)
        tl.store(place, stepped_E.to(table_ptr.dtype.element_ty), mask=col < width)
