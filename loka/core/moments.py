"""Count, mean and covariance of rows, as a state that merges: of two batches, two shards or two runs alike.

    n' = n + B,   δ = μ_b − μ,   μ' = μ + (B/n')·δ,   S' = S + S_b + (n·B/n')·δδᵀ,   Σ = S'/(n'−1)

Rows that join a state need no S_b of their own: about c = μ_b − √(n/n')·δ their products are S_b + (n·B/n')·δδᵀ.
S is kept whole, as blocks along its diagonal, or as its diagonal with a sketch of few rows whose Gram matrix is nearly S.
The first two merge exactly; a sketch keeps the largest directions and is approximate.

Axes:  R rows,  D features (a site's x and the two parts of its dy side by side),  B blocks of width W,  L rows of the sketch.
"""

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

State = dict[str, "Tensor"]


class Covariance(StrEnum):
    """How S is kept, in order of memory."""

    FULL = "full"
    BLOCKS = "block-diagonal"
    LOW_RANK = "low-rank + diagonal"


BLOCK_WIDTH = 256
SKETCH_ROWS = 64
OUTPUTS = 256


def covariance_of(state: State) -> Covariance:
    """The form that ``state`` keeps S in."""
    if "scatter_DD" in state:
        return Covariance.FULL
    return Covariance.BLOCKS if "scatter_BWW" in state else Covariance.LOW_RANK


