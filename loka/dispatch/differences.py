"""What sets a model and this machine apart from those a plan was made for, found before anything is touched."""

from torch import nn

from loka.core.environment import Environment, current_environment
from loka.core.errors import InvalidInput
from loka.core.fingerprint import fingerprint
from loka.core.plan import Plan
from loka.core.recipe import Format
from loka.kernels.device import device_of
from loka.nn.site_device import device_of_sites

REMEASURE = "measure again here with `loka measure RUN`, then `loka plan RUN`"


def linear_sites(model: nn.Module) -> dict[str, nn.Linear]:
    """The sites of a model, by the first of their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def refuse_sharded(model: nn.Module) -> None:
    """A wrapper that has taken over parameters would not see the swap, or would see it half."""
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            package = kind.__module__
            if package.startswith("torchrec.distributed"):
                _refuse(name, f"a TorchRec-sharded {type(module).__name__}")
            if package.startswith(("torch.distributed.fsdp", "torch.distributed._composable.fsdp")):
                _refuse(name, f"sharded by FSDP ({kind.__name__})")
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ in ("DTensor", "ShardedTensor") or type(parameter.data).__name__ == "DTensor":
            _refuse(name, "a sharded parameter")


def _refuse(name: str, what: str) -> None:
    raise InvalidInput(
        f"{name or 'the model'} is {what}, and LoKA does not run sharded models yet: apply the plan to an unsharded model "
        f"(DistributedDataParallel works), or run this one without a plan"
    )


def has_fingerprint(model: nn.Module, fingerprint: str) -> bool:
    """Whether what bears ``fingerprint``, a Record or a Plan, is of a model of these sites and shapes."""
    return _fingerprint(linear_sites(model)) == fingerprint


def refuse_other_model(sites: dict[str, nn.Linear], plan: Plan) -> None:
    """Another model's plan is never applied, not even in part."""
    here = _fingerprint(sites)
    different = _different_sites(sites, plan)
    if here == plan.document.fingerprint and not different:
        return
    different = different or ["its sites have the same names and shapes, but not the same biases"]
    more = f", and {len(different) - 3} more" if len(different) > 3 else ""
    raise InvalidInput(
        f"this plan is of another model (fingerprint {plan.document.fingerprint}, this model's is {here}): "
        f"{'; '.join(different[:3])}{more}. {_remedy(list(sites), [site.site for site in plan.sites])}"
    )


def _remedy(here: list[str], planned: list[str]) -> str:
    if sorted(name.replace("_orig_mod.", "") for name in here) == sorted(planned):
        return "A part of the model was compiled since: apply the plan first, then compile it"
    for name in here:
        around = name.removesuffix(f".{planned[0]}") if planned else name
        if around != name and {f"{around}.{site}" for site in planned} <= {*here}:
            return f"All of its sites are inside {around}: apply it to that module"
    return "Probe this model and make its own plan"


def _fingerprint(sites: dict[str, nn.Linear]) -> str:
    return fingerprint((name, site.in_features, site.out_features, site.bias is not None) for name, site in sites.items())


def _different_sites(sites: dict[str, nn.Linear], plan: Plan) -> list[str]:
    planned = {site.site: f"{site.k}×{site.n}" for site in plan.sites}
    here = {name: f"{site.in_features}×{site.out_features}" for name, site in sites.items()}
    return [
        *(f"{name} is not in this model" for name in planned if name not in here),
        *(f"{name} is not in the plan" for name in here if name not in planned),
        *(
            f"{name} is {here[name]} here and {planned[name]} in the plan"
            for name in planned
            if name in here and here[name] != planned[name]
        ),
    ]


def environment_differences(model: nn.Module, plan: Plan) -> list[str]:
    """Device, versions and precision that are not those the plan was measured with, each named."""
    then = plan.document.environment
    now = current_environment(device_of(device_of_sites(model)))
    found = [] if then.device == now.device else [f"device: measured on {then.device}, this is {now.device}"]
    if then.cuda != now.cuda:
        found.append(f"CUDA: measured with {then.cuda}, this is {now.cuda}")
    return found + _precision_difference(model, plan) + _version_differences(then, now)


def _precision_difference(model: nn.Module, plan: Plan) -> list[str]:
    """Weights in 16 bits under a plan for 32: their high precision is another, and faster. Autocast is not seen from here, and
    what the plan leaves alone may be in 16 bits since before it was made."""
    sites, planned = linear_sites(model), [site.site for site in plan.sites if plan.document.moves(site)]
    weights = (sites[site]._parameters.get("weight") for site in planned)  # none where it is computed
    halves = sorted({str(weight.dtype) for weight in weights if weight is not None and weight.dtype.itemsize == 2})
    if plan.document.dtype not in (Format.FP32, Format.TF32) or not halves:
        return []
    return [f"precision: measured with GEMMs in {plan.document.dtype}, the weights here are {' and '.join(halves)}"]


def _version_differences(then: Environment, now: Environment) -> list[str]:
    versions_then, versions_now = {"loka": then.loka, **then.libraries}, {"loka": now.loka, **now.libraries}
    return [
        f"{library}: measured with {version}, here is {versions_now.get(library, 'none')}"
        for library, version in versions_then.items()
        if versions_now.get(library) != version
    ]
