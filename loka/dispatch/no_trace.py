"""Passes that leave a model as it was, and what a loss teaches."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel

from loka.core.errors import InvalidInput
from loka.dispatch.loss_change import Loss, scalar
from loka.nn.kept_state import left_as_it_was, random_state_kept


def learned_by(model: nn.Module, loss: Loss, batches: Iterable[Any]) -> frozenset[Tensor]:
    """The parameters of ``model``, and what else ``loss`` reaches on any batch: embeddings in front of the model, say."""
    found = set(model.parameters())
    with without_a_trace(model), torch.compiler.set_stance("force_eager"), torch.enable_grad():
        model.train()
        for batch in batches:
            value = scalar(loss(model, batch))
            if value.grad_fn is None:
                raise InvalidInput(
                    "loss(model, batch) has no gradient: it must not detach, or be computed under no_grad, and some parameter "
                    "must require one"
                )
            found |= _leaves_of(value.grad_fn)
    return frozenset(found)


def _leaves_of(root: Node | None) -> set[Tensor]:
    """The tensors that a backward pass from ``root`` adds gradients to."""
    todo, seen, leaves = [root], set(), set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [node for node, _ in node.next_functions]
        if type(node).__name__ == "AccumulateGrad":
            leaves.add(node.variable)  # pyrefly: ignore[missing-attribute]
    return leaves


def drop_gradients(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.grad = None


def _send_nothing(model: nn.Module) -> None:
    """Other ranks may train, or not be as far: they would take what is checked here for their own steps."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            if module.static_graph and not module._static_graph_delay_allreduce_enqueued:
                raise InvalidInput(
                    "DistributedDataParallel sends the gradients of a static graph's first step in any case: call check_plan "
                    "behind a training step, or with the module inside"
                )
            module.require_backward_grad_sync = module.require_forward_param_sync = False


@contextmanager
def without_a_trace(model: nn.Module, learned: Iterable[Tensor] = ()) -> Iterator[None]:
    """Gradients, what modules hold (buffers, mode, attributes), and random numbers are after the block what they were before.
    DistributedDataParallel sends nothing within it.

    ``learned`` are tensors with gradients beside the model's own parameters.
    """
    gradients = {parameter: parameter.grad for parameter in (*model.parameters(), *learned)}
    tables = [table for parameter in gradients if (table := parameter._post_accumulate_grad_hooks)]
    hooks = [dict(table) for table in tables]
    drop_gradients(gradients)
    for table in tables:
        table.clear()  # of optimizers that step within backward
    try:
        with left_as_it_was(model), random_state_kept(model):
            _send_nothing(model)
            yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for table, before in zip(tables, hooks, strict=True):
            table.update(before)
