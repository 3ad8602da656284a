"""Weighted sums of rows over bags, and each row's share of a sum's gradient: one bag a program, one row at a time.

Axes:  B examples,  N ids of an example,  P bags of an example,  E width of a row.
"""

import triton
import triton.language as tl

from loka.kernels.triton.codes import wait_for_kernels_before


@triton.jit
def _bag(first_ptr, n_ids, n_bags):
    """Where the program's bag begins and ends among all ids."""
    example, bag = tl.program_id(0) // n_bags, tl.program_id(0) % n_bags
    begin = example.to(tl.int64) * n_ids
    return begin + tl.load(first_ptr + bag), begin + tl.load(first_ptr + bag + 1, mask=bag + 1 < n_bags, other=n_ids)


@triton.jit
def sum_bags_kernel(table_ptr, rows_ptr, weight_ptr, first_ptr, sum_ptr, n_ids, n_bags, width, E: tl.constexpr):
    """A row of weight 0, such as padding's, is not read."""
    wait_for_kernels_before()
    begin, end = _bag(first_ptr, n_ids, n_bags)
    col = tl.arange(0, E)
    sum_E = tl.zeros((E,), tl.float32)
    for place in range(begin, end):
        row, weight = tl.load(rows_ptr + place), tl.load(weight_ptr + place)
        row_E = tl.load(table_ptr + row * width + col, mask=col < tl.where(weight == 0.0, 0, width), other=0.0)
        sum_E += weight * row_E.to(tl.float32)
    tl.store(sum_ptr + tl.program_id(0).to(tl.int64) * width + col, sum_E.to(sum_ptr.dtype.element_ty), mask=col < width)


@triton.jit
def bag_gradient_kernel(gradient_ptr, weight_ptr, first_ptr, row_gradient_ptr, n_ids, n_bags, width, E: tl.constexpr):
    wait_for_kernels_before()
    begin, end = _bag(first_ptr, n_ids, n_bags)
    col = tl.arange(0, E)
    gradient_E = tl.load(gradient_ptr + tl.program_id(0).to(tl.int64) * width + col, mask=col < width, other=0.0)
    for place in range(begin, end):
        part_E = tl.load(weight_ptr + place) * gradient_E.to(tl.float32)
        tl.store(row_gradient_ptr + place * width + col, part_E.to(row_gradient_ptr.dtype.element_ty), mask=col < width)
