"""The models by name, and how to build one: ``build_model("wukong", "small", schema)``."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import loka.models
from loka.core.errors import InvalidInput, UnknownName
from loka.core.registry import Registry
from loka.data.batch import FeatureSchema
from loka.models.recommender import Recommender

PRESETS = ("tiny", "small", "base", "large")


@dataclass(frozen=True)
class ModelFamily:
    """One architecture: how to build it from a config (a frozen dataclass) and its configs by size.

    ``tiny`` is for tests, ``small`` trains on a CPU; ``base`` and ``large`` take about 1 and 5 GFLOP an example (forward,
    dense part) on the synthetic stream's features.
    """

    build: Callable[[Any, FeatureSchema], Recommender]
    presets: Mapping[str, Any]

    def __post_init__(self) -> None:
        assert tuple(self.presets) == PRESETS, f"a model comes in the sizes {PRESETS}, not {tuple(self.presets)}"


def _import_models() -> None:
    for module in pkgutil.iter_modules(loka.models.__path__, "loka.models."):
        importlib.import_module(module.name)


MODELS: Registry[ModelFamily] = Registry("model", discover=_import_models)


def build_model(name: str, preset: str, schema: FeatureSchema, **overrides: Any) -> Recommender:
    """Build a model for data of this schema; ``overrides`` replace fields of the preset's config, e.g. ``dropout=0.2``."""
    family = MODELS.get(name)
    if preset not in family.presets:
        raise UnknownName(f"{name} has no preset {preset!r}. Known: {', '.join(family.presets)}")
    config = family.presets[preset]
    fields = [field.name for field in dataclasses.fields(config)]
    unknown = sorted(set(overrides) - set(fields))
    if unknown:
        raise InvalidInput(f"{name} has no option {', '.join(unknown)}. It has: {', '.join(fields)}")
    return family.build(dataclasses.replace(config, **overrides), schema)
