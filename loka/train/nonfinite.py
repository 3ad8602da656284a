"""When the loss is not finite: find the step without asking every step, and the module where it began.

``LossWatch`` keeps the first bad step in a tensor on the device and tells the optimizers, through ``found_inf``, to hold
still from then on. So the weights stay as they were before the bad step until the host looks, at the next log line or
checkpoint. Then the data set gives that step's batch again, and one more forward pass with hooks names the module.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from loka.core.errors import LokaError
from loka.core.files import atomic_path
from loka.core.vectors import write_tensors
from loka.data.batch import Batch

_NEVER = torch.iinfo(torch.int64).max


class NonFiniteLoss(LokaError, ArithmeticError):
    """The loss became NaN or infinite. The message names the step (counted from 1, as in the log), the module, and the file
    that holds the batch. ``step`` is the number of steps done before."""

    def __init__(self, step: int, where: str, batch_file: Path | None) -> None:
        self.step, self.where, self.batch_file = step, where, batch_file
        saved = f" The batch is in {batch_file}." if batch_file else ""
        super().__init__(
            f"the loss of step {step + 1} is not finite: {where}.{saved} "
            "Lower the learning rate, warm up longer, log-transform raw counts, or use a higher precision"
        )


class LossWatch:
    """Watches losses on the device. ``found_inf``, which is 1 from the first bad step on, is to be set on the optimizers."""

    def __init__(self, device: torch.device) -> None:
        self._first_bad_step = torch.full((), _NEVER, dtype=torch.int64, device=device)
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)

    @torch.no_grad()
    def see(self, loss: Tensor, step: int) -> None:
        self._first_bad_step.clamp_(max=torch.where(loss.isfinite(), _NEVER, step))
        self.found_inf.copy_(self._first_bad_step < _NEVER)

    def first_bad_step(self) -> int | None:
        """Waits for the device: ask at log lines and checkpoints, not every step."""
        step = int(self._first_bad_step)
        return None if step == _NEVER else step


def find_nonfinite(model: nn.Module, batch: Batch) -> str:
    """Say where the first value that is not finite appears in a forward pass over ``batch``."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return f"the parameter {name} was not finite before the step, so the gradients of the step before it were not"
    found: list[str] = []

    def look(name: str, module: nn.Module, output: object) -> None:
        if not found and not _is_finite(output):
            found.append(f"{name or 'model'} ({type(module).__name__}) gave the first output that is not finite")

    # A module's hook runs after those of the modules inside it, so the first to fire is the innermost culprit.
    handles = [
        module.register_forward_hook(lambda module, _, output, name=name: look(name, module, output))
        for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # hooks do not fire in compiled code
            model(batch)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else "every module's output is finite in a second pass, so look at the labels of the batch"


def _is_finite(output: object) -> bool:
    if isinstance(output, Tensor):
        return bool(output.isfinite().all())
    if isinstance(output, list | tuple):
        return all(_is_finite(item) for item in output)
    return True


def save_batch(path: Path, batch: Batch) -> None:
    """Write the batch's tensors under their field names."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in vars(batch).items() if isinstance(value, Tensor)}
    with atomic_path(path) as temporary:
        write_tensors(temporary, tensors)
