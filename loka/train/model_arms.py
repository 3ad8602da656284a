"""The arms of ``loka bench model``: ways to run the same model, each a function that prepares it in place."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from loka.core.errors import KernelUnavailable
from loka.core.plan import Goal
from loka.core.survey import Survey
from loka.dispatch.apply import apply_plan
from loka.dispatch.freeze import freeze
from loka.kernels.contract import KERNELS, require
from loka.kernels.device import device_of
from loka.measure.torchao_peer import quantize_for_serving
from loka.planner.plan import make_plan
from loka.train.config import Precision
from loka.train.fp8_everywhere import apply_everywhere, see_inputs
from loka.train.quality_settings import MODS


@dataclass(frozen=True)
class Subject:
    """A model about to be timed, in the dtype it is timed in, with its Survey if the arm is planned."""

    dense_part: nn.Module
    example: tuple[Tensor, ...]  # arguments of the dense part, with as many rows as will be timed
    goal: Goal
    survey: Survey | None


@dataclass(frozen=True)
class ModelArm:
    """One way to run a model. ``prepare`` changes it in place and says in a few words what it did."""

    name: str
    precision: Precision = Precision.BF16
    mods: tuple[str, ...] = ()
    prepare: Callable[[Subject], str] = lambda _: ""
    is_planned: bool = False


def _torchao(subject: Subject, recipe: str, auto_filter: bool = False) -> str:
    """torchao's own FP8: its training recipe, or for serving its dynamic quantization of the same granularity."""
    n_linears = _count(subject.dense_part, nn.Linear)
    if subject.goal is Goal.TRAINING:
        from torchao import float8  # pyrefly: ignore[missing-import]

        unable = [] if recipe == "tensorwise" else reading_transposes(subject.dense_part, subject.example)
        chosen_by = float8._auto_filter_for_recipe(recipe, filter_fqns=[]) if auto_filter else _fits_torchao
        config = float8.Float8LinearConfig.from_recipe_name(recipe)
        float8.convert_to_float8_training(
            subject.dense_part,
            config=config,
            module_filter_fn=lambda module, name: name not in unable and chosen_by(module, name),
        )
        n_moved = sum(type(module).__name__ == "Float8Linear" for module in subject.dense_part.modules())
        return f"{n_moved} of {n_linears} linears"
    if recipe == "rowwise_with_gw_hp" or auto_filter:
        raise KernelUnavailable(f"torchao's {recipe}{' with its auto-filter' if auto_filter else ''} is for training alone")
    quantize_for_serving(subject.dense_part, recipe, _fits_torchao)
    return f"{sum(_fits_torchao(module, name) for name, module in subject.dense_part.named_modules())} of {n_linears} linears"


def reading_transposes(model: nn.Module, example: tuple[Tensor, ...]) -> list[str]:
    """The linear layers whose input does not lie row by row. torchao 0.18 cannot scale that by rows ("aten.clone.default with
    axiswise scaling is not supported yet")."""
    found: list[str] = []
    see_inputs(model, example, lambda name, x: None if x.is_contiguous() else found.append(name))
    return found


def _fits_torchao(module: nn.Module, name: str) -> bool:
    """Whether torchao's GEMMs can take the layer at all."""
    return isinstance(module, nn.Linear) and module.in_features % 16 == 0 and module.out_features % 16 == 0


def _count(module: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(part, kind) for part in module.modules())


def _everywhere(subject: Subject, kernel: str) -> str:
    require(KERNELS.get(kernel), device_of(subject.example[0].device))
    done = apply_everywhere(subject.dense_part, subject.example, kernel, trains=subject.goal is Goal.TRAINING)
    return f"{len(done.moved)} of {len(done.moved) + len(done.left)} sites"


def _planned(subject: Subject) -> str:
    """Plan the model and apply the plan; for serving also freeze it, so that weights stay in 8 bits for good."""
    assert subject.survey is not None
    plan = make_plan(subject.survey, goal=subject.goal)
    apply_plan(subject.dense_part, plan, example=subject.example)
    if subject.goal is Goal.SERVING:
        freeze(subject.dense_part, drop_high_precision=True)
    n_blocks = sum(site.block is not None for site in plan.sites)
    n_moved = sum(site.is_low_precision for site in plan.sites)
    return f"{n_moved} of {len(plan.sites)} sites, {n_blocks} as blocks"


BASELINE = "bf16"
_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
_ARMS = (
    ModelArm(BASELINE),
    ModelArm("fp32", Precision.FP32),
    ModelArm("tf32", Precision.TF32),
    ModelArm("mods", mods=MODS),  # what Mods gain in bf16
    *(ModelArm(f"torchao.{recipe}", prepare=partial(_torchao, recipe=recipe)) for recipe in _RECIPES),
    *(ModelArm(f"torchao.{recipe}+filter", prepare=partial(_torchao, recipe=recipe, auto_filter=True)) for recipe in _RECIPES),
    # One kernel at every site, as each library runs it by default; for FBGEMM that is with fast sums.
    ModelArm("fbgemm", prepare=partial(_everywhere, kernel="fbgemm.rowwise_fast")),
    *(ModelArm(name, prepare=partial(_everywhere, kernel=f"torch.{name}")) for name in ("tensorwise", "rowwise", "blockwise")),
    ModelArm("loka-without-mods", prepare=_planned, is_planned=True),
    ModelArm("loka", mods=MODS, prepare=_planned, is_planned=True),
    # What each Mod is worth: by itself in bf16, and to LoKA.
    *(ModelArm(f"mods.{mod}", mods=(mod,)) for mod in MODS),
    *(
        ModelArm(f"loka-without-{mod}", mods=tuple(m for m in MODS if m != mod), prepare=_planned, is_planned=True)
        for mod in MODS
    ),
)
ARMS: dict[str, ModelArm] = {arm.name: arm for arm in _ARMS}
