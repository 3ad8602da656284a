"""Drawing rows of x and dy from what was learned of them."""

from typing import TYPE_CHECKING

from loka.core.moments import Covariance, State, covariance_of, variance_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def prepare(moments: State) -> State:
    """mean_D and the factor of Σ by which normal numbers are multiplied."""
    import torch

    mean_D, form = moments["mean_D"], covariance_of(moments)
    degrees = (moments["count"] - 1).clamp(min=1)
    if form is Covariance.FULL:
        values_D, vectors_DD = torch.linalg.eigh(moments["scatter_DD"].double() / degrees)
        factor_DD = (vectors_DD * values_D.clamp(min=0).sqrt()).t()
        return {"mean_D": mean_D, "factor_DD": factor_DD.float()}
    if form is Covariance.BLOCKS:
        values_BW, vectors_BWW = torch.linalg.eigh(moments["scatter_BWW"].double() / degrees)
        return {"mean_D": mean_D, "factor_BWW": (vectors_BWW * values_BW.clamp(min=0).sqrt()[:, None]).mT.float()}
    factor_LD = moments["sketch_LD"] / degrees.sqrt().float()
    rest_D = (variance_of(moments) - factor_LD.square().sum(0)).clamp(min=0)
    return {"mean_D": mean_D, "factor_LD": factor_LD, "rest_D": rest_D.sqrt()}


def draw(factors: State, k: int, trains: bool, rows: int, generator: "torch.Generator") -> "tuple[Tensor, Tensor | None]":
    """x_MK and dy_MN: mean + normal · factor, on the generator's device."""
    import torch

    device = generator.device
    mean_D = factors["mean_D"].to(device)
    if "factor_DD" in factors:
        normal = torch.randn(rows, mean_D.shape[0], generator=generator, device=device)
        values_MD = normal @ factors["factor_DD"].to(device)
    elif "factor_BWW" in factors:
        factor_BWW = factors["factor_BWW"].to(device)
        normal = torch.randn(factor_BWW.shape[0], rows, factor_BWW.shape[1], generator=generator, device=device)
        values_MD = (normal @ factor_BWW).transpose(0, 1).flatten(1)[:, : mean_D.shape[0]]
    else:
        factor_LD = factors["factor_LD"].to(device)
        normal = torch.randn(rows, factor_LD.shape[0], generator=generator, device=device)
        own = torch.randn(rows, mean_D.shape[0], generator=generator, device=device)
        values_MD = normal @ factor_LD + own * factors["rest_D"].to(device)
    values_MD = values_MD + mean_D
    return values_MD[:, :k].contiguous(), values_MD[:, k:].contiguous() if trains else None