def covariance_elements(form: Covariance, n_features: int) -> int:
    """How many numbers S takes in ``form``."""
    blocks = -(-n_features // BLOCK_WIDTH)
    return {
        Covariance.FULL: n_features * n_features,
        Covariance.BLOCKS: blocks * BLOCK_WIDTH * BLOCK_WIDTH,
        Covariance.LOW_RANK: (SKETCH_ROWS + 1) * n_features,
    }[form]


def moments_of(rows_RD: "Tensor", form: Covariance) -> State:
    """The state of one batch. ``rows_RD`` is FP32; the caller sees to it that its products are too (no TF32, no autocast).

    The count stays on the CPU, wherever the rows lie: nothing that needs it waits for a device.
    """
    import torch

    mean_D = rows_RD.mean(0)
    centered_RD = rows_RD - mean_D
    state = {"count": torch.tensor(float(rows_RD.shape[0]), dtype=torch.float64, device="cpu"), "mean_D": mean_D}
    if form is Covariance.FULL:
        return {**state, "scatter_DD": centered_RD.t() @ centered_RD}
    if form is Covariance.BLOCKS:
        blocks_BRW = _in_blocks(centered_RD)
        return {**state, "scatter_BWW": blocks_BRW.mT @ blocks_BRW}
    return {**state, "scatter_D": centered_RD.square().sum(0), "sketch_LD": _compress(centered_RD)}


def add_rows(state: State, rows_RD: "Tensor", fade: float = 1.0) -> State:
    """The state of these rows and those of ``state``, the latter counting ``fade`` times as much as they did.

    S changes in place: at a wide site it is the largest thing there is, so it is read and written only once.
    """
    import torch

    before, rows = fade * float(state["count"]), rows_RD.shape[0]
    count = before + rows
    mean_D = rows_RD.mean(0)
    centered_RD = rows_RD - mean_D.lerp(state["mean_D"], (before / count) ** 0.5)
    joined = {
        "count": torch.tensor(count, dtype=torch.float64, device="cpu"),
        "mean_D": state["mean_D"].lerp(mean_D, rows / count),
    }
    if "scatter_DD" in state:
        return {**joined, "scatter_DD": state["scatter_DD"].addmm_(centered_RD.t(), centered_RD, beta=fade)}
    if "scatter_BWW" in state:
        blocks_BRW = _in_blocks(centered_RD)
        return {**joined, "scatter_BWW": state["scatter_BWW"].baddbmm_(blocks_BRW.mT, blocks_BRW, beta=fade)}
    return {
        **joined,
        "scatter_D": state["scatter_D"].mul_(fade).add_(centered_RD.square().sum(0)),
        "sketch_LD": _compress(torch.cat([fade**0.5 * state["sketch_LD"], centered_RD])),
    }


def merge_moments(a: State, b: State) -> State:
    """The state of the rows of both."""
    count = a["count"] + b["count"]
    delta_D = b["mean_D"] - a["mean_D"]
    weight = (a["count"] * (b["count"] / count)).float()
    state = {"count": count, "mean_D": a["mean_D"] + (b["count"] / count).float() * delta_D}
    if "scatter_DD" in a:
        scatter_DD = (a["scatter_DD"] + b["scatter_DD"]).addr_(delta_D * weight, delta_D)
        return {**state, "scatter_DD": scatter_DD}
    if "scatter_BWW" in a:
        delta_B1W = _in_blocks(delta_D[None])
        return {**state, "scatter_BWW": a["scatter_BWW"] + b["scatter_BWW"] + weight * (delta_B1W.mT @ delta_B1W)}
    import torch

    between_1D = weight.sqrt() * delta_D[None]
    return {
        **state,
        "scatter_D": a["scatter_D"] + b["scatter_D"] + between_1D[0].square(),
        "sketch_LD": _compress(torch.cat([a["sketch_LD"], b["sketch_LD"], between_1D])),
    }


def variance_of(state: State) -> "Tensor":
    """The variance of every feature."""
    form = covariance_of(state)
    if form is Covariance.FULL:
        scatter_D = state["scatter_DD"].diagonal()
    elif form is Covariance.BLOCKS:
        scatter_D = state["scatter_BWW"].diagonal(dim1=1, dim2=2).flatten()[: state["mean_D"].shape[0]]
    else:
        scatter_D = state["scatter_D"]
    return (scatter_D / (state["count"] - 1).clamp(min=1).float()).clamp(min=0)


def some_outputs(weight_NK: "Tensor") -> "Tensor":
    """At most OUTPUTS rows of a weight, evenly spaced, to stand for all: variances of outputs cost K² operations each."""
    return weight_NK[:: -(-weight_NK.shape[0] // OUTPUTS)]


def project(state: State, weight_JD: "Tensor") -> "tuple[Tensor, Tensor]":
    """Mean and variance of Σ_d w_d·v_d for every row w of ``weight_JD``, in whichever form S was kept."""
    degrees = (state["count"] - 1).clamp(min=1).float()
    form = covariance_of(state)
    if form is Covariance.FULL:
        variance_J = ((weight_JD @ state["scatter_DD"]) * weight_JD).sum(1) / degrees
    elif form is Covariance.BLOCKS:
        weight_BJW = _in_blocks(weight_JD)
        variance_J = ((weight_BJW @ state["scatter_BWW"]) * weight_BJW).sum((0, 2)) / degrees
    else:
        sketch_LD = state["sketch_LD"]
        rest_D = (variance_of(state) - sketch_LD.square().sum(0) / degrees).clamp(min=0)
        variance_J = (weight_JD @ sketch_LD.t()).square().sum(1) / degrees + weight_JD.square() @ rest_D
    return weight_JD @ state["mean_D"], variance_J.clamp(min=0)


def _in_blocks(rows_RD: "Tensor") -> "Tensor":
    """B×R×W, the last block filled with zeros."""
    from torch.nn.functional import pad

    rows, features = rows_RD.shape
    blocks = -(-features // BLOCK_WIDTH)
    return pad(rows_RD, (0, blocks * BLOCK_WIDTH - features)).view(rows, blocks, BLOCK_WIDTH).transpose(0, 1)


def _compress(rows_RD: "Tensor") -> "Tensor":
    """At most SKETCH_ROWS rows with nearly the same Gram matrix: the largest directions of the rows."""
    import torch

    if rows_RD.shape[0] <= SKETCH_ROWS:
        return rows_RD
    gram_RR = (rows_RD @ rows_RD.t()).double()
    _, directions_RR = torch.linalg.eigh(gram_RR)
    return directions_RR[:, -SKETCH_ROWS:].t().float() @ rows_RD
