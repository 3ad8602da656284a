"""``apply_mods``: find what can be changed, say so, change it."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim.swa_utils import AveragedModel

from loka.core.errors import InvalidInput, require_kind
from loka.core.names import did_you_mean, given_names, matching
from loka.mods.contract import MODS, Mod, Place
from loka.mods.report import Change, LeftAlone, ModReport
from loka.mods.trained import evidence_of_training
from loka.nn.blocks import FoundBlocks, find_blocks
from loka.nn.graph import names_inside_torch
from loka.nn.graph_run import record_run
from loka.nn.held import refuse_held_in_lists
from loka.nn.kept_state import left_as_it_was
from loka.nn.stand_in import take_over, why_not_taken_over
from loka.nn.unwrap import Arguments, Example, arguments_of


def apply_mods(
    model: nn.Module,
    mods: Iterable[str] | None = None,
    *,
    keep: Iterable[str] = (),
    example: Example | Arguments | None = None,
    dry_run: bool = False,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    retrain: bool = False,
) -> ModReport:
    """Make ``mods`` on ``model`` in place: by default ``no_bias``, ``block_norm`` and ``hard_swish``.

    They change what the model computes, so apply them before making the optimizer, or pass it, or a list of several, as
    ``optimizer`` to have removed parameters dropped from it; then train. A model that looks trained is refused without
    ``retrain=True``.
    ``keep`` names modules to leave alone with all inside them, as names or patterns (``"towers.*.out"``). With ``example``, the
    arguments of one forward call, the model is run once, so that heads and readers are known where tracing fails, and again
    after the changes, in training and in eval mode: where that fails, they are undone.
    ``dry_run`` reports what would change and changes nothing.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile(model) wraps
    require_kind(model, nn.Module, "the model", "give the model itself")
    chosen = _chosen(mods)
    _check_parameters(model)
    kept = _kept(model, keep)
    found = find_blocks(model, example)
    steps, left_alone = _plan(model, chosen, kept, found)
    optimizers = _optimizers(optimizer)
    trained = evidence_of_training(model, optimizers) if steps else None
    functions = {function for mod in chosen.values() for function in mod.functions}
    report = ModReport(
        model=type(model).__name__,
        mods=tuple(chosen),
        changes=tuple(step.change for step in steps),
        left_alone=tuple(left_alone),
        not_covered=tuple(uncovered for uncovered in found.uncovered if uncovered.function in functions),
        n_parameters=sum(parameter.numel() for parameter in model.parameters()),
        applied=not dry_run,
        trained=trained,
        how=found.how,
    )
    if dry_run or not steps:
        return report
    if trained and not retrain:
        raise InvalidInput(
            f"the model looks trained: {trained}. Mods change what it computes, so its weights would no longer fit. Apply them "
            f"before training, or pass retrain=True if it will be trained again or these are only your own initial values"
        )
    refuse_held_in_lists(model, [step.place.module for step in steps if step.mod.replaces])
    parameters = list(model.parameters())
    undo = _make(model, steps)
    if example is not None:
        try:
            _run_in_both_modes(model, example)
        except Exception as error:  # any of the user's own: it ran before
            undo()
            raise InvalidInput(
                f"with these Mods the model no longer runs on the example ({type(error).__name__}: {error}), so nothing was "
                f"changed. Its forward may use what a Mod takes away, such as the weight or the dtype of a norm: leave that "
                f"module alone with keep="
            ) from error
    removed = {id(parameter) for parameter in parameters} - {id(parameter) for parameter in model.parameters()}
    for one in optimizers:
        _forget(one, removed)
    return report


def _optimizers(given: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None) -> tuple[torch.optim.Optimizer, ...]:
    if given is None or isinstance(given, torch.optim.Optimizer):
        return () if given is None else (given,)
    require_kind(given, Iterable, "optimizer=", "give the optimizer, or a list of them")
    optimizers = tuple(given)
    for one in optimizers:
        require_kind(one, torch.optim.Optimizer, "optimizer=", "give the optimizer, or a list of them")
    return optimizers


def _run_in_both_modes(model: nn.Module, example: Example | Arguments) -> None:
    """As it trains and as it serves: torch's own modules take another way in eval mode."""
    with left_as_it_was(model):
        for training in (True, False):
            model.train(training)
            record_run(model, arguments_of(example))


@dataclass(frozen=True)
class _Step:
    mod: Mod
    place: Place
    change: Change


