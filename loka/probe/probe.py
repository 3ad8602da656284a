"""The Probe: learns the distributions of a model's activations and gradients while it trains."""

import dataclasses
import hashlib
import logging
import math
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from loka.core.environment import current_environment
from loka.core.errors import InvalidInput, require_count
from loka.core.fingerprint import fingerprint
from loka.core.moments import Covariance
from loka.core.recipe import Format
from loka.core.record import Record
from loka.core.site_record import SiteRecord
from loka.kernels.device import device_of
from loka.nn.blocks import Block, FoundBlocks, find_blocks
from loka.nn.fast_path import passed_by
from loka.nn.graph import Method, names_inside_torch
from loka.nn.unwrap import Example, arguments_of, unwrapped
from loka.numerics.formats import format_of
from loka.probe.aside import Answer, Aside, exactly
from loka.probe.budget import plan_memory
from loka.probe.clock import StepClock
from loka.probe.facts import blocks_of, cast_in_steps, merged, producers_of, why_stays
from loka.probe.findings.contract import find_all
from loka.probe.site_learning import CALLS_LEFT_OUT, SiteLearning
from loka.probe.statistics.contract import Rows
from loka.probe.watch import Watch, watch
from loka.probe.weights import WeightsOverTime, weight_of

logger = logging.getLogger("loka")

MOST_FLOWS = 8  # each takes one forward pass more; those that reach a site for the first time are looked at in any case
BASELINES = frozenset({torch.float32, torch.bfloat16})  # dtypes that kernels are compared with
LONG_S = 30.0  # of learning on a CPU, from which on it is told
MUCH = 0.05  # of the time of training
SPREAD = 4  # a sample is learned within the first 1/SPREAD of the steps before the next


