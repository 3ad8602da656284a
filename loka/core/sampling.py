"""Drawing rows of x and dy from what was learned of them.

    z = normal · L,  Lᵀ·L the correlation of z (latent.py)
    x, u, e = Q(Φ(z + shift))         every feature by its own quantiles, with its own mean (marginals.py)
    u ← u ± x·G, by the sign of e     where Σ dyᵀx would not be the gradient that the weight had
    dy = e·u                          (gradient_rows.py)

G moves outputs with a gradient only: zeros stay zero. Where draws of x cancel in y = x·wᵀ otherwise than the covariance says,
x is drawn as normal instead: there all depends on what cancels, and the covariance knows that.

Axes:  M rows,  K in_features,  N out_features,  D = K + N + 1 features of x, u and e (K where nothing trains),  L levels.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from loka.core.gradient_rows import sign_of
from loka.core.latent import Latent, latent_of
from loka.core.marginals import level_scores, shifts_for, values_at
from loka.core.moments import State, project, some_outputs, variance_of
from loka.core.statistics import Statistic

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TRIAL_PRODUCTS = 4e9  # multiplications of one trial draw; setting a sampler up takes a few of them
MOST_TRIAL_ROWS, LEAST_TRIAL_ROWS = 8192, 1024
CANCELS_OTHERWISE = 0.1  # how far E[y²] / Σ w²·E[x²] of draws may be off, relatively
WRONG_GRADIENT = 0.1  # how far E[dw] of draws may be off, relative to the size of one step's dw
CHANCE = 1.5  # how many times its average the square of a difference may be by chance
CORRECTIONS = 3  # of G, at most: zeros stay zero, so that one does not hit
RIDGE = 1e-4  # of the mean eigenvalue of E[|e|·xᵀx]: G follows no direction that x hardly has


@dataclass(frozen=True)
class Sampler:
    """Draws x and dy of one site. ``make_sampler`` makes it, on the device of the statistics."""

    k: int
    trains: bool
    latent: Latent
    values_LD: "Tensor"  # quantiles
    shift_D: "Tensor"  # added to z, so that means are right
    pull_KN: "Tensor | None" = None  # G

    def draw(self, rows: int, generator: "torch.Generator") -> "tuple[Tensor, Tensor | None]":
        """x_MK, and dy_MN where gradients were seen; FP32, on the generator's device."""
        x_MK, u_MN, e_M = self.draw_parts(rows, generator)
        return x_MK, None if e_M is None else u_MN * e_M[:, None]

    def draw_parts(self, rows: int, generator: "torch.Generator") -> "tuple[Tensor, Tensor, Tensor | None]":
        """x_MK, u_MN and e_M, which is None where no gradients were seen."""
        import torch

        device = generator.device
        z_MD = self.latent.draw(rows, generator) + self.shift_D.to(device)
        values_MD = values_at(self.values_LD.to(device), z_MD)
        x_MK, u_MN = values_MD[:, : self.k].contiguous(), values_MD[:, self.k : -1]
        if not self.trains:
            return x_MK, u_MN, None
        e_M = values_MD[:, -1]
        if self.pull_KN is not None:
            sign_M1 = sign_of(e_M)[:, None]
            u_MN = torch.where(u_MN != 0, u_MN + sign_M1 * (x_MK @ self.pull_KN.to(device)), 0.0)
        return x_MK, u_MN, e_M


def make_sampler(statistics: dict[str, Statistic], k: int, weight_NK: "Tensor") -> Sampler:
    """The sampler of a site."""
    import torch

    moments, values_LD = statistics["moments"].tensors, statistics["quantiles"].tensors["values_LD"]
    gradients = statistics["gradients"].tensors if "gradients" in statistics else None

    def sampler_of(values_LD: "Tensor") -> Sampler:
        shift_D = shifts_for(values_LD, moments["mean_D"])
        return Sampler(k, gradients is not None, latent_of(moments, values_LD), values_LD, shift_D)

    sampler = sampler_of(values_LD)
    if _cancels_otherwise(sampler, moments, weight_NK.to(values_LD.device)):
        normal_LD = moments["mean_D"] + level_scores(len(values_LD), values_LD.device)[:, None] * variance_of(moments).sqrt()
        sampler = sampler_of(torch.cat([normal_LD[:, :k], values_LD[:, k:]], dim=1))
    return sampler if gradients is None else _with_gradient(sampler, gradients)


