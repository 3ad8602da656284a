"""The Guard: watches a planned model while it trains, and takes a site back when its data has drifted too far."""

import dataclasses
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loka.core.errors import InvalidInput, require_count, require_kind
from loka.core.gemm import Role
from loka.core.record import Record
from loka.dispatch.apply import give_back
from loka.dispatch.drift import SiteCasts, feature_energy, predicted_errors
from loka.dispatch.planned import PlannedLinear
from loka.dispatch.swap import AppliedPlan, applied_to, required_applied
from loka.nn.fused_block import FusedBlock
from loka.nn.left_linear import LeftLinear
from loka.nn.linear import has_rows, input_of
from loka.nn.passing_hook import PassingHook, on_gradient
from loka.nn.site_device import device_of_sites
from loka.nn.unwrap import unwrapped
from loka.nn.weight_casts import has_own_weight

logger = logging.getLogger("loka")

MOST_CALLS = 8  # of a site in one step that a check looks at
DOUBT = 8  # steps that a site has to be called again, after values that were no numbers
SLACK = 1.5  # over the plan's own limit: a check sees few rows, and noise should trip nothing


@dataclass(frozen=True)
class GuardEvent:
    """A site that went back to high precision."""

    step: int
    site: str
    role: Role
    error: float  # predicted on the rows of this step
    recorded_error: float  # the same on rows drawn from the Record
    bound: float

    def __str__(self) -> str:
        drift = f"the predicted error of its {self.role} is {self.error:.3g}, past {self.bound:.3g}"
        recorded = f"it was {self.recorded_error:.3g} on the Record"
        return (
            f"step {self.step}: {self.site} goes back to high precision: {drift} ({recorded}). A compiled model compiles again"
        )


torch.serialization.add_safe_globals([GuardEvent, Role])  # events are kept in checkpoints