class Probe:
    """Watches ``model`` on every ``every``-th step and learns from ``rows`` rows of each call of each linear layer.

    Put ``with probe.step():`` around the training step. A sampled step runs eager with hooks attached; the steps between
    run as without a Probe: compiled graphs stay. Once the device is done with a sample, it is learned a few sites at a time
    after each of the steps that follow, on a GPU in a stream of its own. The host waits for the device after the first sample,
    where values were NaN or infinite, at sites whose covariance is kept as low-rank, for layers that are also called without a
    gradient, and with ``weights_over_time``.

    What is learned takes at most ``memory_budget`` bytes; ``memory`` says how many, and in which form each site's covariance is
    kept. Rows that wait to be learned take a few MiB a site. ``seed`` decides which rows are chosen.

    Older samples fade with ``half_life`` (in samples), so that the Record speaks of the model as it is now; None keeps all
    alike. With ``weights_over_time`` it also learns how weights move: the Record's own weight is the newest alone.

    After the first sample the model's forward is run once more, without gradients, to see who reads what: on that sample's
    batch, or, for a model that is trained past its forward, on ``example``, forward's arguments in a tuple, or by name in a
    dict. The same is done for each later call of the model that went through other layers than any before, as branches by
    domain do.
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
        example: Example | None = None,
    ) -> None:
        for name, value in (("every", every), ("rows", rows), ("memory_budget", memory_budget)):
            require_count(name, value)
        if half_life is not None and not half_life > 0:
            raise InvalidInput(f"half_life must be above 0 samples, or None to forget nothing, got {half_life}")
        if example is not None:
            arguments_of(example)  # else a wrong one would be refused only after the first step
        self._example = example
        self.every = every
        self.steps_seen = 0
        self._model = unwrapped(model)
        self._sites = {name: module for name, module in self._model.named_modules() if isinstance(module, nn.Linear)}
        if not self._sites:
            raise InvalidInput(f"{type(self._model).__name__} has no linear layer: there is nothing to probe")
        for name, module in self._model.named_modules():
            if dotted := next((child for child in module._modules if "." in child), None):
                raise InvalidInput(f"{name or 'the model'} holds a module as {dotted!r}: give it a name without a dot")
        for name, site in self._sites.items():
            if isinstance(site._parameters.get("weight"), UninitializedParameter):
                raise InvalidInput(f"{name} has no shape yet: run the model once on a batch, then probe it")
        _require_baseline({name: weight_of(site).dtype for name, site in self._sites.items()})
        self._device = self._one_device()
        if self._device.type == "meta":
            raise InvalidInput("the model lies on the meta device, without values: fill it first, then probe it")
        self._rows = rows
        self._fade = 1.0 if half_life is None else 0.5 ** (1 / half_life)
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._clock = StepClock(self._device)
        self._aside = Aside(self._device)
        self._found: list[FoundBlocks] = []  # one for each set of sites that a step called, at most MOST_FLOWS
        self._flows: set[frozenset[str]] = set()
        self._weights = WeightsOverTime(self._sites) if weights_over_time else None
        self._dtypes: dict[str, torch.dtype] = {}  # what each site was last called in
        self._samples = 0
        self._saw_forward = False
        self._id = uuid.uuid4().hex
        self._unlearned: deque[tuple[SiteLearning, Rows]] = deque()  # of the newest sample,
        self._all_finite = Answer(torch.tensor(True))  # whether there is no NaN or infinity in it
        self._sites_a_step = 0  # to be learned behind each step
        self._learned_s = 0.0  # how long learning took
        self._told_cost = False
        self._detached = False
        self._writer = _writer()
        self.memory = plan_memory(self._sites, memory_budget, taken=self._weights.bytes if self._weights else 0)
        self._learning = {name: SiteLearning(site, self.memory.forms[name]) for name, site in self._sites.items()}
        logger.info("probe: %s", self.memory)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one training step, forward and backward: every ``every``-th, from the first on, is sampled."""
        is_sampled = self.steps_seen % self.every == 0 and not self._detached
        self.steps_seen += 1
        if not is_sampled:
            with self._clock.timed():
                yield
            if self._unlearned and self._all_finite.is_there():
                self._learn(self._sites_a_step)
            return
        self._learn_all()
        self._tell_cost()
        if (device := self._one_device()) != self._device:
            raise InvalidInput(f"the model moved from {self._device} to {device}: make the Probe behind model.to(…)")
        self._require_same_sites()
        full = [name for name, form in self.memory.forms.items() if form is Covariance.FULL]
        closely = {name: features for name, site in self._learning.items() if (features := site.features_to_look_at)}
        with (
            torch.compiler.set_stance("force_eager"),
            watch(self._model, self._sites, self._rows, self._generator, with_dw=full, closely=closely) as seen,
        ):
            yield
        self._take(seen)

    def record(self) -> Record:
        """What was learned so far, copied to the CPU: training may go on."""
        return _with_findings(self._taken())

    def save(self, run: str | Path) -> "Future[Path]":
        """Take the Record now; look for findings and write it beside the training. ``.result()`` waits and gives the path."""
        taken = self._taken()
        written = self._writer.submit(lambda: _with_findings(taken).save(run))
        written.add_done_callback(lambda done: _tell_failure(done, run))
        return written

    def detach(self) -> None:
        """Stop for good, with every file written. No hook is on the model between steps, so there is nothing else to undo."""
        self._learn_all()
        self._detached = True
        self._writer.shutdown()
        self._writer = _writer()  # for a Record that is still to be saved; it has no thread until then

    def __deepcopy__(self, memo: object) -> "Probe":
        """A copy of a module that holds its Probe, such as an average of weights, holds the same: it watches one model."""
        return self

    def __reduce__(self) -> NoReturn:
        raise InvalidInput("a Probe watches a running model and cannot be pickled: keep it out of the module, save its Record")

    def _require_same_sites(self) -> None:
        now = dict(self._model.named_modules())
        replaced = [name for name, site in self._sites.items() if now.get(name) is not site]
        if replaced:
            raise InvalidInput(
                f"{', '.join(replaced)}: another module than when this Probe was made, put there by a plan or by hand. It "
                f"would not be seen. Make a new Probe"
            )

    def _one_device(self) -> torch.device:
        """Where the sites lie, all of them: statistics are gathered there."""
        devices = list(dict.fromkeys(weight_of(site).device for site in self._sites.values()))
        if len(devices) > 1:
            raise InvalidInput(f"the model lies on {', '.join(map(str, devices))}: probe the part on one device at a time")
        return devices[0]

    def _taken(self) -> Record:
        if not self._samples and self.steps_seen:
            raise InvalidInput(
                f"no step that the Probe saw, {self.steps_seen} so far, was sampled to its end: it learns of a step when that "
                f"has ended without an exception, and samples none after detach()"
            )
        if not self._samples:
            raise InvalidInput("the Probe has seen no step: put `with probe.step():` around the training step, and run one")
        if not self._saw_forward:
            raise InvalidInput(
                f"the model was not called in the steps that were sampled, {self._samples} of {self.steps_seen}: "
                f"put `with probe.step():` around forward and backward of this very model"
            )
        self._learn_all()
        found = merged(self._found or [find_blocks(self._model)])
        producers, passed, cast_in_step = producers_of(found), passed_by(self._model), cast_in_steps(self._sites)
        dtype, inside_torch = self._dtype(), names_inside_torch(self._model)
        was_run = bool(self._found) and all(flow.graph.method is Method.RUN for flow in self._found)
        self._aside.follow()
        with self._aside.work():
            sites = {name: self._site(name, found.of(name), producers.get(name)) for name in self._sites}
        for name, site in sites.items():
            known = {"was_called": bool(site.calls), "is_inside_torch": name in inside_torch, "was_run": was_run}
            stays = why_stays(self._sites[name], found.of(name), **known) or self._why_apart(name, dtype)
            in_step = name in cast_in_step
            sites[name] = dataclasses.replace(site, stays=stays, stays_serving=passed.get(name), cast_in_step=in_step)
        return Record(
            fingerprint=fingerprint((site.name, site.k, site.n, site.has_bias) for site in sites.values()),
            environment=current_environment(device_of(self._device)),
            dtype=self._format(dtype),
            step_us=self._clock.median_us(),
            sites=sites,
            uncovered=tuple(map(str, found.uncovered)),
            steps_seen=self.steps_seen,
            id=self._id_of(sites),
        )

    def _id_of(self, sites: Mapping[str, SiteRecord]) -> str:
        """The same for Records between which the Probe saw no step and the weights did not move."""
        weights = [float(site.weight_NK.double().sum()) for site in sites.values()]
        return f"{self._id}-{self.steps_seen}-{hashlib.sha256(repr(weights).encode()).hexdigest()[:8]}"

    def _take(self, seen: Watch) -> None:
        """Keep what a step showed, to be learned later; at once a site's first sample, and what must wait for the device."""
        dtypes = self._dtypes | {name: calls[-1].dtype for name in self._sites if (calls := seen.trained_calls(name))}
        _require_baseline(dtypes)
        self._dtypes = dtypes
        self._look_who_reads_what(seen)
        self._saw_forward |= bool(seen.calls or seen.runs)
        if not self._samples and self._model.training and seen.calls and not seen.has_gradients():
            logger.warning(
                "probe: no gradient reached a layer in the first step that was sampled. For a plan for training put backward() "
                "inside `with probe.step():` too; for one for serving this is all it takes"
            )
        self._samples += 1
        self._sites_a_step = -(-len(self._sites) * SPREAD // self.every)
        looked: list[tuple[SiteLearning, Rows]] = []
        with exactly(self._device):
            if self._weights is not None:
                self._weights.observe()
            for name, site in self._learning.items():
                if seen.leaves_calls_out(name):
                    site.note(CALLS_LEFT_OUT)
                rows = site.look(seen.trained_calls(name), seen.dw_NK.get(name), seen.dw_JI.get(name))
                if rows is not None and self._dtypes[name] in BASELINES:
                    looked.append((site, rows))
            self._all_finite = Answer(_all_finite(seen))
        self._aside.follow(tensor for _, rows in looked for tensor in rows.tensors())
        self._unlearned.extend(sorted(looked, key=lambda one: one[0].may_wait))
        self._learn(sum(not site.may_wait for site, _ in looked))

    def _look_who_reads_what(self, seen: Watch) -> None:
        """Find the blocks after the first sample, and again for each call of the model that went through other sites than those
        before it: models branch, by domain, task or tower."""
        for run in seen.runs_through_sites():
            called = frozenset(run.called)
            known = frozenset().union(*self._flows)
            if not called or called in self._flows or (len(self._found) >= MOST_FLOWS and called <= known):
                continue
            on_example = self._example is not None and not self._found
            if on_example:
                self._note_flow(blocks_of(self._model, run, self._example))
            if called not in self._flows and not (on_example and run.given is None):
                self._note_flow(blocks_of(self._model, run, None))
            self._flows.add(called)

    def _note_flow(self, found: FoundBlocks) -> None:
        self._found.append(found)
        self._flows.add(frozenset(block.site for block in found if block.calls != 0))

    def _learn(self, sites: int) -> None:
        sites = min(sites, len(self._unlearned))
        if not sites:
            return
        all_finite = self._all_finite.get()
        begin_s = time.perf_counter()
        with self._aside.work():
            for _ in range(sites):
                site, looked = self._unlearned.popleft()
                rows = looked if all_finite else site.finite(looked)
                if rows is not None:
                    site.learn(rows, self._fade)
        self._learned_s += time.perf_counter() - begin_s

    def _tell_cost(self) -> None:
        """Once, on a CPU, where learning takes much of the time: that many small layers have a price no step makes up for."""
        step_us = self._clock.median_us() if self._device.type == "cpu" and self._learned_s >= LONG_S else None
        if self._told_cost or not step_us:
            return
        share = self._learned_s / self._samples / (1e-6 * step_us * self.every)
        if share > MUCH:
            self._told_cost = True
            logger.warning(
                "probe: learning takes %.0f %% of the time of the steps, %.0f ms a site and sample: with every=%d it is 1 %%",
                100 * share, 1e3 * self._learned_s / self._samples / len(self._sites), math.ceil(100 * share * self.every),
            )  # fmt: skip

    def _learn_all(self) -> None:
        self._learn(len(self._unlearned))

    def _site(self, name: str, block: Block, producer: str | None) -> SiteRecord:
        more = {} if self._weights is None else self._weights.statistic(name)
        notes = () if self._weights is None else self._weights.notes(name)
        return self._learning[name].record(name, block, producer, self._samples, more, notes)

    def _dtype(self) -> torch.dtype:
        """The dtype that most weights were multiplied in, among those that kernels can be compared with."""
        weights: Counter[torch.dtype] = Counter()
        for name, dtype in (self._dtypes or {name: weight_of(site).dtype for name, site in self._sites.items()}).items():
            if dtype in BASELINES:
                weights[dtype] += weight_of(self._sites[name]).numel()
        return weights.most_common(1)[0][0]

    def _why_apart(self, name: str, dtype: torch.dtype) -> str | None:
        own = self._dtypes.get(name, dtype)
        if own is dtype:
            return None
        if own not in BASELINES:
            return f"runs in {_told(own)}, for which there is no baseline to compare with"
        return f"runs in {format_of(own)}, and most of the model in {format_of(dtype)}, which kernels are compared with"

    def _format(self, dtype: torch.dtype) -> Format:
        if dtype is torch.float32 and self._device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32":
            return Format.TF32
        return format_of(dtype)


def _all_finite(seen: Watch) -> Tensor:
    """Whether no tensor holds NaN or infinity, asked for all of them at once."""
    calls = [call for calls in seen.calls.values() for call in calls]
    largest = [close.amax for call in calls for close in (call.x_close, call.dy_close) if close is not None]
    rows = [rows for call in calls for rows in (call.x_RK, call.dy_RN) if rows is not None]
    tensors = [*rows, *largest, *seen.dw_NK.values(), *seen.dw_JI.values()]
    return torch.nn.utils.get_total_norm(tensors, norm_type=1.0).isfinite()


def _tell_failure(written: "Future[Path]", run: str | Path) -> None:
    """``result`` raises for those who wait for the file; others would not hear of it."""
    if (failure := written.exception()) is not None:
        logger.warning("the Record could not be written to %s: %s: %s", run, type(failure).__name__, failure)


def _writer() -> ThreadPoolExecutor:
    """One thread: of two saves the newer one stays."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="loka-record")


def _require_baseline(dtypes: Mapping[str, torch.dtype]) -> None:
    """Refuse a model nothing of which could be measured, before a run is spent on it."""
    if dtypes and BASELINES.isdisjoint(dtypes.values()):
        name, dtype = next(iter(dtypes.items()))
        raise InvalidInput(
            f"{name} runs in {_told(dtype)}, for which there is no baseline to compare with, nor is there for any other layer: "
            f"use float32 or bfloat16"
        )


def _told(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _with_findings(record: Record) -> Record:
    return dataclasses.replace(record, findings=find_all(record.sites))