def _trial(sampler: Sampler) -> "tuple[Tensor, Tensor, Tensor | None]":
    """The parts of a draw that is the same every time."""
    import torch

    rows = int(min(MOST_TRIAL_ROWS, max(LEAST_TRIAL_ROWS, TRIAL_PRODUCTS / sampler.latent.n_features**2)))
    return sampler.draw_parts(rows, torch.Generator(sampler.values_LD.device).manual_seed(0))


def _cancels_otherwise(sampler: Sampler, moments: State, weight_NK: "Tensor") -> bool:
    """Whether E[y²] / Σ w_k²·E[x_k²] is another in draws than by the moments. A heavy tail is in both parts, and drops out."""
    from torch.nn.functional import pad

    weight_JK = some_outputs(weight_NK)
    squares_K = weight_JK.double().square().sum(0)

    def share(second: float, of_x_K: "Tensor") -> float:
        terms = float(squares_K @ of_x_K.double())
        return second / terms if terms > 0 else 0.0

    mean_J, variance_J = project(moments, pad(weight_JK, (0, moments["mean_D"].shape[0] - sampler.k)))
    of_x_D = variance_of(moments).double() + moments["mean_D"].double().square()
    expected = share(float((mean_J.double().square() + variance_J).sum()), of_x_D[: sampler.k])
    x_MK, _, _ = _trial(sampler)
    drawn = share(float((x_MK @ weight_JK.t()).double().square().mean(0).sum()), x_MK.double().square().mean(0))
    return abs(drawn - expected) > CANCELS_OTHERWISE * expected


def _with_gradient(sampler: Sampler, gradients: State) -> Sampler:
    """The sampler, with a G if without it the E[dw] of draws is not the one that was seen."""
    if "dw_NK" not in gradients or not gradients["m"] > 0:
        return sampler
    rows, products = float(gradients["m"]), float(gradients["products"] / gradients["count"])
    wanted_NK = gradients["dw_NK"].double() / rows
    length = float(wanted_NK.square().sum())
    if not length > 0:
        return sampler
    wanted_NK *= math.sqrt(max(0.0, 1 - products / rows / length))  # without what chance adds to the length of an average
    size = float(wanted_NK.square().sum()) + products * float(gradients["steps"]) / rows  # E|dw|² of one step, over its rows²
    for _ in range(CORRECTIONS):
        x_MK, u_MN, e_M = _trial(sampler)
        assert e_M is not None
        missing_NK = wanted_NK - (u_MN * e_M[:, None]).double().t() @ x_MK.double() / len(x_MK)
        by_chance = products / len(x_MK) + products / rows
        if float(missing_NK.square().sum()) - CHANCE * by_chance <= WRONG_GRADIENT**2 * size:
            break
        more_KN = _solved(x_MK.double(), e_M.double().abs(), missing_NK)
        sampler = replace(sampler, pull_KN=more_KN if sampler.pull_KN is None else sampler.pull_KN + more_KN)
    return sampler


def _solved(x_MK: "Tensor", e_M: "Tensor", missing_NK: "Tensor") -> "Tensor":
    """G for which E[(|e|·x·G)ᵀx] is ``missing_NK``."""
    import torch

    square_KK = (x_MK * e_M[:, None]).t() @ x_MK / len(x_MK)
    square_KK.diagonal().add_(RIDGE * square_KK.diagonal().mean() + torch.finfo(torch.float32).tiny)
    return torch.linalg.solve(square_KK, missing_NK.t()).float()
