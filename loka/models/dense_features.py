"""What every model does first with its dense features.

Axes:  B examples,  D dense features.
"""

import torch
from torch import Tensor


def mark_missing(dense_BD: Tensor) -> Tensor:
    """Each feature with 0 where it is missing (NaN), then for each an indicator, 1 where it is missing: B×2D.

    An indicator has one scale whatever the feature's own, so its weight is learned as fast for a raw count as for a ratio.
    """
    missing_BD = dense_BD.isnan()
    return torch.cat([dense_BD.masked_fill(missing_BD, 0), missing_BD.to(dense_BD.dtype)], dim=1)


def symlog(x: Tensor) -> Tensor:
    """sign(x)·log(1+|x|): raw counts over many binades become numbers of order one to ten.

    For models without a norm behind their first layer. Those with one take raw counts as they are.
    """
    return x.sign() * x.abs().log1p()
