"""The distribution of a weight over the time of a run: a matrix normal, vec(W) ~ N(vec M, V⊗U), in N² + K² numbers.

    M  mean of the snapshots, once there are many the newest counting most;   W_c = (W − M)/√(1 + m),
    U' = (1/K)·(W_c·L_V⁻ᵀ)(·)ᵀ  with L_V·L_Vᵀ = V + εI,   V' = (1/N)·(L_U⁻¹·W_c)ᵀ(·)  with L_U·L_Uᵀ = U + εI,

both smoothed and then scaled so that trace(U) = N; m is the variance of M over that of a snapshot. One snapshot has no spread:
then V is zero and a draw is M itself.

Axes:  N out_features,  K in_features.
"""

from typing import TYPE_CHECKING

from loka.core.errors import InvalidInput
from loka.core.moments import State

if TYPE_CHECKING:
    import torch
    from torch import Tensor

WIDEST = 2048  # features of a side: a snapshot takes their third power in operations
DECAY = 0.98  # of what is known, at each snapshot, once there are 1/(1 − DECAY) of them
_EPSILON = 1e-6  # of the mean variance
_TRIES = 20  # each with ten times the ε of the one before


def fits(n: int, k: int) -> bool:
    """Whether a weight of this shape is followed at all."""
    return max(n, k) <= WIDEST


def matrix_normal_elements(n: int, k: int) -> int:
    return n * k + n * n + k * k


def observe_weight(state: State | None, weight_NK: "Tensor", decay: float = DECAY) -> State | None:
    """What is known after one more snapshot; FP32, on the weight's device. ``state`` is None before the first. A snapshot with
    NaN or infinity changes nothing."""
    import torch

    weight_NK = weight_NK.detach().float()
    n, k = weight_NK.shape
    if state is None:
        if not weight_NK.isfinite().all():
            return None
        one = torch.ones((), dtype=torch.float64, device=weight_NK.device)
        like = {"dtype": torch.float32, "device": weight_NK.device}
        spread = {"u_NN": torch.eye(n, **like), "v_KK": torch.zeros(k, k, **like)}
        return {"count": one, "mean_share": one.clone(), "mean_NK": weight_NK.clone(), **spread}
    # From an average over n snapshots, in which the newest has 1/n, to an exponential one as more come in.
    new = (1 / (state["count"] + 1)).clamp(min=1 - decay)
    # W differs from M by the spread of both: M's variance is ``mean_share`` of one snapshot's.
    centered_NK = (weight_NK - state["mean_NK"]).double() / (1 + state["mean_share"]).sqrt()
    updated = {
        **state,
        "count": state["count"] + 1,
        "mean_share": (1 - new) ** 2 * state["mean_share"] + new**2,
        "mean_NK": state["mean_NK"] + new.float() * (weight_NK - state["mean_NK"]),
    }
    variance = centered_NK.square().mean()
    if variance == 0:  # it does not train
        return updated
    if not variance.isfinite():  # it diverged: what was known before is worth more than NaN
        return state
    is_first = not state["v_KK"].any()
    u_NN = state["u_NN"].double()
    v_KK = variance * torch.eye(k, dtype=torch.float64, device=u_NN.device) if is_first else state["v_KK"].double()
    whitened_NK = torch.linalg.solve_triangular(_factor(v_KK), centered_NK.t(), upper=False).t()
    u_NN = _smooth(u_NN, whitened_NK @ whitened_NK.t() / k, new)
    whitened_NK = torch.linalg.solve_triangular(_factor(u_NN), centered_NK, upper=False)
    v_KK = _smooth(v_KK, whitened_NK.t() @ whitened_NK / n, new)
    scale = u_NN.trace() / n
    spread = {"u_NN": (u_NN / scale).float(), "v_KK": (v_KK * scale).float()}
    return {**updated, **spread} if all(part.isfinite().all() for part in spread.values()) else state


def merge_matrix_normals(a: State, b: State) -> State:
    """An average by their numbers of snapshots: approximate, for the means of the two differ."""
    share = b["count"] / (a["count"] + b["count"])
    merged = {name: tensor + share.to(tensor.dtype) * (b[name] - tensor) for name, tensor in a.items()}
    return {**merged, "count": a["count"] + b["count"]}


def draw_weight(state: State, generator: "torch.Generator") -> "Tensor":
    """M + L_U·Z·L_Vᵀ, FP32 on the generator's device."""
    import torch

    device = generator.device
    mean_NK = state["mean_NK"].to(device)
    if not state["v_KK"].any():
        return mean_NK.clone()
    normal_NK = torch.randn(mean_NK.shape, generator=generator, device=device, dtype=torch.float64)
    u_NN, v_KK = (_factor(state[name].to(device).double()) for name in ("u_NN", "v_KK"))
    return mean_NK + (u_NN @ normal_NK @ v_KK.t()).float()


def _smooth(old: "Tensor", new: "Tensor", share: "Tensor") -> "Tensor":
    smoothed = old + share * (new - old)
    return (smoothed + smoothed.t()) / 2


def _factor(covariance: "Tensor") -> "Tensor":
    """The Cholesky factor of ``covariance`` + εI; ε grows where rounding to FP32 has left it indefinite."""
    import torch

    size = covariance.shape[0]
    epsilon = _EPSILON * covariance.trace() / size
    identity = torch.eye(size, dtype=covariance.dtype, device=covariance.device)
    for _ in range(_TRIES):
        factor, failed = torch.linalg.cholesky_ex(covariance + epsilon * identity)
        if not failed:
            return factor
        epsilon = 10 * epsilon
    raise InvalidInput(
        "the spread of a weight over time is no covariance: it holds NaN or infinity, or nothing but zeros. Draw from sites "
        "whose weight moved, of a run that did not diverge"
    )