class Guard:
    """Checks every ``every``-th step whether the planned sites still see data like the Record's.

    Put ``with guard.step():`` around the training step. A check runs the step eager with hooks on, predicts each site's error
    from ``rows`` of its rows, and waits for the device once; the steps between touch nothing. A site whose error is past
    ``max_error``, one number or one a role (by default 1.5 times the plan's limit), returns to high precision for good, which
    is logged and kept in ``events``. Where values are no numbers, as in a batch that a training loop then skips, the next step
    is checked too, and decides.
    """

    def __init__(
        self,
        model: nn.Module,
        record: Record,
        *,
        every: int = 100,
        max_error: float | Mapping[Role, float] | None = None,
        rows: int = 256,
    ) -> None:
        require_kind(record, Record, "the record", "load it with loka.Record.load(run)")
        for name, value in (("every", every), ("rows", rows)):
            require_count(name, value)
        given = dict(max_error) if isinstance(max_error, Mapping) else dict.fromkeys(Role, max_error)
        for role, bound in given.items():
            if role not in list(Role) or not (bound is None or (isinstance(bound, int | float) and bound > 0)):
                roles = ", ".join(Role)
                raise InvalidInput(f"max_error must be a number above 0, or one for each of {roles}, got {max_error!r}")
        self._model = unwrapped(model)
        applied = required_applied(self._model)
        if record.fingerprint != applied.plan.document.fingerprint:
            raise InvalidInput(
                f"the record is of another model (fingerprint {record.fingerprint}) than the plan that is applied "
                f"({applied.plan.document.fingerprint}): give the Record that the plan was made from"
            )
        limits = applied.plan.document.max_error
        self.bounds = {role: SLACK * limits[role] if (bound := given.get(role)) is None else bound for role in Role}
        self.every, self.rows = every, rows
        self.steps_seen = 0
        self.events: list[GuardEvent] = []
        self._applied = applied
        self._doubtful: dict[tuple[str, Role], int] = {}  # whose values were no numbers, and in which step
        self._generator = torch.Generator(device_of_sites(self._model))  # the user's own stays untouched
        self._sites = {site: _Watched.of(applied, site, record, rows) for site in applied.sites if _is_watched(applied, site)}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one training step, forward and backward."""
        is_check = self.steps_seen % self.every == 0 or bool(self._doubtful)
        self.steps_seen += 1
        if not is_check:
            yield
            return
        if applied_to(self._model) is not self._applied:
            raise InvalidInput("the plan that this Guard was made for is no longer applied to the model: make a new Guard")
        self._generator.manual_seed(self.steps_seen)  # a resumed Guard draws the rows that this one would have
        with torch.compiler.set_stance("force_eager"), _watching(self._sites, self.rows, self._generator) as seen:
            yield
        self._check(seen)

    @torch.no_grad()
    def _check(self, seen: "dict[str, list[_Seen]]") -> None:
        errors: dict[tuple[str, Role], Tensor] = {}
        for site, calls in seen.items():
            for rows in _to_judge(calls):
                for role, error in self._sites[site].errors(rows.x_RK, rows.dy_RN).items():
                    errors[site, role] = torch.maximum(error, errors.get((site, role), error))  # NaN stays
        doubted = self._doubtful
        # Of a site that was not called, as where domains take turns, the next of its calls decides, if it comes soon.
        waiting = {place: step for place, step in doubted.items() if place not in errors}
        self._doubtful = {place: step for place, step in waiting.items() if self.steps_seen - step < min(self.every, DOUBT)}
        if not errors:
            return
        values = torch.stack(list(errors.values())).tolist()  # the one wait
        worst: dict[str, tuple[float, Role, float]] = {}
        for (site, role), error in zip(errors, values, strict=True):
            if math.isnan(error) and (site, role) not in doubted:
                self._doubtful[site, role] = self.steps_seen
                continue
            excess = math.inf if math.isnan(error) else error / self.bounds[role]
            if excess > worst.get(site, (1.0,))[0]:
                worst[site] = (excess, role, error)
        for site, (_, role, error) in worst.items():
            self._give_back(site, role, error)

    def resume(self, steps: int, events: Iterable[GuardEvent]) -> None:
        """Go on as a Guard that has seen ``steps`` and given back what ``events`` say, at once and without another word."""
        known = {(event.step, event.site, event.role) for event in self.events}
        events = list({key: event for event in events if (key := (event.step, event.site, event.role)) not in known}.values())
        planned = {site.site for site in self._applied.plan.sites}
        if unknown := next((event.site for event in events if event.site not in planned), None):
            raise InvalidInput(
                f"{unknown} is no site of the plan that is applied: these are the events of another model's Guard"
            )
        self.steps_seen = steps
        for event in events:
            self._sites.pop(event.site, None)
            give_back(self._model, event.site, f"given back by the Guard at step {event.step}, before the run was resumed")
            self._follow_swaps()
            self.events.append(event)

    def state_dict(self) -> dict[str, Any]:
        """What a Guard of the same plan goes on from when training is resumed: plain numbers and text, for a checkpoint."""
        events = [{**dataclasses.asdict(event), "role": str(event.role)} for event in self.events]
        return {"steps_seen": self.steps_seen, "events": events}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """``resume`` from what ``state_dict`` gave."""
        if not isinstance(state_dict, Mapping) or not {"events", "steps_seen"} <= state_dict.keys():
            raise InvalidInput("this is no state of a Guard: give what its state_dict() returned")
        events = [GuardEvent(**event) for event in state_dict["events"]]
        self.resume(state_dict["steps_seen"], [dataclasses.replace(event, role=Role(event.role)) for event in events])

    def _give_back(self, site: str, role: Role, error: float) -> None:
        recorded = self._sites[site].recorded.get(role, math.nan)
        event = GuardEvent(self.steps_seen - 1, site, role, error, recorded, self.bounds[role])
        give_back(self._model, site, f"given back by the Guard at step {event.step}: predicted error {error:.3g} at {role}")
        self._sites.pop(site)
        self._follow_swaps()
        self.events.append(event)
        logger.warning("%s", event)

    def _follow_swaps(self) -> None:
        """A block of the same chain was bound anew, or went with the one in front: watch the module that stands there now."""
        self._applied = applied = required_applied(self._model)
        for site in [site for site in self._sites if site not in applied.swaps]:
            del self._sites[site]
        for site, watched in self._sites.items():
            watched.module = applied.module(site)
        self._doubtful = {(site, role): step for (site, role), step in self._doubtful.items() if site in self._sites}


@dataclass
class _Seen:
    x_RK: Tensor
    dy_RN: Tensor | None = None


@dataclass
class _Watched:
    """A planned site, and what its errors were on the Record."""

    module: nn.Module
    casts: SiteCasts
    features_K: Tensor | None
    energy_K: Tensor
    recorded: Mapping[Role, float]

    @classmethod
    @torch.no_grad()
    def of(cls, applied: AppliedPlan, site: str, record: Record, rows: int) -> "_Watched":
        module = applied.module(site)
        device = next(module.parameters()).device
        if site not in record.sites or not record.sites[site].was_called:
            raise InvalidInput(
                f"the record knows no values of {site}, which is planned: probe the model again, steps that run it"
            )
        x_RK, dy_RN = record.sites[site].sample(rows, torch.Generator(device).manual_seed(0))
        casts, features_K = SiteCasts.of_block(), None
        if isinstance(module, PlannedLinear):
            casts, features_K = SiteCasts.of(module.executor), module.transform_vector
        energy_K = feature_energy(x_RK, _weight(module), casts.transform, features_K)
        watched = cls(module, casts, features_K, energy_K, {})
        watched.recorded = {role: float(error) for role, error in watched.errors(x_RK, dy_RN).items()}
        return watched

    def errors(self, x_RK: Tensor, dy_RN: Tensor | None) -> dict[Role, Tensor]:
        with torch.autocast(x_RK.device.type, enabled=False):
            return predicted_errors(self.casts, x_RK, dy_RN, _weight(self.module), self.features_K, self.energy_K)


def _weight(module: nn.Module) -> Tensor:
    return module.get_parameter("weight").detach().float()


def _is_watched(applied: AppliedPlan, site: str) -> bool:
    """A block behind another, or with a norm in front, reads what a norm has bounded: its input cannot drift. One whose weight
    is made in every call runs in high precision, and so does one that multiplies from the left."""
    module = applied.module(site)
    if isinstance(module, LeftLinear):
        return False
    return has_own_weight(module) and not (isinstance(module, FusedBlock) and (module.follows or module.entry is not None))


@contextmanager
def _watching(sites: "Mapping[str, _Watched]", rows: int, generator: torch.Generator) -> "Iterator[dict[str, list[_Seen]]]":
    """Rows of the calls of every site in the block, with the gradients of its output where there are any."""
    seen: dict[str, list[_Seen]] = {}

    def watch(site: str) -> "torch.utils.hooks.RemovableHandle":
        def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> None:
            x = input_of(args, kwargs)
            if not has_rows(x) or torch._C._functorch.is_functorch_wrapped_tensor(x) or len(seen.get(site, ())) == MOST_CALLS:
                return
            x_MK = x.detach().reshape(-1, x.shape[-1])
            if not x_MK.shape[0]:
                return
            picked = _pick(x_MK, rows, generator)
            now = _Seen(x_MK[picked].float())
            seen.setdefault(site, []).append(now)

            def see_gradient(dy: Tensor) -> None:
                dy_MN = dy.detach().reshape(-1, dy.shape[-1])
                among = picked if len(dy_MN) <= rows else torch.cat([picked, _largest(dy_MN)])
                now.x_RK, now.dy_RN = x_MK[among].float(), dy_MN[among].float()

            if output.requires_grad:
                on_gradient(output, see_gradient)

        return sites[site].module.register_forward_hook(PassingHook(hook), with_kwargs=True)

    handles = [watch(site) for site, watched in sites.items() if has_own_weight(watched.module)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _to_judge(calls: "list[_Seen]") -> "list[_Seen]":
    """Where some got a gradient, the others are repetitions of activation checkpointing, or not of the training."""
    return [call for call in calls if call.dy_RN is not None] or calls


def _pick(x_MK: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """Rows by lot, since even distances may fall in step with the axes that M was made of, and the row with the largest value.
    Chosen on the device."""
    if x_MK.shape[0] <= rows:
        return torch.arange(x_MK.shape[0], device=x_MK.device)
    lot = torch.randint(x_MK.shape[0], (rows,), device=x_MK.device, generator=generator)
    return torch.cat([lot, _largest(x_MK)])


def _largest(values_MD: Tensor) -> Tensor:
    """The index of the row with the largest value, on which the scale of a whole tensor hangs."""
    return values_MD.abs().amax(1).argmax()[None]
