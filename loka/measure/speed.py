"""The times of the executor's parts at each M given. Equal problems are timed once, whichever sites have them.

What is timed together is interleaved: the baseline and all other products of a role, all casts of a tensor. Products read
operands that were cast before, weights rotated past the cache; casts read activations warm, as a model has just written them.
For a compiled model on a CPU, fprop's product is timed with its cast of x, amid operations that are compiled with both.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import TypeVar

import torch

from loka.core.gemm import GemmProblem, Role, SiteShape, TensorName
from loka.core.recipe import Format
from loka.core.site_record import SiteRecord
from loka.kernels.casting import CastProblem
from loka.kernels.contract import KERNELS, why_not
from loka.kernels.device import device_of
from loka.kernels.operand import Form
from loka.kernels.providers.torch_casts import room_to_compile
from loka.kernels.providers.torch_left import LEFT
from loka.measure.amid_model import MOST_EXACT_GAIN, MOST_GAIN, SEVERAL, between_relus, inputs_of, plain_layer
from loka.measure.error import require_device
from loka.measure.failure import told
from loka.measure.parts import Option, SiteParts, SiteTensors, baseline_kernel, is_compiled
from loka.measure.timing import BUDGET_S, TimedCall, time_together, whole_rotations
from loka.numerics.formats import torch_dtype

ROUNDS = {"cuda": 11, "cpu": 9}
Key = TypeVar("Key")
Forms = tuple[Form, ...]
NO_CAST: Forms = ()
ALONE = (None, 0)  # the layer in no graph


@dataclass(frozen=True)
class TimedShape:
    """All that decides how long a site's parts take, but the kernels."""

    shape: SiteShape
    dtype: Format
    weight_dtype: Format
    has_bias: bool
    cast_in_step: bool = False  # as a SiteRecord says it of its weight,
    across: int | None = None  # and of its x,
    feeds_product: bool = False  # and of its output, where that decides

    @classmethod
    def of(cls, site: SiteRecord, m: int, dtype: Format, *, compiled: bool = False) -> "TimedShape":
        across = site.across if site.across and m % site.across == 0 else None
        shape = SiteShape(m, site.k, site.n)
        feeds_product = compiled and across is not None and site.feeds_product
        return cls(shape, dtype, site.weight_format, site.has_bias, site.cast_in_step, across, feeds_product)


