"""A measured mean and how well it is known."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A mean of ``n`` samples; the true mean lies between ``low`` and ``high`` at the confidence asked for."""

    mean: float
    low: float
    high: float
    n: int