def _plan(
    model: nn.Module, chosen: dict[str, Mod], kept: dict[str, str], found: FoundBlocks
) -> tuple[list[_Step], list[LeftAlone]]:
    inside_torch, frozen = names_inside_torch(model), _frozen(model)
    steps: list[_Step] = []
    left_alone: list[LeftAlone] = []
    gone: set[str] = set()
    holders = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    for mod_name, mod in chosen.items():
        for name, module in model.named_modules():
            place = Place(name, module, found)
            if not mod.concerns(place):
                continue
            why = kept.get(name) or _why_not_any(name, module, inside_torch) or frozen.get(name) or mod.why_not(place)
            if mod.replaces and not why:
                why = why_not_taken_over(module, mod.replace(place))
            if why:
                left_alone.append(LeftAlone(mod_name, name, why))
                continue
            removes = [f"{name}.{parameter}" for parameter in mod.removes(place)]
            if reader := next((found.graph.parameters_read[p] for p in removes if p in found.graph.parameters_read), None):
                left_alone.append(LeftAlone(mod_name, name, f"its parameters are read by a call of {reader}, not by itself"))
                continue
            removed = tuple(parameter for parameter in removes if parameter not in gone)
            if removes and not removed:  # an earlier Mod has taken them already
                continue
            gone.update(removed)
            parameters = [model.get_parameter(parameter) for parameter in removed]
            holders.subtract(map(id, parameters))
            n_removed = sum(parameter.numel() for parameter in parameters if not holders[id(parameter)])  # others may hold it
            steps.append(_Step(mod, place, Change(mod_name, name, *mod.change(place), removed, n_removed)))
    return steps, left_alone


def _make(model: nn.Module, steps: list[_Step]) -> Callable[[], None]:
    """Make the changes; what is returned takes them back."""
    before = [(module, dict(module._modules), dict(module._parameters)) for module in model.modules()]

    def undo() -> None:
        for module, modules, parameters in before:
            module._modules.clear()
            module._modules.update(modules)
            module._parameters.clear()
            module._parameters.update(parameters)

    now: dict[int, nn.Module] = {}  # by the id of the module that stood there
    for step in steps:
        old = step.place.module
        new = step.mod.replace(replace(step.place, module=now.get(id(old), old)))
        if new is not old:
            take_over(old, new)
        now[id(old)] = new.train(old.training)
    # A module under several names is replaced under all of them.
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and id(child) in now:
                parent._modules[name] = now[id(child)]
    return undo


def _forget(optimizer: torch.optim.Optimizer, removed: set[int]) -> None:
    """Drop parameters and their state. A group that becomes empty stays, since schedulers count groups."""
    for group in optimizer.param_groups:
        stays = [id(parameter) not in removed for parameter in group["params"]]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [value for value, keep in zip(group[key], stays, strict=True) if keep]
    for parameter in [parameter for parameter in optimizer.state if id(parameter) in removed]:
        del optimizer.state[parameter]


def _chosen(mods: Iterable[str] | None) -> dict[str, Mod]:
    if mods is None:
        entries = {name: mod for name, mod in MODS.items() if mod.default}
    else:
        entries = {name: MODS.get(name) for name in given_names(mods, "mods", "names of Mods")}
    return dict(sorted(entries.items(), key=lambda entry: (entry[1].order, entry[0])))


def _kept(model: nn.Module, keep: Iterable[str]) -> dict[str, str]:
    """Modules to leave alone, by their first name → the reason."""
    names = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name]
    first_names = {id(module): name for name, module in model.named_modules()}
    kept = {}
    for pattern in given_names(keep, "keep", "names of modules, or patterns"):
        known = [name for name, _ in names]
        matched = matching(pattern, known)
        if not matched:
            hint = did_you_mean(pattern, known, most=3, cutoff=0.4) or " Print the model to see its modules' names."
            raise InvalidInput(f"keep={pattern!r} matches no module.{hint}")
        for name, module in names:
            if any(name == match or name.startswith(f"{match}.") for match in matched):
                kept[first_names[id(module)]] = f"kept by keep={pattern!r}"
    return kept


def _why_not_any(name: str, module: nn.Module, inside_torch: dict[str, str]) -> str | None:
    """What keeps every Mod away."""
    if not name:
        return "is the model itself: put it into another module to have it changed"
    if "forward" in vars(module):
        return "has a forward of its own, put on the instance"
    around = inside_torch.get(name)
    return None if around is None else f"is inside {around}, which reads its parameters directly"


def _frozen(model: nn.Module) -> dict[str, str]:
    """Modules of which no parameter is trained → the reason; one without parameters goes by the part of the model around it."""
    learns = {name: [p.requires_grad for p in module.parameters()] for name, module in model.named_modules()}
    reasons = {}
    for name in learns:
        part = name
        while part and not learns.get(part):
            part = part.rpartition(".")[0]
        if learns[part] and not any(learns[part]):
            reasons[name] = f"{part or 'the model'} is frozen: nothing would be trained to make up for the change"
    return reasons


def _check_parameters(model: nn.Module) -> None:
    """Parameters must be there, and the model's own."""
    for name, module in model.named_modules():
        if any(kind.__module__.startswith(("torch.nn.parallel.", "torch.distributed.")) for kind in type(module).__mro__):
            raise InvalidInput(
                f"{name or 'the model'} is a {type(module).__name__}, which has taken over its parameters: "
                f"apply Mods before wrapping or sharding the model"
            )
        if isinstance(module, AveragedModel):
            raise InvalidInput(f"{name or 'the model'} is an average of another model: apply Mods to that, then average it")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise InvalidInput(f"{name} has no shape yet: run the model once on a batch, then apply Mods")
