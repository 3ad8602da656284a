"""Rows of dy as dy = e·u: a number e, how strong the row is and of which sign, times a row u, where it points.

In a model with a loss per example a row of dy is the example's error times a direction that changes little from row to row. The
error has two humps, one for each label, and lengths over many binades; a covariance of dy sees the longest rows alone. Apart,
both are simple.

    e = ± Σ|dy_n·r_n| / Σ_{dy_n≠0} r_n²,  with the sign of Σ dy_n·r_n;      u = dy / e

r is a reference, fitted to the first rows seen: the usual size of each output's gradient where it has one, for an e of 1. r and
e are fitted to each other in turn. So for rows that differ only by their error, and by which outputs a ReLU lets through, e is
exactly the error, and an output has one value of u besides 0.

Axes:  R rows,  N out_features.
"""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LEAST_REFERENCE = 0.02  # of its rms: else a row with gradients only where the first rows had none would pass for a row of 0
ROUNDS = 4  # of fitting


def reference_of(dy_RN: "Tensor") -> "Tensor":
    """r, of rms 1; its largest entry is positive, so that two shards agree on the sign."""
    import torch

    unit_RN = _divided(dy_RN, dy_RN.abs().amax(1, keepdim=True))
    unit_RN = _divided(unit_RN, torch.linalg.vector_norm(unit_RN, dim=1, keepdim=True))
    size_N = _usual_size(unit_RN)
    for _ in range(ROUNDS):
        size_N = _usual_size(_divided(unit_RN, strength(unit_RN, size_N)[:, None]))
    sign_N = sign_of(_main_direction(unit_RN))
    return size_N * sign_N * sign_N[size_N.argmax()]


def split_rows(dy_RN: "Tensor", reference_N: "Tensor") -> "tuple[Tensor, Tensor]":
    """u_RN and e_R. A row of 0, such as a masked example's, has an e of 0 and the u of the last row before it that is not 0 (or
    of the last in the batch): were its u 0 too, rows would be drawn as 0 for their e, and again for their u."""
    import torch

    e_R = strength(dy_RN, reference_N) * sign_of(dy_RN @ reference_N)
    u_RN = _divided(dy_RN, e_R[:, None])
    # Counted from 1, so that 0 means none so far. No shape depends on how many there are, so nobody waits for the device.
    live_R = torch.arange(1, len(e_R) + 1, device=e_R.device) * (e_R != 0)
    last_R = live_R.cummax(0).values
    return u_RN[last_R + (last_R == 0) * last_R[-1] - 1], e_R


def strength(rows_RN: "Tensor", reference_N: "Tensor") -> "Tensor":
    """|e| of every row; 1 where the rows are u."""
    return _divided(rows_RN.abs() @ reference_N.abs(), (rows_RN != 0).to(rows_RN.dtype) @ reference_N.square())


def alignment(a_N: "Tensor", b_N: "Tensor") -> float:
    """The cosine between two references."""
    from torch.nn.functional import cosine_similarity

    return float(cosine_similarity(a_N.double(), b_N.double(), dim=0))


def _usual_size(rows_RN: "Tensor") -> "Tensor":
    """Of every output, on average over the rows in which it is not 0; of rms 1 together."""
    import torch

    size_N = _divided(rows_RN.abs().sum(0), (rows_RN != 0).sum(0, dtype=rows_RN.dtype))
    rms = size_N.square().mean().sqrt()
    return torch.where(rms > 0, _divided(size_N, rms), 1.0).clamp(min=LEAST_REFERENCE)


def _main_direction(unit_RN: "Tensor") -> "Tensor":
    """The first principal axis of the rows about 0, by whichever of the two Gram matrices is smaller."""
    import torch

    rows, outputs = unit_RN.shape
    if outputs <= rows:
        return torch.linalg.eigh((unit_RN.t() @ unit_RN).double()).eigenvectors[:, -1].float()
    return unit_RN.t() @ torch.linalg.eigh((unit_RN @ unit_RN.t()).double()).eigenvectors[:, -1].float()


def sign_of(values: "Tensor") -> "Tensor":
    """±1, and 1 for 0: a sign of 0 would make 0 of what it is multiplied with."""
    return 1 - 2 * (values < 0).to(values.dtype)


def _divided(values: "Tensor", by: "Tensor") -> "Tensor":
    """0 where ``by`` is."""
    return values / by.where(by != 0, math.inf)