class Speeds:
    """Times by problem, on one device."""

    def __init__(self, device: torch.device, *, compiled: bool = False) -> None:
        """``compiled``: for a model that torch.compile has made, on a CPU."""
        self.device = device
        self.compiled = compiled
        self._products: dict[tuple[TimedShape, Option], float | str] = {}
        self._casts: dict[tuple[TimedShape, TensorName, Forms], float | str] = {}
        self._in_step: dict[tuple[TimedShape, Forms], float | None] = {}  # None: no step makes them, or it failed
        self._parts = lru_cache(1)(self._make_parts)  # one shape after another: tensors of all would not fit

    def refusal(self, option: Option, shape: TimedShape) -> str | None:
        """Why the option's kernel does not take the shape, or None."""
        problem = GemmProblem.of(option.role, shape.shape, shape.dtype, device_of(self.device), across=bool(shape.across))
        reason = why_not(KERNELS.get(option.kernel), problem)
        if reason is None and option.kernel == LEFT:
            if shape.dtype is not Format.FP32:
                return f"multiplies in fp32, and the model in {shape.dtype}"
            if not self.compiled:
                return "is timed in compiled models alone: measure with compiled=True"
        return reason

    def products_us(self, options: Iterable[Option], shape: TimedShape) -> dict[Option, float | str]:
        """The time of each option's product, or the message of its failure.

        Where one is new, all of its role are timed again beside it: times are compared, so they are taken together.
        """
        by_role: dict[Role, list[Option]] = {}
        for option in options:
            by_role.setdefault(option.role, []).append(option)
        for role, alike in by_role.items():
            if all((shape, option) in self._products for option in alike):
                continue
            time = self._time_amid_model if self.compiled and role is Role.FPROP else self._time_products
            self._products.update({(shape, option): time_us for option, time_us in time(alike, shape).items()})
        return {option: self._products[shape, option] for alike in by_role.values() for option in alike}

    def casts_us(self, name: TensorName, sets: Iterable[Forms], shape: TimedShape) -> dict[Forms, float | str]:
        """The time to cast a tensor into each set of forms, or the message of the failure."""
        sets = list(sets)
        if self.compiled and name is TensorName.X:
            return self._casts_beside_fprop(sets, shape)
        return self._casts_alone(name, sets, shape)

    def _casts_beside_fprop(self, sets: list[Forms], shape: TimedShape) -> dict[Forms, float | str]:
        """Amid a model the products of fprop, which alone reads x as it is, hold the time of their casts."""
        others = {forms: tuple(form for form in forms if form.transposed) for forms in sets}
        timed = self._casts_alone(TensorName.X, [forms for forms in dict.fromkeys(others.values()) if forms], shape)
        return {forms: timed[other] if other else 0.0 for forms, other in others.items()}

    def _casts_alone(self, name: TensorName, sets: list[Forms], shape: TimedShape) -> dict[Forms, float | str]:
        new = [forms for forms in sets if (shape, name, forms) not in self._casts]
        calls: dict[Forms, TimedCall] = {forms: partial(self._parts(shape).cast, name, forms) for forms in new}
        self._casts.update({(shape, name, forms): time for forms, time in self._time(calls, shape).items()})
        return {forms: self._casts[shape, name, forms] for forms in sets}

    def in_step_us(self, sets: Iterable[Forms], shape: TimedShape) -> dict[Forms, float]:
        """What casts of the weight into each set of forms add to a step of Adam that makes them, where one can."""
        sets = list(sets) if shape.cast_in_step else []
        new = [forms for forms in sets if (shape, forms) not in self._in_step]
        self._in_step.update({(shape, forms): time_us for forms, time_us in self._time_in_step(new, shape).items()})
        return {forms: time_us for forms in sets if (time_us := self._in_step[shape, forms]) is not None}

    def release(self) -> None:
        """Let the tensors of the last shape go, for other processes too: of a wide layer they take gigabytes."""
        self._parts.cache_clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def is_compiled(self, name: TensorName, form: Form, shape: TimedShape) -> bool:
        """Whether torch compiles this cast first."""
        m, k, n = shape.shape.m, shape.shape.k, shape.shape.n
        rows, cols = {TensorName.X: (m, k), TensorName.DY: (m, n), TensorName.W: (n, k)}[name]
        format = shape.weight_dtype if name is TensorName.W else shape.dtype
        return is_compiled(form, CastProblem(name, rows, cols, format, device_of(self.device)))

    def _make_parts(self, shape: TimedShape) -> SiteParts:
        dtype, weight_dtype = torch_dtype(shape.dtype), torch_dtype(shape.weight_dtype)
        tensors = SiteTensors.random(shape.shape, dtype, self.device, weight_dtype=weight_dtype, has_bias=shape.has_bias)
        return SiteParts(tensors)

    def _time_products(self, options: list[Option], shape: TimedShape) -> dict[Option, float | str]:
        return self._time({option: partial(self._parts(shape).multiply, option) for option in options}, shape)

    def _time_amid_model(self, options: list[Option], shape: TimedShape) -> dict[Option, float | str]:
        """What torch's own layer takes alone, and what each option takes more or less than it between compiled operations."""
        baseline, parts = baseline_kernel(shape.dtype), self._parts(shape)
        others = [option for option in options if option.kernel != baseline]
        inputs = cache(lambda: inputs_of(parts, shape.across))
        graphs = [(option, layers) for option in ((None, *others) if others else ()) for layers in (1, SEVERAL)]
        calls: dict[tuple[Option | None, int], TimedCall] = {
            ALONE: _at_first_call(partial(plain_layer, parts, shape.across)),
            **{
                (which, n): _at_first_call(
                    lambda which=which, n=n: between_relus(parts, which, inputs()[:n], feeds_product=shape.feeds_product)
                )
                for which, n in graphs
            },
        }
        with room_to_compile():
            times = self._time(calls, shape)
        made = {option: times[ALONE] for option in options if option.kernel == baseline}
        for option in others:
            most_gain = MOST_GAIN if option.is_8bit else MOST_EXACT_GAIN
            told = (times[which, n] for which in (None, option) for n in (1, SEVERAL))
            made[option] = _of_a_layer(most_gain, times[ALONE], *told)
        return made

    def _time_in_step(self, sets: list[Forms], shape: TimedShape) -> dict[Forms, float | None]:
        added: dict[Forms, float | None] = dict.fromkeys(sets)
        able = [forms for forms in sets if self._parts(shape).can_step(forms)]
        if not able:
            return added
        self.release()  # steps take many times the weight, for which there may be no room beside all of its casts,
        times = self._time({forms: partial(self._parts(shape).step, forms) for forms in (NO_CAST, *able)}, shape)
        self.release()  # nor beside the tensors of another shape
        alone_us = times.pop(NO_CAST)
        for forms, time_us in times.items():
            if not isinstance(time_us, str) and not isinstance(alone_us, str):
                added[forms] = max(0.0, time_us - alone_us)
        return added

    def _time(self, calls: dict[Key, TimedCall], shape: TimedShape) -> dict[Key, float | str]:
        """The calls interleaved; where one fails, each by itself, so that the others do not go with it, and these once more."""
        if not calls:
            return {}
        try:
            return self._time_together(calls, shape)
        except Exception as failure:  # any library's any error: the reason is the result
            if len(calls) > 1:
                alone = {key: time for one, call in calls.items() for key, time in self._time({one: call}, shape).items()}
                well = {key: call for key, call in calls.items() if not isinstance(alone[key], str)}
                return alone | (self._time(well, shape) if len(well) < len(calls) else {})
            (key,) = calls
            require_device(key.kernel if isinstance(key, Option) else "a cast", self.device, told(failure))
            return {key: told(failure)}

    def _time_together(self, calls: dict[Key, TimedCall], shape: TimedShape) -> dict[Key, float | str]:
        copies = len(self._parts(shape).tensors.weights)
        for call in calls.values():
            for turn in range(copies):  # makes the casts that it reads
                call(turn)
        names = {str(index): key for index, key in enumerate(calls)}
        kind = self.device.type
        times = time_together(
            {name: calls[key] for name, key in names.items()},
            self.device,
            turns=whole_rotations(copies) if kind == "cuda" else copies,
            rounds=ROUNDS[kind],
            budget_s=BUDGET_S[kind],
        )
        return {key: times[name].median_us for name, key in names.items()}


def _of_a_layer(most_gain: float, *times_us: float | str) -> float | str:
    """What an option takes, of what torch's layer takes alone and of graphs: of one and of several layers by torch, and by the
    option. Or the first failure."""
    known = [time_us for time_us in times_us if not isinstance(time_us, str)]
    if len(known) < len(times_us):
        return next(told for told in times_us if isinstance(told, str))
    alone_us, one_by_torch, by_torch, one, several = known
    return max(alone_us / most_gain, alone_us + ((several - one) - (by_torch - one_by_torch)) / (SEVERAL - 1))


def _at_first_call(make: Callable[[], TimedCall]) -> TimedCall:
    """What ``make`` returns, made when it is called: what fails then is that call's failure."""
    made = cache(make)
    return lambda turn: made()(turn)
