"""What a Probe knows of one site, and how it learns a sample of it.

Axes:  R rows taken of a step's calls,  K in_features,  N out_features.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from loka.core.gradient_rows import reference_of
from loka.core.moments import Covariance
from loka.core.recipe import Format
from loka.core.site_record import NEVER_CALLED, NOT_FINITE, SiteRecord
from loka.core.statistics import Rule, Statistic
from loka.nn.blocks import Block
from loka.numerics.formats import format_of, is_format
from loka.numerics.fprop_errors import some_outputs
from loka.numerics.wgrad_errors import SomeRows, of_batch
from loka.probe.history import History
from loka.probe.statistics.contract import Rows, absorb, is_due, observe
from loka.probe.watch import Call, Close, largest_magnitude
from loka.probe.weights import plain_weight, weight_learns, weight_of
from loka.probe.wgrad_history import LEAST_OFTEN, WgradHistory

CALLS_LEFT_OUT = "called without a gradient too, and not learned from there: errors are those of the calls that train it"


class SiteLearning:
    """One linear layer, from sample to sample."""

    def __init__(self, module: nn.Linear, covariance: Covariance) -> None:
        self._module, self._covariance = module, covariance
        self._statistics: dict[str, Statistic] = {}
        self._samples = 0  # in the statistics
        self._reference_N: Tensor | None = None  # of dy's direction
        self._trains = self._needs_dx = False
        self._across: set[int | None] = set()  # of all calls
        self._calls: dict[int, int] = {}  # how many, by their rows
        self._bias_norms = History()
        self._wgrad_errors = WgradHistory()
        self._notes: dict[str, None] = {}

    @property
    def may_wait(self) -> bool:
        """Whether a sample may be learned later: not the first, and not where a device must be waited for."""
        return bool(self._statistics) and self._covariance is not Covariance.LOW_RANK

    @property
    def features_to_look_at(self) -> int:
        """How many features to look at closely in the next sample, at most; 0 where errors of 8 bits are not due. Until the
        first sample with gradients they always are."""
        every = self._wgrad_errors.every if weight_learns(self._module) else LEAST_OFTEN
        return self._wgrad_errors.features if not self._trains or self._samples % every == 0 else 0

    def note(self, text: str) -> None:
        self._notes[text] = None

    def look(self, calls: list[Call], dw_NK: Tensor | None = None, dw_JI: Tensor | None = None) -> Rows | None:
        """Count the calls of a step, and take their rows, to be learned. No device is waited for."""
        if self._module.bias is not None:
            self._bias_norms.add(torch.linalg.vector_norm(self._module.bias.float()))
        if not calls:
            return None
        for call in calls:
            self._calls[call.m] = self._calls.get(call.m, 0) + call.is_first_backward
            self._needs_dx |= call.needs_dx
            self._across.add(call.across)
        x_RK = _joined([call.x_RK for call in calls])
        amax_R1 = [call.x_close.amax.expand(len(call.x_RK), 1) for call in calls if call.x_close is not None]
        x_amax_R1, weight = (_joined(amax_R1), self._some_of_weight()) if amax_R1 else (None, (None, None))
        gradients = [call.dy_RN for call in calls if call.dy_RN is not None]
        dy_RN = _joined(gradients) if gradients else None
        m, many = sum(call.m for call in calls), _many_rows(calls, dw_JI)
        return Rows(x_RK, dy_RN, self._covariance, m, dw_NK, None, x_amax_R1, *weight, many)

    def finite(self, rows: Rows) -> Rows | None:
        """Those of the rows that hold no NaN or infinity; None without any."""
        x_RK, dy_RN, dw_NK, x_amax_R1 = rows.x_RK, rows.dy_RN, rows.dw_NK, rows.x_amax_R1
        finite_R = x_RK.isfinite().all(1) if dy_RN is None else x_RK.isfinite().all(1) & dy_RN.isfinite().all(1)
        if not finite_R.all():
            self.note(NOT_FINITE)
            x_RK, dy_RN = x_RK[finite_R], None if dy_RN is None else dy_RN[finite_R]
            x_amax_R1 = None if x_amax_R1 is None else x_amax_R1[finite_R]
        if not len(x_RK):
            return None
        if x_amax_R1 is not None:
            x_amax_R1 = torch.where(x_amax_R1.isfinite(), x_amax_R1, x_RK.abs().amax())
        dw_NK = dw_NK if dw_NK is not None and dw_NK.isfinite().all() else None
        many = rows.many if rows.many is not None and all(tensor.isfinite().all() for tensor in rows.many) else None
        return dataclasses.replace(rows, x_RK=x_RK, dy_RN=dy_RN, dw_NK=dw_NK, many=many, x_amax_R1=x_amax_R1)

    def _some_of_weight(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Copies of some rows and of the largest magnitude, if due: the weight is trained on before they are looked at."""
        weight_NK, will_be = plain_weight(self._module), not self._trains or is_due("fprop_errors", self._samples)
        if weight_NK is None or not will_be:
            return None, None
        return some_outputs(weight_NK.detach()), largest_magnitude(weight_NK.detach())

    def learn(self, rows: Rows, fade: float) -> None:
        """Merge the rows of a sample with what is known, which counts for ``fade`` times as much as it did."""
        if rows.dy_RN is not None and not self._trains:
            self._trains = True
            if self._samples:
                self.note(CALLS_LEFT_OUT)
            self._statistics, self._samples = {}, 0  # what was learned without gradients cannot be paired with them
        elif rows.dy_RN is None and self._trains:
            self.note(CALLS_LEFT_OUT)
            return
        if rows.dy_RN is not None and self._reference_N is None:
            self._reference_N = reference_of(rows.dy_RN)
        known, rows = self._statistics, dataclasses.replace(rows, reference_N=self._reference_N, sample=self._samples)
        self._statistics = absorb(known, rows, fade) if known else observe(rows)
        self._samples += 1
        if rows.many is not None and weight_learns(self._module):
            self._wgrad_errors.add(rows.many, fade)

    def record(
        self, name: str, block: Block, producer: str | None, samples: int, more: dict[str, Statistic], notes: tuple[str, ...]
    ) -> SiteRecord:
        """All of it on the CPU, with ``more`` statistics and ``notes``; ``samples`` are those the Probe took."""
        module, weight_NK = self._module, weight_of(self._module)
        if errors := self._wgrad_errors.state():
            more = {**more, "wgrad_errors": Statistic(Rule.SUM, errors)}
        return SiteRecord(
            name=name,
            k=module.in_features,
            n=module.out_features,
            has_bias=module.bias is not None,
            is_head=bool(block.is_head),
            trains=self._trains,
            needs_dx=self._needs_dx,
            needs_dw=weight_learns(module),
            across=next(iter(self._across)) if len(self._across) == 1 else None,
            calls={m: count / samples for m, count in sorted(self._calls.items())},
            norm=block.norm_module,
            norm_kind=block.norm.kind if block.norm else None,
            norm_block=block.norm.block if block.norm else None,
            norm_eps=block.norm.eps if block.norm else None,
            activation=block.activation_module,
            activation_kind=block.activation.kind if block.activation else None,
            consumers=tuple(map(str, block.consumers)),
            producer=producer,
            entry=block.entry.module if block.entry else None,
            entry_block=block.entry.block if block.entry else None,
            bias_norms=self._bias_norms.numbers(),
            read_by=block.read_by,
            feeds_product=block.feeds_product,
            notes=(*(note for note in block.notes if note != NEVER_CALLED or not self._calls), *self._notes, *notes),
            weight_format=format_of(weight_NK.dtype) if is_format(weight_NK.dtype) else Format.FP32,
            weight_NK=_copy(weight_NK),
            bias_N=None if module.bias is None else _copy(module.bias),
            statistics={key: _on_cpu(statistic) for key, statistic in {**self._statistics, **more}.items()},
        )


def _many_rows(calls: list[Call], dw_JI: Tensor | None) -> SomeRows | None:
    """Of all calls that were looked at closely and got a gradient, as if they were one."""
    close = [(call.x_close, call.dy_close) for call in calls if call.x_close is not None and call.dy_close is not None]
    if not close:
        return None
    x, dy = (_as_one(parts) for parts in zip(*close, strict=True))
    return of_batch(x.values_SF, dy.values_SF, x.amax, dy.amax, dw_JI, sum(call.m for call in calls))


def _as_one(parts: Sequence[Close]) -> Close:
    return Close(_joined([part.values_SF for part in parts]), torch.stack([part.amax for part in parts]).amax())


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _copy(parameter: Tensor) -> Tensor:
    return parameter.detach().to("cpu", torch.float32, copy=True)


def _on_cpu(statistic: Statistic) -> Statistic:
    return Statistic(statistic.rule, {name: tensor.to("cpu", copy=True) for name, tensor in statistic.tensors.items()})
