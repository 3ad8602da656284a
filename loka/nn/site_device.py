"""Where the linear layers of a model lie, which need not be where its embeddings do: tables may be too large for a GPU."""

import torch
from torch import nn

from loka.nn.fused_block import FusedBlock


def device_of_sites(model: nn.Module) -> torch.device:
    """That of the first of them, planned or not."""
    sites = (module for module in model.modules() if isinstance(module, nn.Linear | FusedBlock))
    return next((parameter.device for site in sites for parameter in site.parameters()), torch.device("cpu"))
