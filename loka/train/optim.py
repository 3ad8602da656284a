"""The two optimizers of a recommendation model: Adam for the dense part, row-wise Adagrad for the embedding tables.

Both honour ``found_inf``, the flag that torch's own GradScaler sets on an optimizer: a float tensor on the device. Where it is
1, the step changes nothing. The decision stays on the device, so a step never waits for the device.

Axes:  R rows of a table,  K ids of a batch,  E width of an embedding.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loka.kernels.device import device_of
from loka.kernels.providers.triton import missing_triton
from loka.kernels.triton.launch import launch, on_its_gpu
from loka.kernels.triton.tiles import power_of_two
from loka.nn.adamw import AdamW

IDS_OF_PART = 32  # and parts of a block
PARTS_AT_ONCE = 16
WIDEST_ROW = 512


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator a row: the running sum of the row's mean squared gradient.

    With a sparse gradient only touched rows cost anything or change; in a dense one, too, a row of zeros changes nothing.
    Parameters are tables of two axes.
    """

    found_inf: Tensor | None = None

    def __init__(self, params: Iterable[nn.Parameter], lr: float, eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})
        for group in self.param_groups:
            for table_RE in group["params"]:
                if table_RE.ndim != 2:
                    raise ValueError(f"row-wise Adagrad is for tables of two axes, got shape {tuple(table_RE.shape)}")
                # Made here and not at the first step, so that a checkpoint has the same tensors at every step.
                self.state[table_RE]["sum_R"] = torch.zeros(table_RE.shape[0], device=table_RE.device, dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for table_RE in group["params"]:
                if table_RE.grad is not None:
                    self._update(table_RE, table_RE.grad, self.state[table_RE]["sum_R"], group["lr"], group["eps"])

    def _update(self, table_RE: Tensor, gradient: Tensor, sum_R: Tensor, lr: float, eps: float) -> None:
        if not gradient.is_sparse:
            gradient_RE = self._without_bad(gradient)
            gradient_RE = gradient_RE.float()  # in fp16 the square of a small one is 0
            sum_R.add_(gradient_RE.square().mean(1))
            table_RE.sub_((lr * gradient_RE / (sum_R.sqrt() + eps)[:, None]).to(table_RE.dtype))
            return
        ids_K, gradient_KE = gradient._indices()[0], gradient._values()
        if _can_step_rows(table_RE, ids_K):
            step_rows(table_RE, sum_R, ids_K, gradient_KE, lr, eps, self.found_inf)
            return
        gradient_KE = self._without_bad(gradient_KE)
        if table_RE.device.type == "cpu":
            rows_K, gradient_KE = sum_unique_rows(ids_K, gradient_KE)
        else:
            rows_K, gradient_KE = sum_by_row(ids_K, gradient_KE, len(table_RE))
        gradient_KE = gradient_KE.float()
        _add_to_rows(sum_R, rows_K, torch.linalg.vector_norm(gradient_KE, dim=1).square() / gradient_KE.shape[1])
        update_KE = gradient_KE * (-lr / (sum_R[rows_K].sqrt() + eps))[:, None]
        _add_to_rows(table_RE, rows_K, update_KE.to(table_RE.dtype))

    def _without_bad(self, gradient: Tensor) -> Tensor:
        """The gradient, or 0 where ``found_inf`` is 1: that adds nothing to the sums and moves nothing."""
        return gradient if self.found_inf is None else gradient.masked_fill(self.found_inf.bool(), 0.0)


def _can_step_rows(table_RE: Tensor, ids_K: Tensor) -> bool:
    """Whether our kernels can make the step: on a GPU of theirs, for a table without gaps and no wider than WIDEST_ROW."""
    if not ids_K.numel() or not table_RE.is_contiguous() or table_RE.shape[1] > WIDEST_ROW:
        return False
    return missing_triton(device_of(table_RE.device)) is None


@on_its_gpu
def step_rows(
    table_RE: Tensor,
    sum_R: Tensor,
    ids_K: Tensor,
    gradient_KE: Tensor,
    lr: float,
    eps: float,
    found_inf: Tensor | None = None,
) -> None:
    """Row-wise Adagrad of the rows ``ids_K``, by kernels that add up the gradients of equal ids in a fixed order."""
    from loka.train import row_kernels as kernels

    sorted_K, order_K = ids_K.sort(stable=True)
    gradient_KE = gradient_KE.contiguous()
    (count, width), parts_KE = gradient_KE.shape, torch.empty_like(gradient_KE, dtype=torch.float32)
    room = max(16, power_of_two(width))
    warps = max(1, room // 128)
    launch(
        kernels.sum_parts_kernel, (-(-count // IDS_OF_PART), 1, 1), sorted_K, order_K, gradient_KE, parts_KE, count, width,
        S=IDS_OF_PART, E=room, num_warps=1,
    )  # fmt: skip
    if blocks := count // IDS_OF_PART**2:
        launch(
            kernels.sum_blocks_kernel, (blocks, 1, 1), sorted_K, parts_KE, width,
            S=IDS_OF_PART, E=room, AT_ONCE=PARTS_AT_ONCE, num_warps=warps,
        )  # fmt: skip
    launch(
        kernels.step_rows_kernel, (count, 1, 1), sorted_K, parts_KE, table_RE, sum_R,
        sum_R if found_inf is None else found_inf, float(lr), float(eps), count, width,
        S=IDS_OF_PART, E=room, AT_ONCE=PARTS_AT_ONCE, FOUND_INF=found_inf is not None, num_warps=warps,
    )  # fmt: skip
    torch.autograd.graph.increment_version((table_RE, sum_R))


def sum_by_row(rows_K: Tensor, gradient_KE: Tensor, n_rows: int) -> tuple[Tensor, Tensor]:
    """Gather the gradients of equal rows: an id that occurs twice in a batch is one row with the sum, not two updates.

    This is ``coalesce``, but the result has as many rows as came in: the host would have to wait for the number of distinct
    ones. Rows left over get a gradient of zero and indices spread over the table: were they all row 0, a GPU would add them to
    it one by one.
    """
    order_K, is_new_K, _ = _sorted(rows_K)
    target_K = torch.empty_like(rows_K).scatter_(0, order_K, is_new_K.cumsum(0) - 1)
    summed_KE = torch.zeros_like(gradient_KE).index_add_(0, target_K, gradient_KE)
    spread_K = torch.arange(len(rows_K), device=rows_K.device).remainder_(n_rows)
    return spread_K.scatter_(0, target_K, rows_K), summed_KE


def sum_unique_rows(rows_K: Tensor, gradient_KE: Tensor) -> tuple[Tensor, Tensor]:
    """The same, with each row just once. On a CPU, where nobody has to wait for the number of rows, this is faster."""
    order_K, is_new_K, sorted_K = _sorted(rows_K)
    first_U = is_new_K.nonzero().squeeze(1)
    return sorted_K[first_U], F.embedding_bag(order_K, gradient_KE, first_U, mode="sum")


def _sorted(rows_K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The order that sorts the rows; where, in that order, a row differs from the one before; and the sorted rows."""
    sorted_K, order_K = rows_K.sort()
    is_new_K = torch.ones_like(sorted_K, dtype=torch.bool)
    is_new_K[1:] = sorted_K[1:] != sorted_K[:-1]
    return order_K, is_new_K, sorted_K


def _add_to_rows(target: Tensor, rows_K: Tensor, values: Tensor) -> None:
    if target.device.type == "cpu":
        target.index_put_((rows_K,), values, accumulate=True)  # index_add_ took up to 2.8 times as long (a Xeon, 16 wide)
    else:
        target.index_add_(0, rows_K, values)  # and index_put_ sorts there


def make_dense_optimizer(dense_part: nn.Module, lr: float, weight_decay: float) -> AdamW:
    """Adam with decoupled weight decay on the matrices; biases and norms (one axis) are never decayed.

    Fused on every device: a few kernels in all, not some for each parameter, and the only form that reads ``found_inf``.
    """
    parameters = list(dense_part.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW([group for group in groups if group["params"]], lr=lr)


def learning_rate(lr: float, step: int, *, warmup_steps: int = 0, decay_steps: int = 0, steps: int | None = None) -> float:
    """The learning rate of ``step`` (from 0) in a run of ``steps``: a line up to ``lr`` over the first ``warmup_steps``,
    constant, and a line down to 0 over the last ``decay_steps``."""
    rise = (step + 1) / warmup_steps if warmup_steps else 1.0
    fall = (steps - step) / decay_steps if decay_steps and steps is not None else 1.0
    return lr * min(1.0, rise, fall)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def named_state(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Tensor]:
    """Every tensor of the optimizer's state as ``parameter.key``, the tensors themselves and not copies."""
    return {
        f"{name}.{key}": value
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
