"""The models by name, and how to build one: ``build_model("wukong", "small", schema)``."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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


MODELS: Registry[ModelFamily] = Registry("model", "loka.models")


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
    for option, value in overrides.items():
        _check_option(name, option, value)
    return family.build(dataclasses.replace(config, **overrides), schema)


def _check_option(model: str, option: str, value: object) -> None:
    """Options are counts and widths (at least 1), lists of widths (at least one) and the dropout probability."""
    if option == "dropout":
        good, expected = isinstance(value, int | float) and 0 <= value < 1, "a probability from 0 to below 1"
    elif option.endswith("_widths"):
        good = isinstance(value, tuple | list) and len(value) > 0 and all(_is_count(width) for width in value)
        expected = "one width or more, each a whole number of at least 1"
    else:
        good, expected = _is_count(value), "a whole number of at least 1"
    if not good:
        raise InvalidInput(f"{model}: {option} must be {expected}, got {value!r}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
