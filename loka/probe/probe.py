"""The Probe: learns the distributions of a model's activations and gradients while it trains."""

import dataclasses
import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from loka.core.environment import current_environment
from loka.core.errors import InvalidInput
from loka.core.fingerprint import fingerprint
from loka.core.gradient_rows import reference_of
from loka.core.moments import Covariance
from loka.core.recipe import Format
from loka.core.record import Record, SiteRecord
from loka.core.statistics import Statistic
from loka.kernels.device import device_of
from loka.nn.blocks import FoundBlocks, find_blocks
from loka.numerics.formats import format_of
from loka.probe.budget import plan_memory
from loka.probe.clock import StepClock
from loka.probe.exact import exact_products
from loka.probe.facts import blocks_of, notes_of, producers_of
from loka.probe.findings.contract import find_all
from loka.probe.history import History
from loka.probe.statistics.contract import Rows, absorb, observe
from loka.probe.watch import Call, Watch, watch
from loka.probe.weights import WeightsOverTime, weight_learns, weight_of

logger = logging.getLogger("loka")

SPREAD = 4  # a sample is learned within one in so many of the steps before the next


class Probe:
    """Watches ``model`` on every ``every``-th step and learns from ``rows`` rows of each call of each linear layer.

    Put ``with probe.step():`` around the training step. A sampled step runs eager with hooks attached; the steps between
    run as without a Probe: compiled graphs stay, and the host never waits for the device. What a sample showed is learned a
    few sites at a time behind the steps that follow, where a GPU still has work and the host has time.

    Older samples fade with ``half_life`` (in samples), so that the Record speaks of the model as it is now; None keeps all
    alike. With ``weights_over_time`` it also learns how the weights move, which the weight in the Record, the newest, does
    not tell.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 100,
        rows: int = 256,
        memory_budget: int = 2 * 2**30,
        half_life: float | None = 10.0,
        seed: int = 0,
        weights_over_time: bool = False,
    ) -> None:
        for name, value in (("every", every), ("rows", rows)):
            if value < 1:
                raise InvalidInput(f"{name} must be at least 1, got {value}")
        if half_life is not None and not half_life > 0:
            raise InvalidInput(f"half_life must be above 0 samples, or None to forget nothing, got {half_life}")
        self.every = every
        self.steps_seen = 0
        self._model = getattr(model, "_orig_mod", model)  # what torch.compile(model) wraps
        self._sites = {name: module for name, module in self._model.named_modules() if isinstance(module, nn.Linear)}
        if not self._sites:
            raise InvalidInput(f"{type(self._model).__name__} has no linear layer: there is nothing to probe")
        for site in self._sites.values():
            format_of(weight_of(site).dtype)  # refuses float64, before a run is spent on it
        self._device = self._one_device()
        self._rows = rows
        self._fade = 1.0 if half_life is None else 0.5 ** (1 / half_life)
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._clock = StepClock(self._device)
        self._found: FoundBlocks | None = None
        self._statistics: dict[str, dict[str, Statistic]] = {name: {} for name in self._sites}
        self._learned = dict.fromkeys(self._sites, 0)  # samples in the statistics
        self._references: dict[str, Tensor] = {}  # of dy's direction, one for each site that trains
        self._calls: dict[str, dict[int, int]] = {name: {} for name in self._sites}
        self._bias_norms = {name: History() for name, site in self._sites.items() if site.bias is not None}
        self._weights = WeightsOverTime(self._sites) if weights_over_time else None
        self._trains: set[str] = set()
        self._needs_dx: set[str] = set()
        self._notes: dict[str, dict[str, None]] = {name: {} for name in self._sites}
        self._dtype: torch.dtype | None = None
        self._samples = 0
        self._unlearned: deque[tuple[str, Rows]] = deque()  # of the newest sample
        self._sites_a_step = 0  # to be learned behind each step
        self._detached = False
        self._writer = _writer()
        self.memory = plan_memory(self._sites, memory_budget, taken=self._weights.bytes if self._weights else 0)
        logger.info("probe: %s", self.memory)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one training step, forward and backward: every ``every``-th, from the first on, is sampled."""
        is_sampled = self.steps_seen % self.every == 0 and not self._detached
        self.steps_seen += 1
        if not is_sampled:
            with self._clock.timed():
                yield
            self._learn(self._sites_a_step)
            return
        self._learn_all()
        if (device := self._one_device()) != self._device:
            raise InvalidInput(f"the model moved from {self._device} to {device}: make the Probe behind model.to(…)")
        full = [name for name, form in self.memory.forms.items() if form is Covariance.FULL]
        stance = torch.compiler.set_stance("force_eager")
        with stance, watch(self._model, self._sites, self._rows, self._generator, with_dw=full) as seen:
            yield
        self._take(seen)

    def record(self) -> Record:
        """What was learned so far, copied to the CPU: training may go on."""
        return _with_findings(self._taken())

    def save(self, run: str | Path) -> "Future[Path]":
        """Take the Record now, and look through and write it beside the training: ``.result()`` waits and gives the file."""
        taken = self._taken()
        return self._writer.submit(lambda: _with_findings(taken).save(run))

    def detach(self) -> None:
        """Stop for good, with every file written. No hook is on the model between steps, so there is nothing else to undo."""
        self._learn_all()
        self._detached = True
        self._writer.shutdown()
        self._writer = _writer()  # for a Record that is saved yet; it has no thread before

    def _one_device(self) -> torch.device:
        """Where the sites lie, all of them: statistics are gathered there."""
        devices = list(dict.fromkeys(weight_of(site).device for site in self._sites.values()))
        if len(devices) > 1:
            raise InvalidInput(f"the model lies on {', '.join(map(str, devices))}: probe the part on one device at a time")
        return devices[0]

    def _taken(self) -> Record:
        if not self._samples:
            raise InvalidInput("the Probe has seen no step: put `with probe.step():` around the training step, and run one")
        self._learn_all()
        found = self._found or find_blocks(self._model)
        with _outside_autograd():
            sites = {name: self._site(name, found) for name in self._sites}
        return Record(
            fingerprint=fingerprint((site.name, site.k, site.n, site.has_bias) for site in sites.values()),
            environment=current_environment(device_of(self._device)),
            dtype=self._format(),
            step_us=self._clock.median_us(),
            sites=sites,
            uncovered=tuple(map(str, found.uncovered)),
            steps_seen=self.steps_seen,
        )

    def _take(self, seen: Watch) -> None:
        """Keep what a step showed, to be learned later; at once what is first seen, and what a device must be waited for."""
        if self._found is None:
            self._found = blocks_of(self._model, seen)
        self._samples += 1
        self._sites_a_step = -(-len(self._sites) * SPREAD // self.every)
        all_finite = _all_finite(seen)
        with _outside_autograd(), exact_products(self._device):
            for name, history in self._bias_norms.items():
                history.add(torch.linalg.vector_norm(self._sites[name].bias.float()))
            if self._weights is not None:
                self._weights.observe()
            for name in self._sites:
                calls = seen.trained_calls(name)
                for call in calls:
                    self._calls[name][call.m] = self._calls[name].get(call.m, 0) + 1
                    self._dtype = call.dtype
                    if call.needs_dx:
                        self._needs_dx.add(name)
                if not (rows := self._rows_of(name, calls, seen.dw_NK.get(name), all_finite)):
                    continue
                if self._statistics[name] and rows.covariance is not Covariance.LOW_RANK:
                    self._unlearned.append((name, rows))
                else:
                    self._merge(name, rows)

    def _learn(self, sites: int) -> None:
        if not self._unlearned:
            return
        with _outside_autograd(), exact_products(self._device):
            for _ in range(min(sites, len(self._unlearned))):
                self._merge(*self._unlearned.popleft())

    def _learn_all(self) -> None:
        self._learn(len(self._unlearned))

    def _merge(self, name: str, rows: Rows) -> None:
        if rows.dy_RN is not None and name not in self._trains:
            self._trains.add(name)
            self._statistics[name] = {}  # what was learned without gradients cannot be paired with them
            self._learned[name] = 0
        elif rows.dy_RN is None and name in self._trains:
            return
        known = self._statistics[name]
        self._statistics[name] = absorb(known, rows, self._learned[name], self._fade) if known else observe(rows)
        self._learned[name] += 1

    def _rows_of(self, name: str, calls: list[Call], dw_NK: Tensor | None, all_finite: bool) -> Rows | None:
        """The rows of all calls that hold no NaN or infinity."""
        if not calls:
            return None
        x_RK = _joined([call.x_RK for call in calls])
        gradients = [call.dy_RN for call in calls if call.dy_RN is not None]
        dy_RN = _joined(gradients) if gradients else None
        if not all_finite:
            finite_R = x_RK.isfinite().all(1) if dy_RN is None else x_RK.isfinite().all(1) & dy_RN.isfinite().all(1)
            if not finite_R.all():
                self._notes[name]["rows with NaN or infinite values were seen and left out"] = None
                x_RK, dy_RN = x_RK[finite_R], None if dy_RN is None else dy_RN[finite_R]
            dw_NK = dw_NK if dw_NK is not None and dw_NK.isfinite().all() else None
        if not len(x_RK):
            return None
        if dy_RN is not None and name not in self._references:
            self._references[name] = reference_of(dy_RN)
        m = sum(call.m for call in calls)
        return Rows(x_RK, dy_RN, self.memory.forms[name], m, dw_NK, self._references.get(name))

    def _site(self, name: str, found: FoundBlocks) -> SiteRecord:
        module, block, weight_NK = self._sites[name], found.of(name), weight_of(self._sites[name])
        producers = producers_of(found)
        statistics, notes = self._statistics[name], (*notes_of(block), *self._notes[name])
        if self._weights is not None:
            statistics, notes = {**statistics, **self._weights.statistic(name)}, (*notes, *self._weights.notes(name))
        return SiteRecord(
            name=name,
            k=module.in_features,
            n=module.out_features,
            has_bias=module.bias is not None,
            is_head=bool(block.is_head),
            trains=name in self._trains,
            needs_dx=name in self._needs_dx,
            needs_dw=weight_learns(module),
            calls={m: count / self._samples for m, count in sorted(self._calls[name].items())},
            norm=block.norm.module if block.norm else None,
            norm_kind=block.norm.kind if block.norm else None,
            activation=block.activation.module if block.activation else None,
            activation_kind=block.activation.kind if block.activation else None,
            consumers=tuple(map(str, block.consumers)),
            producer=producers.get(name),
            bias_norms=self._bias_norms[name].numbers() if name in self._bias_norms else (),
            notes=notes,
            weight_format=format_of(weight_NK.dtype),
            weight_NK=_copy(weight_NK),
            bias_N=None if module.bias is None else _copy(module.bias),
            statistics={key: _on_cpu(statistic) for key, statistic in statistics.items()},
        )

    def _format(self) -> Format:
        dtype = self._dtype or weight_of(next(iter(self._sites.values()))).dtype
        if dtype is torch.float32 and self._device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32":
            return Format.TF32
        return format_of(dtype)


@contextmanager
def _outside_autograd() -> Iterator[None]:
    """No gradients, and no inference mode either: what is made in that may not be changed outside of it."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _all_finite(seen: Watch) -> bool:
    """Whether no tensor holds NaN or infinity, asked for all of them at once: the only time a device is waited for."""
    of_calls = [tensor for calls in seen.calls.values() for call in calls for tensor in (call.x_RK, call.dy_RN)]
    tensors = [tensor for tensor in [*of_calls, *seen.dw_NK.values()] if tensor is not None]
    return bool(torch.nn.utils.get_total_norm(tensors, norm_type=1.0).isfinite())


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _writer() -> ThreadPoolExecutor:
    """One thread: of two saves the newer one stays."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="loka-record")


def _with_findings(record: Record) -> Record:
    return dataclasses.replace(record, findings=find_all(record.sites))


def _copy(parameter: Tensor) -> Tensor:
    return parameter.detach().to("cpu", torch.float32, copy=True)


def _on_cpu(statistic: Statistic) -> Statistic:
    return Statistic(statistic.rule, {name: tensor.to("cpu", copy=True) for name, tensor in statistic.tensors.items()})
