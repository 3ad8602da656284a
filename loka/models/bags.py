"""Weighted sums of a table's rows over bags of ids: by torch's ``embedding_bag``, on a Hopper GPU by kernels of our own.

With ours, all work on embeddings takes 0.29 ms of a serving call instead of 1.47 (DLRM base, 12,288 examples, an H200,
2026-11-17 and 18, ``loka bench model``), and the gradient of every id's row is written in one pass, where torch takes three.

Axes:  B examples,  N ids of an example,  P bags of an example,  R rows of the table,  E their width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from loka.kernels.device import device_of
from loka.kernels.providers.triton import missing_triton
from loka.kernels.triton.launch import launch, on_its_gpu
from loka.kernels.triton.tiles import power_of_two

WIDEST_ROW = 512  # that a warp has in its registers


def sum_bags(table_RE: Tensor, rows_BN: Tensor, weight_BN: Tensor, first_P: Tensor) -> Tensor:
    """The sums of P bags of each example, B × P × E. The bags lie one behind the other, and ``first_P`` says where each begins
    among the example's N ids. The table's gradient is sparse, with a row for every id."""
    if _is_ours(table_RE):
        return _SumBags.apply(table_RE, rows_BN, weight_BN, first_P)
    n_examples, n_ids = rows_BN.shape
    first_BP = torch.arange(n_examples, device=rows_BN.device).unsqueeze(1) * n_ids + first_P
    weights = weight_BN.flatten().to(table_RE.dtype)
    sums = F.embedding_bag(rows_BN.flatten(), table_RE, first_BP.flatten(), mode="sum", sparse=True, per_sample_weights=weights)
    return sums.view(*first_BP.shape, table_RE.shape[1])


def _is_ours(table_RE: Tensor) -> bool:
    if torch.compiler.is_compiling() or not table_RE.is_contiguous() or table_RE.shape[1] > WIDEST_ROW:
        return False
    return missing_triton(device_of(table_RE.device)) is None


class _SumBags(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table_RE: Tensor, rows_BN: Tensor, weight_BN: Tensor, first_P: Tensor) -> Tensor:
        rows_BN, weight_BN = rows_BN.contiguous(), weight_BN.contiguous()
        ctx.save_for_backward(rows_BN, weight_BN, first_P)
        ctx.shape = table_RE.shape
        return _sums(table_RE, rows_BN, weight_BN, first_P)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        rows_BN, weight_BN, first_P = ctx.saved_tensors
        row_gradient_KE = _row_gradients(gradients[0].contiguous(), weight_BN, first_P)
        indices_1K = rows_BN.flatten().unsqueeze(0)
        # torch makes its own sparse gradients by this operation. torch.sparse_coo_tensor of 2.11 warns of unchecked indices
        # even when it is told not to check them.
        gradient_RE = torch.ops.aten._sparse_coo_tensor_unsafe(indices_1K, row_gradient_KE, list(ctx.shape))
        return gradient_RE, None, None, None


@on_its_gpu
def _sums(table_RE: Tensor, rows_BN: Tensor, weight_BN: Tensor, first_P: Tensor) -> Tensor:
    from loka.models import bag_kernels as kernels

    (n_examples, n_ids), n_bags, width = rows_BN.shape, len(first_P), table_RE.shape[1]
    sum_BPE = table_RE.new_empty(n_examples, n_bags, width)
    if sum_BPE.numel():
        launch(
            kernels.sum_bags_kernel, (n_examples * n_bags, 1, 1),
            table_RE, rows_BN, weight_BN, first_P, sum_BPE, n_ids, n_bags, width, E=power_of_two(width), num_warps=1,
        )  # fmt: skip
    return sum_BPE


@on_its_gpu
def _row_gradients(gradient_BPE: Tensor, weight_BN: Tensor, first_P: Tensor) -> Tensor:
    """The gradient of every id's row, K = B·N of them."""
    from loka.models import bag_kernels as kernels

    (n_examples, n_bags, width), n_ids = gradient_BPE.shape, weight_BN.shape[1]
    row_gradient_KE = gradient_BPE.new_empty(n_examples * n_ids, width)
    if gradient_BPE.numel():
        launch(
            kernels.bag_gradient_kernel, (n_examples * n_bags, 1, 1),
            gradient_BPE, weight_BN, first_P, row_gradient_KE, n_ids, n_bags, width, E=power_of_two(width), num_warps=1,
        )  # fmt: skip
    return row_gradient_KE
