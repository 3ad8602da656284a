"""Sites that torch passes by when it serves: an encoder layer in eval mode reads their weights itself, without calling them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def without_fast_path() -> Iterator[None]:
    """In eval mode, too, encoder layers call their parts, and encoders hand them no nested tensors: as it is in training."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def passed_by(model: nn.Module) -> dict[str, str]:
    """The sites whose stand-ins would not run without gradients in eval mode, with the reason."""
    layers = {name: module for name, module in model.named_modules() if _has_fast_path(module)}
    inside = {id(part): name for name, layer in layers.items() for part in layer.modules()}
    return {
        site: f"is inside {inside[id(module)]}, a TransformerEncoderLayer, which serves by torch's fast path: that reads "
        f"the weight without calling the layer"
        for site, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in inside
    }


def _has_fast_path(module: nn.Module) -> bool:
    if not isinstance(module, nn.TransformerEncoderLayer) or not _runs_torchs_forward(type(module)):
        return False
    return bool(module.self_attn.batch_first and module.activation_relu_or_gelu)


def _runs_torchs_forward(kind: type[nn.TransformerEncoderLayer]) -> bool:
    """Its forward is torch's, or calls that, as far as its code says."""
    own = kind.forward
    code = getattr(own, "__code__", None)
    if own is nn.TransformerEncoderLayer.forward or code is None:
        return True
    return bool({"super", nn.TransformerEncoderLayer.__name__}.intersection(code.co_names))
