"""What a click model is judged by: log-loss, normalized entropy (NE), AUC and calibration.

Sums are kept on the device in float64 and read only when someone asks, so adding a batch waits for no device.
They add up across batches and windows, and travel in checkpoints.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# AUC comes from two histograms of the logit, one for each label, with bins even in asinh(logit): 0.0004 wide around
# zero and 0.04 % of the logit far out, up to ±8e4. Within a bin pairs count as ties (half), so the error is far below
# 1e-5. That takes 1 MiB of integers, not every logit ever seen.
AUC_BINS = 1 << 16
_ASINH_RANGE = 12.0


@dataclass(frozen=True)
class Metrics:
    """The quality of a set of predictions; NaN where a number has no meaning (NE and AUC of labels that are all alike)."""

    examples: int
    log_loss: float  # mean, in nats
    ne: float  # log_loss ÷ entropy of the base rate: 1 is as good as knowing the base rate alone
    auc: float
    calibration: float  # mean prediction ÷ mean label: above 1 is over-predicting
    base_rate: float
    best_ne: float  # NE of the log-odds that labels were drawn from, on the same examples; NaN where these are not known


class MetricSums:
    """Accumulates what ``Metrics`` needs on one device."""

    def __init__(self, device: torch.device | str) -> None:
        self.examples = 0  # known on the host: no tensor needed
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)  # log-loss, predictions, labels, best log-loss
        self._histogram = torch.zeros(2 * AUC_BINS, dtype=torch.int64, device=device)  # negatives, then positives

    @torch.no_grad()
    def add(self, logits_B: Tensor, label_B: Tensor, teacher_logit_B: Tensor | None = None) -> None:
        logits_B, label_B = logits_B.double(), label_B.double()
        best_B = torch.full_like(label_B, math.nan) if teacher_logit_B is None else _log_loss(teacher_logit_B.double(), label_B)
        self._sums += torch.stack([_log_loss(logits_B, label_B), logits_B.sigmoid(), label_B, best_B]).sum(1)
        bins_B = (torch.asinh(logits_B) + _ASINH_RANGE) * (AUC_BINS / (2 * _ASINH_RANGE))
        # A NaN has no place in the order, but needs a valid index.
        bins_B = bins_B.nan_to_num(0.0).long().clamp(0, AUC_BINS - 1) + AUC_BINS * (label_B > 0.5)
        self._histogram.index_add_(0, bins_B, torch.ones_like(bins_B))
        self.examples += logits_B.shape[0]

    def merge(self, other: "MetricSums") -> None:
        self.examples += other.examples
        self._sums += other._sums
        self._histogram += other._histogram

    def reset(self) -> None:
        self.examples = 0
        self._sums.zero_()
        self._histogram.zero_()

    def metrics(self) -> Metrics:
        """Read the sums: the one place that waits for the device."""
        if not self.examples:
            raise ValueError("no examples were added, so there are no metrics")
        auc = _auc(self._histogram.view(2, AUC_BINS))
        log_loss, mean_prediction, base_rate, best_log_loss, auc = torch.cat([self._sums / self.examples, auc[None]]).tolist()
        entropy = base_rate_entropy(base_rate)
        return Metrics(
            examples=self.examples,
            log_loss=log_loss,
            ne=log_loss / entropy if entropy > 0 else math.nan,
            auc=auc,
            calibration=mean_prediction / base_rate if base_rate > 0 else math.nan,
            base_rate=base_rate,
            best_ne=best_log_loss / entropy if entropy > 0 else math.nan,
        )

    def tensors(self) -> dict[str, Tensor]:
        """The state as tensors, for a checkpoint."""
        return {"examples": torch.tensor(self.examples), "sums": self._sums, "histogram": self._histogram}

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.examples = int(tensors["examples"])
        self._sums.copy_(tensors["sums"])
        self._histogram.copy_(tensors["histogram"])


def base_rate_entropy(base_rate: float) -> float:
    """The log-loss of always predicting ``base_rate``: what NE divides by."""
    return -sum(p * math.log(p) for p in (base_rate, 1 - base_rate) if p > 0)


def _log_loss(logits_B: Tensor, label_B: Tensor) -> Tensor:
    # In float32 this cancels: at logit −6 four digits are left, and models are compared in the fourth digit of the mean.
    return F.binary_cross_entropy_with_logits(logits_B, label_B, reduction="none")


def _auc(histogram_2K: Tensor) -> Tensor:
    """The share of (positive, negative) pairs that are in order, ties counting half."""
    negatives_K, positives_K = histogram_2K.double()
    negatives_below_K = negatives_K.cumsum(0) - negatives_K
    pairs = positives_K.sum() * negatives_K.sum()
    in_order = (positives_K * (negatives_below_K + 0.5 * negatives_K)).sum()
    return in_order / pairs
